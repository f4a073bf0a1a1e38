"""How weights of each GGUF type are read and packed for CPUs and GPUs.

Door: `packing.pack`. `block_types.py` has the types, `cpu_layout.py` and `gpu_layout.py` where the
numbers of a packed weight lie.
Never computes with them.
"""
