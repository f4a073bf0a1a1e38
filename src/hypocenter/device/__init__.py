"""Memory, copies, launches and plans on every device, each through one door.

Doors: `memory.py` for allocations, `copies.py` for copies, `launch.py` for launches, `plan.py` for
steps. `backend.py` is what a GPU implements: real (`gpu/`) or simulated (`sim/`); `offline/` knows
GPUs that are not here. `guard/` makes checked variants of kernels, `interpret/` runs them on the
CPU, `cpu/` compiles them for it.
Never knows a model, and never what a kernel computes.
"""
