"""What a run with `--nan` saw, as causes: the first operation, or the lane of a kernel.

Door: `first.nonfinite`. Computes nothing but replays of Triton's launches.
"""
