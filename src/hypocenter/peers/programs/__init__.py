"""Programs for the interpreters of other engines.

Doors: each by its path. They never import from here.
"""
