"""From which program on a kernel's int32 offsets overflow, found by running single programs.

Each probe runs one program far beyond the grid, reads what there is and writes nothing; bisection
needs about 31 of them. It is exact where a larger program number never brings an offset back.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device.interpret.builder import Exact
from hypocenter.device.interpret.interpret import (
    Interpretation,
    block_of_others,
    interpreting,
)
from hypocenter.replay.arguments import SPACE_BITS, Argument
from hypocenter.replay.findings import Site
from hypocenter.replay.sites import SiteValue, kernel_frames, state_of, values_at, wrap_site
from hypocenter.replay.waiting import Polls
from hypocenter.replay.wrapped import are_wrapped

#: Most programs along each axis: CUDA's and HIP's limits.
MAX_PROGRAMS = (2**31 - 1, 65535, 65535)

_STEPS_PER_STEP = 20
#: And so many more: of a short program twenty times as many are few.
_SPARE_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class Threshold:
    """The first program along `axis` with an overflow, the others being at their last."""

    axis: int
    program: int
    origin: Site
    values: dict[str, SiteValue]


@dataclass(frozen=True, slots=True)
class GivenUp:
    """An axis along which the search had no end, and why."""

    axis: int
    reason: str


class _Overflowed(Exception):
    def __init__(self, origin: Site, values: dict[str, SiteValue]) -> None:
        self.origin, self.values = origin, values


class _TooLong(Exception):
    pass


def thresholds(
    kernel: Any,
    values: Mapping[str, Any],
    arguments: tuple[Argument, ...],
    grid: tuple[int, int, int],
    num_steps: int,
    seconds: float,
    seen: tuple[int, int, int] | None = None,
) -> tuple[Threshold | GivenUp, ...]:
    """One Threshold for each axis along which the kernel's offsets overflow at all.

    `num_steps` is what a program of the launch took; a probe that takes far more (a loop that
    waits for a word, say) is given up, and so is everything when `seconds` are over.
    `seen` is a program that is known to overflow: it tells the axis where programs far beyond the
    grid do nothing, because a count in memory ends them.
    """
    deadline = time.thread_time() + seconds
    memory = _Probe(arguments)
    limit = _STEPS_PER_STEP * num_steps + _SPARE_STEPS
    last_step = 0

    def on_step() -> None:
        if time.thread_time() > deadline:
            raise _TooLong(f"after {seconds:g} s")
        if opened.steps > last_step:
            raise _TooLong(f"a probe took over {_STEPS_PER_STEP} times as long as a program")

    found: list[Threshold | GivenUp] = []
    with interpreting(memory, on_step=on_step) as opened:
        for axis in range(3):
            wide = list(grid)
            wide[axis] = max(MAX_PROGRAMS[axis], grid[axis])
            opened.set_grid((wide[0], wide[1], wide[2]))

            def overflow(
                program: int, others: Sequence[int] = grid, axis: int = axis
            ) -> _Overflowed | None:
                nonlocal last_step
                if time.thread_time() > deadline:
                    raise _TooLong(f"after {seconds:g} s")
                last_step = opened.steps + limit
                where = [size - 1 for size in others]
                where[axis] = program
                return _run(opened, kernel, values, (where[0], where[1], where[2]))

            try:
                first = _bisect(overflow, wide[axis] - 1)
                if first is None and seen is not None:
                    others = [at + 1 for at in seen]
                    first = _bisect(functools.partial(overflow, others=others), seen[axis])
            except _TooLong as given_up:
                found.append(GivenUp(axis, str(given_up)))
                continue
            except Exception as error:  # what a kernel does far beyond its grid may fail in any way
                found.append(GivenUp(axis, f"a probe failed: {type(error).__name__}: {error}"))
                continue
            if first is not None:
                found.append(Threshold(axis, first[0], first[1].origin, first[1].values))
    return tuple(found)


def _run(
    opened: Interpretation, kernel: Any, values: Mapping[str, Any], program: tuple[int, int, int]
) -> _Overflowed | None:
    try:
        opened.run(kernel, values, program)
    except _Overflowed as caught:
        return caught
    return None


def _bisect(
    overflow: Callable[[int], _Overflowed | None], last: int
) -> tuple[int, _Overflowed] | None:
    """The least program from 0 to `last` that overflows, when `last` does."""
    caught = overflow(last)
    if caught is None:
        return None
    low, high = -1, last
    while high - low > 1:
        middle = (low + high) // 2
        now = overflow(middle)
        if now is None:
            low = middle
        else:
            high, caught = middle, now
    return high, caught


class _Probe:
    """A Memory that ends the program at the first address that wrapped, in any lane."""

    def __init__(self, arguments: tuple[Argument, ...]) -> None:
        self.exact: Exact | None = None
        self._arguments = {a.number: a for a in arguments if a.real_address is None}
        self._polls = Polls()

    def _note(self, operation: str, pointers: Array, values: Array) -> Array:
        is_wait = self._polls.note(operation, pointers, values)
        if is_wait and not self._polls.has_moved(state_of(kernel_frames())):
            raise _TooLong("a probe waits for another program")
        return values

    def load(self, pointers: Array, mask: Array, other: Array, dtype: Any) -> Array:
        self._look(pointers)
        loaded = block_of_others(other, pointers.shape, np.dtype(dtype))
        flat, out = pointers.reshape(-1), loaded.reshape(-1)
        active = np.broadcast_to(mask, pointers.shape).reshape(-1)
        for space in np.unique(flat >> np.uint64(SPACE_BITS)):
            argument = self._arguments.get(int(space))
            if argument is None:
                continue
            offsets = (flat - np.uint64(argument.address)).view(np.int64)
            inside = (offsets >= 0) & (offsets <= argument.num_bytes - loaded.itemsize) & active
            out[inside] = argument.read(offsets[inside], loaded.dtype)
        return self._note("load", pointers, loaded)

    def store(self, pointers: Array, values: Array, mask: Array) -> None:
        self._look(pointers)

    def atomic_rmw(
        self, operation: Any, pointers: Array, values: Array, mask: Array, order: Any
    ) -> Array:
        self._look(pointers)
        return self._note("atomic", pointers, np.zeros(pointers.shape, values.dtype))

    def atomic_cas(self, pointers: Array, compare: Array, values: Array, order: Any) -> Array:
        """Always succeeds, so that a lock is had at once."""
        self._look(pointers)
        return np.array(np.broadcast_to(compare, pointers.shape))

    def _look(self, pointers: Array) -> None:
        if self.exact is None:
            return
        exact = np.broadcast_to(self.exact.values, pointers.shape).reshape(-1)
        flat = pointers.reshape(-1)
        if not are_wrapped(flat, exact, self.exact.reduced, self._arguments, 1).any():
            return
        wrap = self.exact.wrap
        origin = wrap_site(wrap)
        frame = next((f for f in kernel_frames() if f.f_code is wrap.code), None)
        known = values_at(frame, origin.expression, (), ()) if frame else {}
        raise _Overflowed(origin, known)
