"""What is right about a planted fault: the five claims that a report can make of it.

Every collection says it in this form, beside the fault itself. Judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

#: No fix of a tensor whose size is what its shape says.
LARGER = r"\b(make|give|let)\b[^.;]*\b(larger|more room)\b|room for"
TOO_SMALL = "buffer too small"
_INSIDE = r"inside|below|<|range|mask"
#: What a fix of a cause must say where the truth of a fault has no pattern of its own.
FIX_OF = {
    "offset overflow": r"64",
    "dtype width": r"dtype|width|cast|type|bytes",
    "wrong stride": r"stride|pitch|contiguous",
    "misalignment": r"align|multiple|element by element",
    "null pointer": r"allocate|pass|give",
    "host pointer": r"copy|device",
    "tensor on another device": r"copy|device",
    "use after free": r"keep|alive",
    "captured pointer freed": r"keep|alive|capture",
    "missing tail mask": r"mask",
    "off by one": r"earlier|inside|<",
    "index out of range": _INSIDE,
    "token id out of range": _INSIDE,
    "position out of range": _INSIDE,
    "block table entry out of range": _INSIDE,
    "sentinel consumed": rf"{_INSIDE}|-1",
    "race between programs": r"one program|atomic|launch",
    "endless loop": r"loop|bound|wait|release",
    "grid over the limit": r"grid|axis",
    "grid product over 32 bits": r"split|launch",
    "shared memory over the limit": r"smaller|fewer|stage",
    "missing wait between streams": r"wait|event",
    "buffer rewritten in flight": r"wait|event|synchron",
    "uninitialised read": r"clear|write|mask|zero",
    "non-finite padding": r"mask|other",
}


@dataclass(frozen=True, slots=True)
class Fix:
    """What a fix must say, and what it must not, as patterns; `never` is also for the sentence.

    Where it need say nothing of its own, it must say what `FIX_OF` has for its cause.
    """

    says: str = ""
    never: str = LARGER


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What a report has to say. What is left out is no claim that could be wrong.

    It names one of `causes`; without any nothing may be named. The kernel is one of `kernels`, as
    its launch or its function is called; a name that ends with `_` is how those of a compiler
    begin, and an empty one stands for no kernel. The argument is one of `arguments`, by contract
    or source. `lines` are texts of which one stands in the guilty line. `undecided` says why no
    record can prove any of it, where that is so: silence is right then, too.
    """

    causes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    fix: Fix = field(default_factory=Fix)
    undecided: str = ""

    @property
    def is_seen(self) -> bool:
        """Whether it is of a kind that a doctor looks for, and can prove."""
        return bool(self.causes) and not self.undecided

    def places(self, file: str, text: str, first_line: int = 1) -> Iterable[tuple[str, int]]:
        """File and line of the guilty lines in a text that begins with line `first_line`."""
        for at, line in enumerate(text.splitlines(), first_line):
            if any(part in line for part in self.lines):
                yield file, at
