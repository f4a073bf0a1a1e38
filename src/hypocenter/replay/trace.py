"""The accesses of one program of a recorded launch, lane by lane, with its real addresses.

For whoever knows from the GPU itself which program it was; judges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError, NotReplayed
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import Place, TensorRecord
from hypocenter.replay.arguments import SPACE_BITS, Argument
from hypocenter.replay.findings import Finding, ReplayReport, Site
from hypocenter.replay.rebuild import Rebuilt, recorded_site
from hypocenter.replay.replay import replay
from hypocenter.replay.sites import kernel_frames, site_of
from hypocenter.replay.source import kernel_of
from hypocenter.replay.terms import Observers, Schedule

#: Accesses of a program that are kept, and lanes of one.
MAX_ACCESSES, MAX_LANES = 4096, 1 << 16
_MISFITS = (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, eq=False)
class LaneAccess:
    """One access: `sites` are its call chain, the innermost first.

    `pointers` and `values` are of the lanes that its mask lets through. The former are addresses of
    the replay, of which `ProgramTrace.real` makes those of the GPU. A lane moves `width_bytes`.
    """

    operation: str
    sites: tuple[Site, ...]
    pointers: Array
    values: Array
    width_bytes: int


@dataclass(frozen=True, slots=True)
class ProgramTrace:
    """What one program did, in order; `tensors` are those of the launch by parameter."""

    accesses: tuple[LaneAccess, ...]
    arguments: tuple[Argument, ...]
    tensors: Mapping[str, TensorRecord]
    report: ReplayReport

    def argument_of(self, access: LaneAccess) -> Argument | None:
        """The tensor that the first lane aims at; None for an address that is of none."""
        if not access.pointers.size:
            return None
        space = int(access.pointers[0]) >> SPACE_BITS
        return next((a for a in self.arguments if a.address >> SPACE_BITS == space), None)

    def real(self, access: LaneAccess, base: Argument | None) -> list[int]:
        """Where the lanes would be on the GPU, as far as they are worked out from `base`."""
        tensor = self.tensors.get(base.name) if base is not None else None
        moved = tensor.address - base.address if tensor is not None and base is not None else 0
        return [(int(pointer) + moved) % (1 << 64) for pointer in access.pointers]

    def findings_at(self, access: LaneAccess) -> list[Finding]:
        """What is wrong at the very place of an access."""
        return [finding for finding in self.report.findings if finding.sites == access.sites]


def trace_program(
    index: BundleIndex,
    place: Place,
    program: int,
    corrections: Mapping[str, Any] | None = None,
    *,
    allow_source: bool = False,
    seconds: float = 4.0,
) -> ProgramTrace:
    """Replay program `program` (its linear number, x fastest) of the launch at `place`, alone.

    Raises as `replay_place` does.
    """
    launch = index.launch(place)
    kernel = kernel_of(index, launch, allow_source=allow_source)
    kept: list[LaneAccess] = []
    arguments: list[Argument] = []

    def keep(operation: str, pointers: Array, mask: Array, values: Array, width: int) -> None:
        if len(kept) >= MAX_ACCESSES or pointers.size > MAX_LANES:
            return
        active = np.broadcast_to(mask, pointers.shape).reshape(-1)
        kept.append(
            LaneAccess(
                operation.removesuffix("_cas"),
                tuple(recorded_site(site_of(frame)) for frame in kernel_frames()),
                pointers.reshape(-1)[active],
                np.broadcast_to(values.reshape(-1), active.shape)[active],
                width,
            )
        )

    try:
        rebuilt = Rebuilt(index, place, launch, dict(corrections or {}))
        report = replay(
            kernel,
            rebuilt.grid,
            rebuilt.arguments,
            schedule=Schedule([program], budget_seconds=seconds, program_seconds=seconds),
            observers=Observers(arguments.extend, on_lanes=keep),
        )
    except HypoError:
        raise
    except _MISFITS as error:
        told = f"{type(error).__name__}: {error}"
        raise NotReplayed(launch.kernel, f"has a record that makes no sense ({told})") from error
    findings = tuple(map(rebuilt.restate, report.findings))
    whole = ReplayReport(findings, report.headroom, report.coverage)
    return ProgramTrace(tuple(kept), tuple(arguments), rebuilt.tensors, whole)
