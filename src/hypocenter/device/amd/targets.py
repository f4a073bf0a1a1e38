"""AMD's targets by the number that a code object carries.

Source: LLVM's user guide of the AMDGPU backend, "ELF Header", `EF_AMDGPU_MACH` and the features
of code object V4 and later; each number below is also what clang 19 writes.
"""

from __future__ import annotations

from dataclasses import dataclass

_MACH, _XNACK, _SRAMECC = 0xFF, 0x300, 0xC00
_FEATURE = ("", "", "-", "+")
_NUMBERS = (
    "2C=gfx900 2D=gfx902 2E=gfx904 2F=gfx906 30=gfx908 31=gfx909 3F=gfx90a "
    "32=gfx90c 40=gfx940 4B=gfx941 4C=gfx942 4F=gfx950 33=gfx1010 34=gfx1011 "
    "35=gfx1012 42=gfx1013 36=gfx1030 37=gfx1031 38=gfx1032 39=gfx1033 3E=gfx1034 "
    "3D=gfx1035 45=gfx1036 41=gfx1100 46=gfx1101 47=gfx1102 44=gfx1103 43=gfx1150 "
    "4A=gfx1151 55=gfx1152 48=gfx1200 4E=gfx1201 "
)
_NAMES = {int(number, 16): name for number, _, name in (e.partition("=") for e in _NUMBERS.split())}
#: Targets whose machine code can be executed here.
EXECUTED = ("gfx942", "gfx950", "gfx1100", "gfx1201")


@dataclass(frozen=True, slots=True)
class AmdTarget:
    """What code was made for: `xnack` and `sramecc` are "", "+" or "-"; "" runs with both."""

    arch: str
    xnack: str = ""
    sramecc: str = ""

    @property
    def is_cdna(self) -> bool:
        """Waves of 64, accumulators, one processor a block: gfx9."""
        return self.arch.startswith("gfx9")

    def __str__(self) -> str:
        features = (("sramecc", self.sramecc), ("xnack", self.xnack))
        return self.arch + "".join(f":{name}{sign}" for name, sign in features if sign)


def target_of_flags(flags: int) -> AmdTarget | None:
    """The target that `e_flags` names; None for a number that is not known here."""
    name = _NAMES.get(flags & _MACH)
    if name is None:
        return None
    return AmdTarget(name, _FEATURE[(flags & _XNACK) >> 8], _FEATURE[(flags & _SRAMECC) >> 10])
