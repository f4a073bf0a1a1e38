"""What numba compiles for: this machine, less what HYPO_INSTRUCTIONS leaves out.

numba reads that once, when it first compiles anything in a process. So whatever compiles by it has
this imported before: a CPU kernel, and the emulator of AMD's code, which would else settle it for
the kernels, too.
"""

from __future__ import annotations

import platform

import numba
from llvmlite import binding

from hypocenter.device.cpu import instructions


def _limit_instructions(name: str) -> None:
    """Have numba leave out what is beyond the path `name`, if it is one of this machine's."""
    if not name or platform.machine() not in ("x86_64", "AMD64"):
        return
    allowed = instructions.limit_features(name, binding.get_host_cpu_features())
    numba.config.CPU_NAME = binding.get_host_cpu_name()
    numba.config.CPU_FEATURES = ",".join(
        f"{'+' if has else '-'}{feature}" for feature, has in sorted(allowed.items())
    )


_limit_instructions(instructions.asked_for())
