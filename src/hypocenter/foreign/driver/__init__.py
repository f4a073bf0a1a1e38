"""Sees what a process asks of NVIDIA's driver, whoever asks: CUDA C, numba, CuPy, torch's kernels.

Door: `arming.py`, which `foreign/hooks.py` calls; `watch.py` has the callbacks, `library.py` the
functions of others that are called. What is seen is written by `record/driver_log.py`.
Never changes a call: it writes down what was asked, and what the driver answered.
"""
