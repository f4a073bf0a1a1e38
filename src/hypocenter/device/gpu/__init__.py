"""A real GPU: allocations, copies, launches and graphs by torch and Triton.

Door: `torch_gpu.open_gpu`. `errors.py` says what the runtime's errors mean, `host.py` has memory
of the host that a GPU reaches.
The only room that touches a driver. Never imported where no GPU was asked for.
"""
