"""Reads what a GPU's debugger wrote when it stopped: core dumps, and AMD's debug agent.

Doors: `nvidia.read_core_dump` and `amd_dump.read_amd_dump` for a file,
`debug_agent.read_debug_agent` for a text; all give `record.gpu_stop.GpuStop`. Dumps are foreign
data: every count has a bound, every read is checked. Never runs anything of a dump, and needs no
GPU, no debugger and no library of a vendor's.
"""
