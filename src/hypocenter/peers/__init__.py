"""The same model in another engine, hooked at the points of a trace, and whose fault it is if they
differ.

Doors: `asking.ask`, `pairing.trace_of`, `verdict.judge`. The programs that load another engine run
in processes of their own; nothing else here imports one, and a hub is never asked.
"""
