"""Runs launches again on the CPU, with every access checked.

Doors: `replay.replay` for a launch as it is, `recorded.py` for one out of a bundle, `live.py` for
one of this process. What was found is in `findings.py`.
Never runs the text of a bundle unless the caller allows that.
"""
