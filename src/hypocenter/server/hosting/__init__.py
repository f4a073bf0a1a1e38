"""The models of one server: which there are, which are loaded, and who makes room for whom.

Door: `Hosting`. It never loads an engine: workers do.
"""
