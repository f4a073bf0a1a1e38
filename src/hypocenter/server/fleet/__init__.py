"""Several cards behind one server: each card's workers, and what a card has read already.

Doors: `Replica` and `Prefixes`. They never decide who gets a place: `turns/places.py` does.
"""
