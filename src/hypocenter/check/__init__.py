"""`hypo check` and `hypo kernels`: the Triton launches of a file that somebody wrote.

Doors: `check.check` runs the file in a process of its own (`runtime.py`), where launches come to
`launches.py`; `compile_pool.py` compiles specimens.
Never runs the file in this process.
"""
