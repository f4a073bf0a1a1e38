"""Every op: its formula, its contract, a plain reference, and its kernels.

Doors: `contract.py`, in which an op says what it demands of its arguments, and `registry.py`, which
finds a contract again. Per op `X.py` is the op, `X_cpu.py` its numba kernels and `X_gpu.py` its
Triton kernels, which are imported only where a GPU is asked for.
Never launches by itself: ops append to a plan.
"""
