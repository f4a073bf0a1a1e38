"""Records Triton launches of programs that know nothing of this package.

Door: `startup/sitecustomize.py`, which `hypo doctor -- COMMAND` puts into their PYTHONPATH; it
loads `hooks.py` when they load torch or Triton, and `recorder.py` writes.
Never changes what the program does; whatever goes wrong in here is told once and left.
"""
