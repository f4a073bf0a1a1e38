"""Looks at a process from outside: how it ended, and what it left behind.

Door: `child.watch` runs a command, `collect.collect` makes a bundle of what it left. Both
`hypo doctor -- COMMAND` and whoever keeps workers alive stand on it.
Never imports a device or an engine, and never says why something happened.
"""
