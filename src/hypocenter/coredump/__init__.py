"""Reads what a GPU's debugger wrote when it stopped: NVIDIA's core dumps, AMD's debug agent.

Door: `nvidia.read_core_dump` for a file, `debug_agent.read_debug_agent` for a text; both give
`record.gpu_stop.GpuStop`. Dumps are foreign data: every count has a bound, every read is checked.
Never runs anything of a dump, and needs no GPU, no debugger and no library of a vendor's.
"""
