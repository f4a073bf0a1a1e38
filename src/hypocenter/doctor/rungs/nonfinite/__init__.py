"""What a run with `--nan` saw, as causes: the first operation, or the lane of a kernel.

Door: `first.nonfinite`. Never runs an operation of torch's: the run did that.
"""
