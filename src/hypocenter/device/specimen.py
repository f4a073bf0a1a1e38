"""A kernel with the types, constants and options of one launch: what can be compiled with no GPU.

`model/specimens.py` finds those of the project by planning; nothing here imports Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Specimen:
    """One way in which a kernel is launched.

    `signature` maps each run-time parameter to Triton's type (`*fp16`, `*u8`, `i32`, `fp32`),
    `constants` each other parameter to its value, `divisible` names the pointers and integers that
    are multiples of 16, as those of whole tensors are, `huge` the pointers to more than 2 GiB.
    `options` are the launch's `num_warps`, `num_stages` and so on. `label` tells several specimens
    of a kernel apart.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    huge: tuple[str, ...] = ()

    @property
    def jit(self) -> Any:
        """Triton's function inside `kernel`, which may be an object of the launch door."""
        return getattr(self.kernel, "jit", self.kernel)

    @property
    def name(self) -> str:
        """The kernel's name, as a launch log shows it."""
        return str(getattr(self.kernel, "name", None) or self.kernel.__name__)
