"""Attention over a paged cache, and what fills that: rotation, and the writing of keys and values.

Doors: `attention.attention`, `rope_write.rope_write`. The unfused parts of attention, which are
checked against the fused one, are in `unfused.py`.
Never knows a request: tokens, positions, slots and block tables are tensors.
"""
