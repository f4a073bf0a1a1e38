"""CPU kernels: the words that they are written in, their compiler and the threads that run them.

Doors: `lang.cpu_kernel`, and `kernel_forms.named_kernel` for who launches one. The words are in
`vector*.py`, `sums.py`, `*codes.py` and `*floats.py`; `code_cache.py` keeps machine
code on disk, `object_code.py` links it; `pool.py` and `native.py` run a step in one call. numba is
imported where something is compiled or read by it, and by nothing that a launch needs.
The only room that imports numba and llvmlite. Never imports torch or Triton.
"""
