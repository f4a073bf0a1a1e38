"""Launches of AMD's machine code, checked: HIP sources, code objects, kernels of Triton.

Door: `amd`, which is `hypocenter.amd`; `launch_file` reads launches from TOML.
The code is executed by our emulator of it; not hardware. Never runs code of the host's.
"""
