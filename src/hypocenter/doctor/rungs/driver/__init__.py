"""Rungs over what the driver itself recorded: kernels that are not Triton's.

Door: `launches.py`; `launch_sight.py` joins a launch with a dump and with memory.
Never runs a kernel: what CUDA C does is known here by its machine code and by addresses alone.
"""
