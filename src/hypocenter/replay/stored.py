"""Which program of a recorded launch stored an element last, at which line, and what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError, NotReplayed
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import Place
from hypocenter.replay.arguments import Argument
from hypocenter.replay.findings import Site
from hypocenter.replay.rebuild import Rebuilt, recorded_site
from hypocenter.replay.replay import replay
from hypocenter.replay.sites import kernel_frames, site_of
from hypocenter.replay.source import kernel_of
from hypocenter.replay.terms import KernelText, Observers, ReadOperands, Schedule

#: Lanes of stores that are kept of a launch.
MAX_LANES = 1 << 22
_MISFITS = (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class LastStore:
    """`value` is what the replay stored there, None for an atomic, which adds to what was."""

    parameter: str
    program: tuple[int, int, int]
    site: Site
    value: int | float | None


@dataclass(slots=True)
class _Stores:
    """All stores of a replay, in order: program, line, addresses, and values of a plain one."""

    program: tuple[int, int, int] = (0, 0, 0)
    num_lanes: int = 0
    kept: list[tuple[tuple[int, int, int], Site, Array, Array | None]] = field(default_factory=list)
    arguments: list[Argument] = field(default_factory=list)

    def begin(self, program: tuple[int, int, int]) -> None:
        self.program = program

    def keep(self, operation: str, pointers: Array, mask: Array, values: Array, width: int) -> None:
        if operation == "load" or self.num_lanes > MAX_LANES:
            return
        active = np.broadcast_to(mask, pointers.shape).reshape(-1)
        flat = np.broadcast_to(values.reshape(-1), active.shape)[active]
        self.num_lanes += int(active.sum())
        site = recorded_site(site_of(next(iter(kernel_frames()))))
        stored = flat if operation == "store" else None
        self.kept.append((self.program, site, pointers.reshape(-1)[active], stored))

    def last_at(self, parameter: str, address: int) -> LastStore | None:
        for program, site, addresses, values in reversed(self.kept):
            at = np.flatnonzero(addresses == np.uint64(address))
            if at.size:
                value = None if values is None else values[at[-1]].item()
                return LastStore(parameter, program, site, value)
        return None


def last_store(
    index: BundleIndex,
    place: Place,
    parameters: Sequence[str],
    address: int,
    *,
    text: KernelText,
    seconds: float = 4.0,
    operands: ReadOperands | None = None,
) -> LastStore | None:
    """The last store to an element at `address`, as the program had it, through `parameters`.

    None where there is none. `operands` as in Schedule. Raises as `replay_place` does, and
    NotReplayed for a part of it.
    """
    launch = index.launch(place)
    stores = _Stores()
    try:
        kernel = kernel_of(index, launch, allow_source=text.may_run, edited=text.edited)
        rebuilt = Rebuilt(index, place, launch, {})
        report = replay(
            kernel,
            rebuilt.grid,
            rebuilt.arguments,
            schedule=Schedule(budget_seconds=seconds, program_seconds=seconds, operands=operands),
            observers=Observers(stores.arguments.extend, stores.keep, stores.begin),
        )
        if not report.coverage.is_complete or stores.num_lanes > MAX_LANES:
            raise NotReplayed(launch.kernel, "was replayed in part only")
        for argument in stores.arguments:
            tensor = rebuilt.tensors.get(argument.name)
            if argument.name not in parameters or tensor is None:
                continue
            moved = argument.address + address - tensor.address
            if (found := stores.last_at(argument.name, moved)) is not None:
                return found
    except HypoError:
        raise
    except _MISFITS as error:
        told = f"has a record that makes no sense ({type(error).__name__}: {error})"
        raise NotReplayed(launch.kernel, told) from error
    return None
