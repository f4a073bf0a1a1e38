"""What a victim declares: the defect that it plants, how that shows, and the truth about it.

Each module of `victims/` holds one VICTIM and is found by itself. Nothing here runs one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faults.truth import Truth
from hypocenter.base.errors import UsageError

if TYPE_CHECKING:
    from faults.lab import Lab

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
    """One defect. Its kernel is named as the launch is, or as the function; "" where it has none.

    A guilty line stands once in all kernels, or is one of several that are equally guilty; there is
    none where the kernel is innocent. `source` is a public report of such a defect. `address` is
    what the report must say of the fault's address, where there is one. `on_card`: real hardware
    has the defect too, which hangs on nothing that only a simulated GPU does. `as_machine_code` is
    its symptom as AMD's machine code, where that is another one; the file says why. `of_nvidia`: a
    GPU of AMD's does not mind.
    """

    truth: Truth
    source: str = ""
    address: str = ""
    on_card: bool = False
    as_machine_code: str = ""
    of_nvidia: bool = False


def victims(names: Sequence[str] = ()) -> list[Victim]:
    """All victims, or those named, by name; raises UsageError for a name that nobody has."""
    from faults import victims as package

    known = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"there is no victim {unknown[0]!r}; python -m faults --list names them")
    return [_victim(name) for name in dict.fromkeys(names or known)]


def _victim(name: str) -> Victim:
    victim: Victim = importlib.import_module(f"faults.victims.{name}").VICTIM
    assert victim.name == name, victim.name
    return victim
