"""Planted faults in the workers of a server: what clients get.

Door: `serve.main`. The doctor is not asked.
"""
