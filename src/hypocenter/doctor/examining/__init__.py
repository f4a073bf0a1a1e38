"""What bounds an examination: its time, and why something has no verdict.

Never finds a cause.
"""
