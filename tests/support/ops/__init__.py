"""Single ops: launches of them, the forms in which they run, and what bounds their errors."""
