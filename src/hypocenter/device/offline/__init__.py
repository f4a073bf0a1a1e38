"""GPUs that are not here: what their compiler makes of a kernel, and what would fit.

Door: `compile.compile_specimen`. A specimen (`specimen.py`) says how a kernel is launched;
`abstract.py` is a device that runs nothing and remembers that of each launch.
Never launches a kernel.
"""
