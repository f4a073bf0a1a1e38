"""Which operation of a recorded launch gave the first NaN or infinity that it stored.

The launch runs again with what it was given. The operation is found by putting zeros in the place
of what it gave: what is stored is finite then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError, NotReplayed
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import Place, TensorRecord
from hypocenter.replay.arguments import Argument
from hypocenter.replay.compare import LeftBehind, left_behind
from hypocenter.replay.findings import Site
from hypocenter.replay.rebuild import Rebuilt, recorded_site
from hypocenter.replay.replay import replay
from hypocenter.replay.sites import kernel_frames, site_of
from hypocenter.replay.source import kernel_of
from hypocenter.replay.terms import KernelText, Observers, Schedule

#: Operations that are kept of a launch, stores, and operations that are tried.
MAX_STEPS, MAX_STORES, MAX_TRIED = 4096, 4096, 8
_MISFITS = (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError)
#: They choose and change no number.
_PASSING = frozenset({"load", "where", "cast"})


@dataclass(frozen=True, slots=True)
class NumberStep:
    """An operation of a program that gave NaN of none, or infinity of finite numbers.

    `sites` is its call chain, the innermost first; `operands` are what one lane had (`lane`), of
    those that are spread over the result. `number` counts such operations of its program.
    """

    program: tuple[int, int, int]
    number: int
    operation: str
    sites: tuple[Site, ...]
    lane: tuple[int, ...]
    operands: tuple[float, ...]
    value: float
    num_lanes: int


@dataclass(frozen=True, slots=True)
class NumberTrace:
    """The operation, what the program then `stored`, and what with zeros in its result's place."""

    step: NumberStep
    stored: float
    changed: float


@dataclass(slots=True)
class _Seen:
    """What one replay saw; `repaired` are the places, in their program, of what gives `instead`."""

    repaired: frozenset[tuple[str, tuple[Site, ...]]] = frozenset()
    instead: float = 0.0
    program: tuple[int, int, int] = (0, 0, 0)
    num_of_program: int = 0
    steps: list[NumberStep] = field(default_factory=list)
    #: Program, addresses and values of stores.
    stores: list[tuple[tuple[int, int, int], Array, Array]] = field(default_factory=list)
    arguments: list[Argument] = field(default_factory=list)
    wanted: Callable[[Array], bool] = lambda values: not bool(np.isfinite(values).all())

    def note(
        self,
        program: tuple[int, int, int],
        operation: str,
        operands: tuple[Array, ...],
        result: Array,
    ) -> Array | None:
        """An operation gave what is not finite; `instead` for one that is repaired."""
        if program != self.program:
            self.program, self.num_of_program = program, 0
        self.num_of_program += 1
        made = _mask_of_made(operation, operands, result)
        if made is None:
            return None
        sites = tuple(recorded_site(site_of(frame)) for frame in kernel_frames())
        if (operation, sites) in self.repaired:
            return np.where(made, self.instead, result)
        if len(self.steps) < MAX_STEPS:
            flat = int(made.argmax())
            lane = tuple(int(n) for n in np.unravel_index(flat, made.shape))
            values = [_at(part, lane, made.shape) for part in operands]
            self.steps.append(
                NumberStep(
                    program=program,
                    number=self.num_of_program,
                    operation=operation,
                    sites=sites,
                    lane=lane,
                    operands=tuple(value for value in values if value is not None),
                    value=float(result.reshape(-1)[flat]),
                    num_lanes=int(made.sum()),
                )
            )
        return None

    def keep_store(
        self, operation: str, pointers: Array, mask: Array, values: Array, width: int
    ) -> None:
        if operation == "load" or values.dtype.kind != "f" or len(self.stores) >= MAX_STORES:
            return
        active = np.broadcast_to(mask, pointers.shape).reshape(-1)
        flat = np.broadcast_to(values.reshape(-1), active.shape)
        if self.wanted(flat[active]):
            self.stores.append((self.program, pointers.reshape(-1)[active], flat[active]))

    def stored_at(self, address: int) -> tuple[tuple[int, int, int], float] | None:
        """The program that stored there last, and what."""
        for program, addresses, values in reversed(self.stores):
            at = np.flatnonzero(addresses == np.uint64(address))
            if at.size:
                return program, float(values[at[-1]])
        return None


def trace_numbers(
    index: BundleIndex,
    place: Place,
    parameter: str,
    element: Sequence[int],
    *,
    allow_source: bool = False,
    seconds: float = 4.0,
) -> NumberTrace | None:
    """Which operation of the launch at `place` led to what it left in an element of `parameter`.

    None where what it stores there in the replay is finite, or no single operation leads to it.
    Raises as `replay_place` does.
    """
    launch = index.launch(place)
    kernel = kernel_of(index, launch, allow_source=allow_source)

    def run(seen: _Seen, programs: Sequence[int] | None) -> TensorRecord | None:
        rebuilt = Rebuilt(index, place, launch, {})
        replay(
            kernel,
            rebuilt.grid,
            rebuilt.arguments,
            schedule=Schedule(programs, budget_seconds=seconds, program_seconds=seconds),
            observers=Observers(
                seen.arguments.extend, on_lanes=seen.keep_store, on_numbers=seen.note
            ),
        )
        return rebuilt.tensors.get(parameter)

    try:
        first = _Seen()
        tensor = run(first, None)
        address = _address(first.arguments, parameter, tensor, element)
        stored = first.stored_at(address) if address is not None else None
        if stored is None or address is None or np.isfinite(stored[1]):
            return None
        x, y, z = stored[0]
        grid = (*launch.grid, 1, 1)[:3]
        number = x + grid[0] * (y + grid[1] * z)
        tried: dict[tuple[str, tuple[Site, ...]], None] = {}
        for step in (step for step in first.steps if step.program == stored[0]):
            key = step.operation, step.sites
            if key in tried or len(tried) >= MAX_TRIED:
                continue
            tried[key] = None
            again = _Seen(frozenset({key}), program=stored[0], wanted=lambda values: True)
            run(again, [number])
            found = again.stored_at(address)
            if found is not None and np.isfinite(found[1]):
                return NumberTrace(step, stored[1], found[1])
    except HypoError:
        raise
    except _MISFITS as error:
        told = f"{type(error).__name__}: {error}"
        raise NotReplayed(launch.kernel, f"has a record that makes no sense ({told})") from error
    return None


@dataclass(frozen=True, slots=True)
class NumbersMade:
    """What the replay of a launch left, by parameter, and which operations gave NaN or infinity."""

    results: Mapping[str, LeftBehind]
    steps: Sequence[NumberStep]


def numbers_made(
    index: BundleIndex,
    place: Place,
    *,
    text: KernelText,
    corrections: Mapping[str, Any] | None = None,
    without: Sequence[NumberStep] = (),
    seconds: float = 4.0,
) -> NumbersMade | None:
    """The whole launch at `place` with a text of its kernel, and `corrections` as in a replay.

    In the place of what is not finite of the operations `without` stand ones, in each program: 0
    would be what a division by infinity gives.
    None where an access was wrong, or not all of it was replayed. Raises as `replay_place` does.
    """
    launch = index.launch(place)
    try:
        kernel = kernel_of(index, launch, allow_source=text.may_run, edited=text.edited)
        rebuilt = Rebuilt(index, place, launch, dict(corrections or {}))
        seen = _Seen(frozenset((step.operation, step.sites) for step in without), instead=1.0)
        report = replay(
            kernel,
            rebuilt.grid,
            rebuilt.arguments,
            schedule=Schedule(budget_seconds=seconds, program_seconds=seconds),
            observers=Observers(seen.arguments.extend, on_numbers=seen.note),
        )
        if report.findings or not report.coverage.is_complete:
            return None
        return NumbersMade(left_behind(rebuilt, seen.arguments), tuple(seen.steps))
    except HypoError:
        raise
    except _MISFITS as error:
        told = f"{type(error).__name__}: {error}"
        raise NotReplayed(launch.kernel, f"has a record that makes no sense ({told})") from error


def _address(
    arguments: Sequence[Argument],
    parameter: str,
    tensor: TensorRecord | None,
    element: Sequence[int],
) -> int | None:
    """Where an element lies in the replay."""
    argument = next((a for a in arguments if a.name == parameter), None)
    if argument is None or tensor is None or len(tensor.strides) != len(element):
        return None
    offset = sum(n * stride for n, stride in zip(element, tensor.strides, strict=True))
    return argument.address + offset * argument.item_bytes


def _mask_of_made(operation: str, operands: tuple[Array, ...], result: Array) -> Array | None:
    """Where an operation gave NaN of numbers that are not NaN, or infinity of finite ones."""
    if operation in _PASSING and not (operation == "cast" and operands):
        return None
    floats = [part for part in operands if part.dtype.kind == "f"]
    try:
        finite = np.ones(result.shape, bool)
        no_nan = np.ones(result.shape, bool)
        for part in floats:
            if operation in ("dot", "reduce") and part.shape != result.shape:
                finite &= bool(np.isfinite(part).all())
                no_nan &= not bool(np.isnan(part).any())
                continue
            finite &= np.broadcast_to(np.isfinite(part), result.shape)
            no_nan &= ~np.broadcast_to(np.isnan(part), result.shape)
    except ValueError:
        return None
    made: Array = (np.isnan(result) & no_nan) | (~np.isfinite(result) & finite)
    return made if bool(made.any()) else None


def _at(part: Array, lane: tuple[int, ...], shape: tuple[int, ...]) -> float | None:
    try:
        return float(np.broadcast_to(part, shape)[lane])
    except (ValueError, TypeError):
        return None
