"""What comes from strangers, before a route sees it: framing of bodies, sizes, whose pages may ask.

Doors: `Strangers`, `Bodies`, `BodyShape` and `Chunks`. Each file holds one rule. `connection.py` and
`app.py` of the server apply them. It never waits for a worker, and never sends anything.
"""
