"""The rung of order: streams, events, copies, and memory that several of them use.

Doors: `streams.order` for a run of this package's engine, and through it `program_order` for any
other program. Never says that work is in order of which nothing was recorded.
"""
