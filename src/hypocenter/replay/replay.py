"""Replays one launch of a @triton.jit kernel on the CPU with every access checked.

The tensors are read and written where they are, so an in-place kernel needs a copy of its input.
"""

from __future__ import annotations

import inspect
import math
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError, NotReplayed, UsageError
from hypocenter.device.interpret.builder import is_machinery
from hypocenter.device.interpret.interpret import Interpretation, StaticAssertFailed, interpreting
from hypocenter.device.triton_lang import interpreter, triton
from hypocenter.replay.admission import VirtualTensor, admit, at_real_address, share_regions
from hypocenter.replay.arguments import Argument
from hypocenter.replay.findings import (
    Coverage,
    Finding,
    FindingKind,
    Headroom,
    ReplayReport,
    Site,
)
from hypocenter.replay.headroom import MAX_PROGRAMS, GivenUp, Threshold, thresholds
from hypocenter.replay.memory import CheckedMemory
from hypocenter.replay.sites import kernel_frames, site_of, state_of
from hypocenter.replay.terms import GivenMemory, Observers, Schedule
from hypocenter.replay.waiting import Abandoned, Repetition, Turns

#: Seconds of the processor that a program may take: another process that is busy costs it none.
PROGRAM_SECONDS = 60.0
#: For so much longer it is watched whether a program that takes more gets on.
_WATCHED_SHARE = 0.25
HEADROOM_SECONDS = 10.0
_GOLDEN = 0.6180339887498949
ALL_PROGRAMS, UNSEEN = Schedule(), Observers()


class KernelFailed(NotReplayed):
    """The interpreter could not run the kernel; `site` is the kernel's line, if there is one."""

    def __init__(self, kernel: str, problem: str, site: Site | None) -> None:
        self.problem, self.site = problem, site
        place = f" at {site.file}:{site.line} ({site.expression})" if site else ""
        super().__init__(kernel, f"could not be replayed{place}: {problem}")


class ProgramNeverEnds(KernelFailed):
    """A program went round in circles; `site` is where it was then."""


class ProgramTooSlow(KernelFailed):
    """A program took more time than it was given, and got on; no line of it is to blame."""


def replay(
    kernel: Any,
    grid: Any,
    arguments: Mapping[str, Any],
    *,
    schedule: Schedule = ALL_PROGRAMS,
    given: GivenMemory | None = None,
    observers: Observers = UNSEEN,
    headroom: bool = False,
) -> ReplayReport:
    """Run `kernel` over `grid` (1 to 3 numbers, or a function of the arguments) and check it.

    `arguments` by parameter name: CPU tensors, VirtualTensors, tensor descriptors, numbers; what
    is no parameter (num_warps) is ignored. What `schedule`, `given` and `observers` mean stands in
    `terms.py`; without them all programs run, whose memory is defined, and nobody looks on. With
    `headroom` the report says from which program on int32 offsets would overflow.

    Seconds are those of the processor that this thread has had.

    Raises UsageError (arguments that do not fit, a replay within a replay) and KernelFailed. For a
    program of more than `schedule.program_seconds` (else PROGRAM_SECONDS) that is ProgramNeverEnds
    when it repeats the same accesses with the same values, and else ProgramTooSlow.
    """
    jit = _jit_function(kernel)
    bound = _bound(jit, arguments)
    size = _grid(grid, bound)
    given = given or GivenMemory()
    known = given.initialised
    memory = CheckedMemory(
        jit.__name__,
        interpreter()._interpreter,
        lambda address: at_real_address(address, given.find_storage, known),
    )
    memory.on_lanes, memory.on_numbers = observers.on_lanes, observers.on_numbers
    memory.lanes.is_on = schedule.num_warps != 1
    run = _Run(jit, size, memory, schedule)
    run.on_program = observers.on_program
    values = {
        name: admit(memory, name, value, given.undefined, given.outputs, known)
        for name, value in bound.items()
    }
    share_regions(memory)
    if problem := _grid_problem(size):
        return ReplayReport((_launch_finding(jit, problem),), (), Coverage(0, 0, 0, 0.0))
    coverage = run.all(values, schedule.programs)
    findings = memory.findings() + run.failures
    if coverage.is_complete:
        findings += tuple(
            _unwritten(jit, argument)
            for argument in memory.arguments
            if argument.is_output and not _written_mask(argument).all()
        )
    spare: tuple[Headroom, ...] = ()
    if headroom or any(finding.origin for finding in findings):
        probed = run.thresholds(next((f.program for f in findings if f.origin), None))
        reached = tuple(found for found in probed if isinstance(found, Threshold))
        findings = tuple(_with_threshold(finding, reached, size) for finding in findings)
        spare = tuple(
            Headroom(jit.__name__, t.axis, t.program, size[t.axis], t.origin, t.values)
            for t in reached
            if t.program >= size[t.axis]
        ) + tuple(
            Headroom(jit.__name__, g.axis, None, size[g.axis], gave_up=g.reason)
            for g in probed
            if isinstance(g, GivenUp)
        )
    observers.on_arguments(memory.arguments)
    return ReplayReport(findings, spare, coverage, run.has_block_pointers)


# -- the arguments -------------------------------------------------------------------------------


def _jit_function(kernel: Any) -> Any:
    found = getattr(kernel, "jit", kernel)
    if not isinstance(found, triton.runtime.jit.JITFunction):
        raise UsageError(
            f"replay needs a @triton.jit function, but got {type(found).__name__}; of an autotuned "
            "or heuristic kernel pass its .fn and the values of its configuration"
        )
    return found


def _bound(jit: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(jit.fn)
    known = {name: value for name, value in arguments.items() if name in signature.parameters}
    try:
        bound = signature.bind(**known)
    except TypeError as error:
        raise UsageError(f"{jit.__name__}: {error}") from error
    bound.apply_defaults()
    return dict(bound.arguments)


def _grid(grid: Any, bound: Mapping[str, Any]) -> tuple[int, int, int]:
    given = grid(bound) if callable(grid) else grid
    sizes = (given,) if isinstance(given, int) else tuple(int(size) for size in given)
    if not 1 <= len(sizes) <= 3:
        raise UsageError(f"the grid is {sizes}, but a launch has 1 to 3 dimensions")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _grid_problem(size: tuple[int, int, int]) -> str | None:
    for axis, (programs, limit) in enumerate(zip(size, MAX_PROGRAMS, strict=True)):
        if not 0 <= programs <= limit:
            return f"grid[{axis}] is {programs}, but a launch has 0 to {limit} programs there"
    return None


# -- the run -------------------------------------------------------------------------------------


class _Run:
    """The programs of one launch, run one after another within a budget."""

    def __init__(
        self,
        jit: Any,
        grid: tuple[int, int, int],
        memory: CheckedMemory,
        schedule: Schedule,
    ) -> None:
        self._program_seconds = schedule.program_seconds or PROGRAM_SECONDS
        self._operands = schedule.operands
        self.jit, self.grid, self.memory = jit, grid, memory
        self.budget = schedule.budget_seconds
        self._first = {number for number in schedule.first if 0 <= number < math.prod(grid)}
        self._failures: dict[Any, list[Finding]] = {}
        self._program = (0, 0, 0)
        self._program_started = 0.0
        self._repetition: Repetition | None = None
        self._opened: Interpretation | None = None
        self._turns: Turns | None = None
        self._begun: set[int] = set()
        self._num_steps = 0
        self._values: dict[str, Any] = {}
        self.has_block_pointers = False
        self.on_program: Callable[[tuple[int, int, int]], None] = lambda program: None

    def all(self, values: Mapping[str, Any], programs: Collection[int] | None) -> Coverage:
        total = math.prod(self.grid)
        started = time.thread_time()
        num_run = 0
        see = self.memory.see_numbers if self.memory.on_numbers is not None else None
        with interpreting(
            self.memory,
            on_step=self._watch,
            on_numbers=see,
            watch=self.memory,
            operands=self._operands,
        ) as opened:
            opened.set_grid(self.grid)
            self._values = self._bind(opened, values)
            order = self._order(total, programs, started)
            self._turns = turns = self._make_turns(opened, order, total)
            try:
                for number in order:
                    if number in self._begun:
                        continue
                    before = opened.steps
                    num_run += self._one(opened, number)
                    self._num_steps = max(self._num_steps, opened.steps - before)
                    if turns.is_stuck:
                        break
                turns.drain()
            finally:
                turns.close()
            self.has_block_pointers = opened.has_block_pointers
        seconds = time.thread_time() - started + turns.seconds
        num_run += turns.num_ended
        num_waiting = len(self._begun) - num_run
        return Coverage(num_run, total, self.memory.num_lanes, seconds, num_waiting)

    def _make_turns(self, opened: Interpretation, order: Iterator[int], total: int) -> Turns:
        """Where a program waits, the next of `order` begin, and then any that have not."""
        started = time.thread_time()

        def begin_next() -> int | None:
            number = next((n for n in order if n not in self._begun), None)
            if number is not None or len(self._begun) >= total:
                return number
            if self._seconds_spent(started) > 2 * (self.budget or math.inf):
                raise ProgramTooSlow(
                    self.jit.__name__,
                    f"program {self._program} waits for another one, and not all of them can be "
                    f"run in {self.budget:g} s",
                    None,
                )
            return next(n for n in range(total) if n not in self._begun)

        def save() -> Any:
            return self._program, opened.suspend(), self.memory.suspend()

        def restore(kept: Any) -> None:
            self._program, own, of_memory = kept
            opened.resume(own)
            self.memory.resume(of_memory)
            self._watch_anew(opened)

        def note_stuck(num_waiting: int) -> None:
            ended = len(self._begun) - num_waiting
            if not self.memory.note_waiting(ended, num_waiting):
                frames = kernel_frames()
                raise ProgramNeverEnds(
                    self.jit.__name__,
                    f"program {self._program} waits for a word that no program of this launch "
                    "changes; another launch or the host may, and launches run one after another "
                    "here",
                    site_of(frames[0]) if frames else None,
                )

        turns = Turns(lambda n: self._note_end(opened, n), save, restore, begin_next, note_stuck)
        self.memory.on_wait = turns.wait
        return turns

    def _note_end(self, opened: Interpretation, number: int) -> None:
        if not self._one(opened, number):
            raise Abandoned

    def _seconds_spent(self, started: float) -> float:
        return time.thread_time() - started + (self._turns.seconds if self._turns else 0.0)

    def thresholds(self, seen: tuple[int, int, int] | None) -> tuple[Threshold | GivenUp, ...]:
        seconds = HEADROOM_SECONDS if self.budget is None else min(HEADROOM_SECONDS, self.budget)
        return thresholds(
            self.jit,
            self._values,
            self.memory.arguments,
            self.grid,
            self._num_steps,
            seconds,
            seen,
        )

    def _order(self, total: int, programs: Collection[int] | None, started: float) -> Iterator[int]:
        """Linear numbers: those asked for; else all in order, as long as the budget allows."""
        if programs is not None:
            yield from (number for number in sorted(programs) if 0 <= number < total)
            return
        yield from sorted(self._first)
        num_run = len(self._first)
        for number in range(total):
            if number in self._first:
                continue
            yield number
            num_run += 1
            spent = self._seconds_spent(started)
            if self.budget is not None and num_run < total:
                expected = spent / num_run * total
                if spent > self.budget or (spent > self.budget / 4 and expected > self.budget):
                    break
        else:
            return
        yield from self._sample(number + 1, total, started)

    def _sample(self, first: int, total: int, started: float) -> Iterator[int]:
        """The last program, then programs spread evenly over the rest until the budget ends."""
        assert self.budget is not None
        done = {number for number in self._first if number >= first} | {total - 1}
        if total - 1 not in self._first:
            yield total - 1
        position = 0.0
        while len(done) < total - first and self._seconds_spent(started) < self.budget:
            position = (position + _GOLDEN) % 1.0
            number = first + int(position * (total - first))
            if number not in done:
                done.add(number)
                yield number

    def _watch_anew(self, opened: Interpretation) -> None:
        self._program_started = time.thread_time()
        self._repetition, self.memory.on_access = None, None
        opened.watch_closely(False)

    def _one(self, opened: Interpretation, number: int) -> bool:
        """Run a program; whether it ran to its end, or to a failure that is noted."""
        self._begun.add(number)
        x, y, _ = self.grid
        self._program = (number % x, number // x % y, number // x // y)
        self._watch_anew(opened)
        self._opened = opened
        self.memory.begin(self._program)
        self.on_program(self._program)
        try:
            opened.run(self.jit, self._values, self._program)
        except Abandoned:
            return False
        except HypoError:
            raise
        except AssertionError as error:
            self._note_failure(FindingKind.ASSERTION, str(error) or "assertion failed", error)
        except Exception as error:
            absent = [name for name, value in self._values.items() if value is None]
            if absent and "NoneType" in str(error):
                said = f"None for {' or '.join(absent)}: {error}"
                self._note_failure(FindingKind.NULL_POINTER, said, error)
                return True
            reason = f"{type(error).__name__}: {error}"
            raise KernelFailed(self.jit.__name__, reason, _last_site(error)) from error
        return True

    def _bind(self, opened: Interpretation, values: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return opened.bind(self.jit, values)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            reason = f"an argument does not fit: {type(error).__name__}: {error}"
            raise KernelFailed(self.jit.__name__, reason, None) from error

    def _note_failure(self, kind: FindingKind, detail: str, error: Exception) -> None:
        """An assertion, of the kernel or of Triton about a descriptor, is a finding."""
        site = _last_site(error)
        self._failures.setdefault((site, detail), []).append(
            Finding(
                kind=kind,
                kernel=self.jit.__name__,
                operation="run",
                detail=detail,
                program=self._program,
                sites=(site,) if site else (),
            )
        )

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(
            msgspec.structs.replace(
                min(same, key=lambda finding: (finding.program or ())[::-1]), num_programs=len(same)
            )
            for same in self._failures.values()
        )

    def _watch(self) -> None:
        if self._turns is not None and self._turns.is_over:
            raise Abandoned
        now, watched = time.thread_time(), self._repetition
        if now <= self._program_started + self._program_seconds:
            return
        if watched is None:
            self._repetition = watched = Repetition(now)
            self.memory.on_access = watched.note
            if self._opened is not None:
                self._opened.watch_closely(True)
            return
        # Within a scan, say, a helper is called again and again with the same values.
        if watched.has_no_access and len(frames := kernel_frames()) == 1:
            watched.note_state(state_of(frames))
        share = _WATCHED_SHARE if watched.has_seen_enough else 1.0
        if now - watched.since > share * self._program_seconds:
            seconds = f"{self._program_seconds:g} s of processor time"
            if not watched.is_circle:
                raise ProgramTooSlow(
                    self.jit.__name__,
                    f"program {self._program} is too slow here: it is not done after {seconds}, "
                    "and still gets on",
                    None,
                )
            frames = kernel_frames()
            raise ProgramNeverEnds(
                self.jit.__name__,
                f"program {self._program} is not done after {seconds} and "
                + (
                    "comes again and again to the same line with the same values"
                    if watched.has_no_access
                    else "repeats the same accesses with the same values: its loop has no end"
                ),
                site_of(frames[0]) if frames else None,
            )


def _last_site(error: BaseException) -> Site | None:
    """The innermost line of the kernel in a traceback; None when it never got there."""
    site, inside = None, False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if inside and not is_machinery(frame.f_code.co_filename):
            site = site_of(frame)
        inside |= frame.f_code is Interpretation.run.__code__
    return site


# -- what is said of the whole launch ------------------------------------------------------------


def _written_mask(argument: Argument) -> Array:
    """For each element of the argument whether this launch wrote it."""
    region = argument.region
    if region.data is None or not argument.num_bytes:
        return np.ones(argument.shape, bool)
    flags = (region.writer != 0)[argument.start // region.granule :]
    steps = [stride * argument.item_bytes // region.granule for stride in argument.strides]
    return np.lib.stride_tricks.as_strided(flags, argument.shape, steps)


def _unwritten(jit: Any, argument: Argument) -> Finding:
    missing = np.argwhere(~_written_mask(argument))
    first = tuple(int(i) for i in missing[0])
    last = [int(i) for i in missing[-1]]
    return Finding(
        kind=FindingKind.NEVER_WRITTEN,
        kernel=jit.__name__,
        operation="launch",
        argument=argument.name,
        element=first,
        num_lanes=len(missing),
        layout=argument.layout,
        detail=f"{len(missing)} of {math.prod(argument.shape)} elements of shape "
        f"{argument.shape}, from {list(first)} to {last}",
    )


def _launch_finding(jit: Any, problem: str) -> Finding:
    return Finding(
        kind=FindingKind.BAD_GRID, kernel=jit.__name__, operation="launch", detail=problem
    )


def _with_threshold(
    finding: Finding, reached: tuple[Threshold, ...], grid: tuple[int, int, int]
) -> Finding:
    """An overflow with the first program that has it, where probing found that.

    Along an axis of one program there is no first one, so that says nothing of the launch.
    """
    inside = [t for t in reached if t.program < grid[t.axis] and (not t.axis or grid[t.axis] > 1)]
    same = [t for t in inside if t.origin == finding.origin] or inside
    if finding.origin is None or not same:
        return finding
    best = max(same, key=lambda t: t.program)
    return msgspec.structs.replace(finding, axis=best.axis, threshold=best.program)


__all__ = ["KernelFailed", "StaticAssertFailed", "VirtualTensor", "replay"]
