"""What bounds an examination: its time, and why something has no verdict.

Doors: `time_limit.TimeLimit` and `untested.why_untested`. Never finds a cause.
"""
