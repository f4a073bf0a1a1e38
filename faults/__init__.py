"""Planted faults and healthy changes, and what the doctor says of each.

Door: `python -m faults`. `truth.py` is what is right about a fault, `judge.py` how a report is
held against it. The doctor is never told what was planted. Imports hypocenter, and never back.
"""
