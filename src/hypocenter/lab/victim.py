"""What a victim declares: the defect that it plants, how that shows, and the truth about it.

Each module of `lab/victims/` holds one VICTIM and is found by itself. Nothing here runs one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypocenter.base.errors import MissingPackage, UsageError
from hypocenter.doctor.causes import Cause

if TYPE_CHECKING:
    from hypocenter.lab.lab import Lab

#: How a defect shows: the process or its device dies, an error is raised, nothing ends any more,
#: a number is no number, the text is not that of the twin, or nothing at all is to be seen.
SYMPTOMS = ("crash", "error", "hang", "nonfinite", "differs", "none")


def nothing(lab: Lab) -> None:
    """The twin of a victim whose path is the engine's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A change of the engine, and how the run that has it ends.

    `plant` puts it in before the model is loaded, `twin` goes the same way without it. `hides`
    marks one that is not to be seen while everything is traced, which waits after each launch.
    """

    name: str
    title: str
    symptom: str
    plant: Callable[[Lab], None]
    twin: Callable[[Lab], None] = nothing
    device: str = "sim:mi300x"
    hides: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Harmless(Planted):
    """A change that does no harm: beside its twin as the good run the doctor must find nothing."""

    symptom: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim(Planted):
    """One defect. The kernel as its launch is called; its argument by contract or source.

    `also` lists other right names of the argument: its array in a packed weight, the number that
    holds its stride. `line` is the guilty line of source, unique in its file, or the lines that
    are equally guilty; None where the kernel is innocent. `source` is a public report of such a
    defect. `address` is what the report must say of the fault's address, where there is one.
    """

    cause: Cause
    kernel: str | None = None
    argument: str | None = None
    also: tuple[str, ...] = ()
    line: str | tuple[str, ...] | None = None
    source: str = ""
    address: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        return (self.line,) if isinstance(self.line, str) else self.line or ()


def victims(names: Sequence[str] = ()) -> list[Victim]:
    """All victims, or those named, by name; raises UsageError for a name that nobody has."""
    from hypocenter.lab import victims as package

    known = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"there is no victim {unknown[0]!r}; hypo lab list names all of them")
    # Of those that are not asked for some need Triton.
    return [_victim(name) for name in dict.fromkeys(names or known)]


def victims_without(missing: Callable[[str], None]) -> list[Victim]:
    """All victims but those that need a package that is not installed: `missing` hears their
    names."""
    from hypocenter.lab import victims as package

    found = []
    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        try:
            found.append(_victim(name))
        except MissingPackage:
            missing(name)
    return found


def _victim(name: str) -> Victim:
    victim: Victim = importlib.import_module(f"hypocenter.lab.victims.{name}").VICTIM
    assert victim.name == name, victim.name
    return victim
