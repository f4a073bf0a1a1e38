"""What comes from strangers, before a route sees it: framing of bodies, sizes, whose pages may ask.

Doors: `Strangers`, `Bodies`, `BodyShape`, `Chunks`, `Parser` and `Resting`. Each file holds one
rule, which the server's `connection.py` or `app.py` applies. It never waits for a worker, and never
sends anything.
"""
