"""Processes that hold one model together: the one with the engine, and those that follow it.

Doors: `ranks.Ranks`, and `program`, which each of the others runs. Never computes anything.
"""
