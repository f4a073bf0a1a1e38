"""Variants of Triton kernels in which an access outside its tensor is masked off and recorded.

Door: `guard.guard` makes one, `launches.GuardedLaunches` runs a plan of them. They are derived from
the kernel's source (`derive.py`, `roots.py`), by the functions of `ops_gpu.py`.
Never changes what an access inside its tensor does.
"""
