"""Texts of kernels with one thing changed, which may be right; a replay says whether one is.

Doors: `bound_text.bounds_of`, `index_text.indices_of`. These files never run a kernel.
"""
