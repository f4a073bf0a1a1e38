"""The choice of the next token from logits, on the host and where the logits lie.

Door: `sampling.sample`. All that a choice depends on is a `draw.TokenChoice`.
Never keeps a state of its own: the random number hangs on seed and position.
"""
