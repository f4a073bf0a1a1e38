"""Which of the proven causes is the root, and which launch made a bad entry that it is about.

Door: `judge.judge`. Never looks for a defect: the rungs have done that.
"""
