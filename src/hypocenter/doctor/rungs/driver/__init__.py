"""Rungs over what the driver recorded of kernels that are not Triton's, and its dumps' registers.

Doors: `launches.py`, and `wrapped_index.py`, of which `gpu_stop.py` asks; `launch_sight.py` joins a
launch with a dump and with memory.
Never runs a kernel: what CUDA C does is known here by its machine code and by addresses alone.
"""
