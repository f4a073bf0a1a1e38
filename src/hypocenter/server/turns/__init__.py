"""Whose turn it is among clients: to be read, and to have a place with the worker.

Doors: `fair_order.FairOrder` and `places.Places`. Never sends anything to anybody.
"""
