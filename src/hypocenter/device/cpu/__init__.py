"""CPU kernels: the words that they are written in, their compiler and the threads that run them.

Door: `lang.cpu_kernel`. The words are in `vector*.py`, `sums.py` and `*codes.py`, `*floats.py`;
`code_cache.py` keeps machine code on disk, `pool.py` and `native.py` run a step in one call.
The only room that imports numba and llvmlite. Never imports torch or Triton.
"""
