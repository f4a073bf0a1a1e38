"""A kernel with the types, constants and options of one launch: what can be compiled with no GPU.

`model/offline/specimens.py` finds those of the project by planning; nothing here imports Triton.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

#: A pointer is to a tensor in so much memory, or more: AMD's compiler is not told then that 32 bits
#: hold each offset (`is_within_2gb` of Triton's backend for AMD).
HUGE_BYTES = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class Specimen:
    """One way in which a kernel is launched.

    `signature` maps each run-time parameter to Triton's type (`*fp16`, `*u8`, `i32`, `fp32`),
    `constants` each other parameter to its value, `divisible` names the pointers and integers that
    are multiples of 16, as those of whole tensors are, `huge` the pointers to more than 2 GiB.
    `options` are the launch's `num_warps`, `num_stages` and so on. `label` tells several specimens
    of a kernel apart. `vendor` is whose GPUs are launched so, empty for everybody's, and hopper for
    those of NVIDIA that take wide tiles.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    huge: tuple[str, ...] = ()
    vendor: str = ""

    @property
    def jit(self) -> Any:
        """Triton's function inside `kernel`, which may be an object of the launch door."""
        return getattr(self.kernel, "jit", self.kernel)

    @property
    def name(self) -> str:
        """The kernel's name, as a launch log shows it."""
        return str(getattr(self.kernel, "name", None) or self.kernel.__name__)

    def key(self) -> tuple[Any, ...]:
        """Equal for launches that compile to the same."""
        facts = (self.signature, self.constants, self.options)
        return (
            self.jit.fn,
            *(tuple(sorted(fact.items())) for fact in facts),
            self.divisible,
            self.huge,
        )


def of_device(names: Iterable[str], *, is_nvidia: bool, overlaps: bool) -> dict[str, bool]:
    """Constants among a kernel's parameters `names` that the GPU decides, and not the launch.

    They choose instructions and never a result: the interpreter, which has none of NVIDIA's, takes
    both for false.
    """
    known = {"ON_NVIDIA": is_nvidia, "OVERLAPS": overlaps}
    return {name: known[name] for name in names if name in known}


def is_of_device(option: str) -> bool:
    """Whether the GPU decides a constant or an option of a launch."""
    return option == "launch_pdl" or bool(of_device([option], is_nvidia=True, overlaps=True))


def told_apart(specimens: Sequence[Specimen]) -> list[Specimen]:
    """The same specimens with labels that differ within a kernel: what differs is added to them."""
    same: defaultdict[tuple[str, str], list[Specimen]] = defaultdict(list)
    for specimen in specimens:
        same[specimen.name, specimen.label].append(specimen)
    taken: Counter[tuple[str, str]] = Counter()
    result = []
    for specimen in specimens:
        label = specimen.label
        others = same[specimen.name, label]
        if len(others) > 1:
            label = ", ".join(filter(None, (label, _differences(specimen, others))))
        taken[specimen.name, label] += 1
        if (number := taken[specimen.name, label]) > 1:
            label = f"{label} #{number}"
        result.append(replace(specimen, label=label))
    return result


def _differences(specimen: Specimen, others: Sequence[Specimen]) -> str:
    """What this one's parameters and options are, where the others are different."""
    facts = [{**other.signature, **other.constants, **other.options} for other in others]
    own = {**specimen.signature, **specimen.constants, **specimen.options}
    differs = {name for name in own if any(own[name] != other.get(name) for other in facts)}
    plain = {name for name in specimen.divisible if any(name not in o.divisible for o in others)}
    return " ".join(
        [f"{name}={own[name]}" for name in own if name in differs]
        + [f"{name}%16=0" for name in specimen.divisible if name in plain - differs]
    )
