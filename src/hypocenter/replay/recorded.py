"""Rebuilds a recorded launch from a bundle and replays it on the CPU with every access checked.

Index tensors hold what was recorded; other tensors are zeros, or extents only where they are large.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hypocenter.base.errors import HypoError, NotReplayed, UsageError
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import Place
from hypocenter.replay.arguments import Argument as ReplayArgument
from hypocenter.replay.census import Census
from hypocenter.replay.corrections import Corrections, TensorCorrection
from hypocenter.replay.findings import Finding, ReplayReport
from hypocenter.replay.rebuild import Rebuilt, recorded_site
from hypocenter.replay.replay import KernelFailed, replay
from hypocenter.replay.source import installed_kernel, kernel_of
from hypocenter.replay.terms import KernelText, Observers, Schedule, SeenReplay
from hypocenter.replay.undefined import results_in, without_harmless

BUDGET_SECONDS = 5.0
MIN_PROGRAM_SECONDS = 2.0
#: What records of anyone's making may raise where they do not fit together.
_MISFITS = (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError)

#: The recorded text where it is this installation's, within the usual time, and nobody looks on.
RECORDED, IN_BUDGET, UNSEEN = KernelText(), Schedule(), SeenReplay()


def replay_place(
    bundle: Bundle | BundleIndex,
    place: Place,
    *,
    corrections: Corrections | None = None,
    text: KernelText = RECORDED,
    schedule: Schedule = IN_BUDGET,
    headroom: bool = False,
    seen: SeenReplay = UNSEEN,
) -> ReplayReport:
    """Replay the launch at `place`, with `corrections` in place of what was recorded.

    Programs that index values make suspicious run first; past the budget the rest is a sample. Of
    `schedule` this takes `programs`, `budget_seconds` and `operands`; the record has the others.
    With `headroom` (and whenever an integer overflowed) offsets are also computed exactly, and the
    report says from which program on 32 bits are not enough. An access that hits somebody else's
    memory is told with its owner; one of memory that had been freed is of kind `freed memory`.
    With recorded `counts` elements that its contract has the launch write, and that it did not,
    are of kind `never written`. A read of undefined memory counts where it reaches a result.

    Raises UsageError for a place that the bundle does not have, a CPU kernel or a correction of
    nothing; else NotReplayed: SourceNotAllowed, ProgramNeverEnds and ProgramTooSlow for a program
    that takes twice the budget, KernelFailed when the kernel cannot be run at all, and
    for records that make no sense.
    """
    index = bundle if isinstance(bundle, BundleIndex) else BundleIndex(bundle)
    launch = index.launch(place)
    if launch.device.split(":")[0] == "cpu":
        raise UsageError(f"{launch.kernel} runs on the CPU; replay is for GPU kernels")
    try:
        return _replay_launch(
            index, place, dict(corrections or {}), text, schedule, seen, headroom=headroom
        )
    except HypoError:
        raise
    except _MISFITS as error:
        told = f"{type(error).__name__}: {error}"
        raise NotReplayed(launch.kernel, f"has a record that makes no sense ({told})") from error


def _replay_launch(
    index: BundleIndex,
    place: Place,
    given: dict[str, Any],
    text: KernelText,
    schedule: Schedule,
    seen: SeenReplay,
    *,
    headroom: bool,
) -> ReplayReport:
    """See `replay_place`; raises anything for records that do not fit together."""
    launch = index.launch(place)
    budget_seconds = BUDGET_SECONDS
    if schedule.budget_seconds is not None:
        budget_seconds = schedule.budget_seconds
    if text.is_installed:
        kernel = installed_kernel(index, launch)
        if kernel is None:
            raise UsageError(f"no other {launch.function} is installed than the recorded one")
    else:
        kernel = kernel_of(index, launch, allow_source=text.may_run, edited=text.edited)

    def once(
        given: dict[str, Any], census: Census | None = None
    ) -> tuple[ReplayReport, Rebuilt, list[ReplayArgument]]:
        rebuilt = Rebuilt(index, place, launch, given)
        done: list[ReplayArgument] = []
        observers = Observers(done.extend)
        if census is not None:
            observers = Observers(done.extend, census.note, census.begin)
        report = _replay(
            kernel,
            rebuilt.grid,
            rebuilt.arguments,
            schedule=Schedule(
                schedule.programs,
                rebuilt.suspicious(),
                budget_seconds,
                max(2 * budget_seconds, MIN_PROGRAM_SECONDS),
                launch.num_warps,
                schedule.operands,
            ),
            observers=observers,
            headroom=headroom,
        )
        return report, rebuilt, done

    report, rebuilt, done = once(given, seen.census)
    if seen.census is not None:
        seen.census.end(done)
    if seen.on_done is not None:
        seen.on_done(rebuilt, done)
    findings = list(report.findings)
    if report.coverage.is_complete:
        findings += rebuilt.unwritten(done)

        def results(numbers: Mapping[str, float | None]) -> list[bytes]:
            known = {n: value for n, value in numbers.items() if value is not None}
            facts = {n: TensorCorrection(defined_as=value) for n, value in known.items()}
            return results_in(once(rebuilt.also(facts))[2])

        findings = without_harmless(findings, done, results)
    return msgspec.structs.replace(report, findings=tuple(map(rebuilt.restate, findings)))


def _replay(kernel: Any, grid: Any, arguments: Any, **options: Any) -> ReplayReport:
    """`replay`, whose failure names the file as it was recorded."""
    try:
        return replay(kernel, grid, arguments, **options)
    except KernelFailed as error:
        site = recorded_site(error.site) if error.site else None
        raise type(error)(error.kernel, error.problem, site) from error


def index_threshold(
    bundle: Bundle | BundleIndex,
    place: Place,
    finding: Finding,
    argument: str,
    at: tuple[int, ...],
    value: int,
    *,
    allow_source: bool = False,
) -> int | None:
    """The least value of entry `at` of index tensor `argument` with which `finding` occurs.

    `finding` is one of the launch at `place`, `value` what the entry held then. Exact where a
    larger value never makes it right again; about 31 replays of one program. None when the
    finding does not depend on that entry. Raises as `replay_place` does.
    """
    index = bundle if isinstance(bundle, BundleIndex) else BundleIndex(bundle)
    grid = (*index.launch(place).grid, 1, 1)[:3]
    if finding.program is None:
        return None
    x, y, z = finding.program
    programs = [x + grid[0] * (y + grid[1] * z)]

    def occurs(entry: int) -> bool:
        report = replay_place(
            index,
            place,
            corrections={argument: TensorCorrection(elements={at: entry})},
            text=KernelText(allow_source),
            schedule=Schedule(programs),
        )
        return any(_is_same(again, finding) for again in report.findings)

    if value <= 0 or occurs(0) or not occurs(value):
        return None
    low, high = 0, value
    while high - low > 1:
        middle = (low + high) // 2
        if occurs(middle):
            high = middle
        else:
            low = middle
    return high


def index_thresholds(
    index: BundleIndex, place: Place, finding: Finding, *, allow_source: bool = False
) -> tuple[str, ...]:
    """For each index entry that decides `finding`: what it held, and from what value on it occurs.

    Looked at are entries of the program's own row.
    """
    if finding.program is None:
        return ()
    found = []
    known, row = index.values(place), finding.program[0]
    for fact in index.launch(place).facts:
        values = known.get(fact.tensor) if fact.tensor is not None else None
        if values is None or values.dtype != "I32" or fact.name == "counts":
            continue
        if len(values.shape) != 1 or not row < values.shape[0] == len(values.data) // 4:
            continue
        value = int.from_bytes(values.data[4 * row : 4 * row + 4], "little", signed=True)
        least = index_threshold(
            index, place, finding, fact.name, (row,), value, allow_source=allow_source
        )
        if least is not None:
            found.append(f"{fact.name}[{row}] is {value}; it goes wrong from {least} on")
    return tuple(found)


def _is_same(finding: Finding, other: Finding) -> bool:
    def key(finding: Finding) -> tuple[Any, ...]:
        line = finding.sites[0].line if finding.sites else None
        return finding.kind, finding.argument, finding.operation, line

    return key(finding) == key(other)
