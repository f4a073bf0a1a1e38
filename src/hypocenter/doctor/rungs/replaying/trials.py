"""Corrections, tried one after another by replay, and the one judge of all of them.

A correction is right if it takes away what was wrong and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from hypocenter.base.wording import count_text
from hypocenter.doctor.diagnosis import Edit, Effect
from hypocenter.doctor.rungs.replaying.good_outcome import GoodRunSays
from hypocenter.doctor.rungs.replaying.replay_cause import Allowed, ReplayCause
from hypocenter.record.events import SourceRecord
from hypocenter.replay.findings import Finding, FindingKind, ReplayReport

#: Kinds that values alone may lead to.
_OF_VALUES = (FindingKind.RACE, FindingKind.NEVER_WRITTEN)
#: Of these kinds a finding counts lanes, so that more of them is more damage.
_COUNTED = (FindingKind.OUT_OF_BOUNDS, FindingKind.BETWEEN_ROWS, FindingKind.NEVER_WRITTEN)
#: Accesses that miss the elements of their tensor: one kind in place of the other is no better.
ASTRAY = (FindingKind.OUT_OF_BOUNDS, FindingKind.BETWEEN_ROWS)


@dataclass(frozen=True, slots=True)
class Seen:
    """One replay: what it found, every access of it, and what the good run says of its results."""

    report: ReplayReport
    #: A `replay/census.py:Census`, whose import needs Triton.
    census: Any
    good_run: GoodRunSays = GoodRunSays.NOTHING


@dataclass(frozen=True, slots=True)
class Ruling:
    """Whether a correction is right, what it does, and why not where it is not."""

    is_right: bool
    effect: Effect
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Green:
    """A correction that is right: in words, what its replay says, and what it does.

    `effect` is None for a mere test of the cause. `left` is what is found with it still.
    """

    corrected: str
    passes: str
    effect: Effect | None
    left: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Fitting:
    """A cause with the correction that is right, and the fix as data.

    `text` and `passed` are what the launch was replayed with. `parts` are the causes whose fixes
    were joined, each of which mends one access, and `good_run` is of them together.
    """

    cause: ReplayCause
    green: Green
    edits: tuple[Edit, ...] = ()
    text: SourceRecord | None = None
    passed: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[ReplayCause, ...] = ()
    good_run: GoodRunSays = GoodRunSays.NOTHING


def has(report: ReplayReport, finding: Finding, *, any_line: bool = False) -> bool:
    """Whether a replay has the finding again."""
    return any(is_same(again, finding, any_line=any_line) for again in report.findings)


def is_same(one: Finding, other: Finding, *, any_line: bool = False) -> bool:
    is_alike = one.kind == other.kind or (one.kind in ASTRAY and other.kind in ASTRAY)
    return is_alike and one.argument == other.argument and (any_line or one.line == other.line)


def judge(
    finding: Finding, before: Seen, after: Seen, allowed: Allowed, *, other_text: bool = False
) -> Ruling:
    """Compare the replay as recorded with one that has something put right.

    It is refuted by the finding itself, by damage that was not there before, by accesses inside
    that are lost or go elsewhere, and by elements that are written no more. `other_text`: the
    kernel is another one, whose lines say nothing of the first one's.
    """
    from hypocenter.replay.census import change_of

    change = change_of(before.census, after.census)
    effect = Effect(
        num_gone=change.num_gone,
        num_lost=0 if other_text else change.num_lost,
        num_moved=0 if other_text else change.num_moved,
        num_unwritten=change.num_unwritten,
        num_filled=_num_missing(before) - _num_missing(after),
        excused=allowed.why if change.num_lost or change.num_moved else "",
    )

    def refute(why: str) -> Ruling:
        return Ruling(False, effect, why)

    if has(after.report, finding, any_line=other_text):
        return refute("the finding is still there")
    for worse in _new_damage(finding, before.report, after.report, allowed, any_line=other_text):
        return refute(f"{worse.kind} at {worse.argument or worse.operation} instead")
    if allowed.is_test:
        return Ruling(True, effect)
    # With another stride other elements are written, and no fewer.
    has_moved = bool(allowed.moved & change.moved) and change.more_written >= 0
    if change.num_unwritten and not allowed.anywhere and not has_moved:
        return refute(f"{count_text(change.num_unwritten, 'element')} written no more")
    if change.num_unread:
        return refute(f"{count_text(change.num_unread, 'element')} read no more")
    if other_text:
        return Ruling(True, effect)
    is_spare = allowed.if_same_results and change.has_same_results
    if effect.num_lost and not allowed.lost and not is_spare:
        return refute(f"{count_text(effect.num_lost, 'access', 'accesses')} inside lost")
    if change.moved - allowed.moved and not allowed.anywhere:
        return refute(f"accesses of {', '.join(sorted(change.moved - allowed.moved))} go elsewhere")
    return Ruling(True, effect)


def _num_missing(seen: Seen) -> int:
    return sum(
        found.num_lanes for found in seen.report.findings if found.kind is FindingKind.NEVER_WRITTEN
    )


def _new_damage(
    finding: Finding,
    before: ReplayReport,
    after: ReplayReport,
    allowed: Allowed,
    *,
    any_line: bool,
) -> Iterator[Finding]:
    for found in after.findings:
        is_due = found.kind in _OF_VALUES and (allowed.races or allowed.is_test)
        if is_due or (_leaves_undefined(found, finding) and not any_line):
            continue
        old = [known for known in before.findings if is_same(known, found, any_line=any_line)]
        is_more = found.kind in _COUNTED and found.num_lanes > sum(known.num_lanes for known in old)
        if not old or is_more:
            yield found


def _leaves_undefined(found: Finding, finding: Finding) -> bool:
    """Whether lanes have no value that read outside before: what they had was none either.

    Lanes that read inside and do no more are counted as lost, whatever is found of them.
    """
    is_undefined = found.kind is FindingKind.UNDEFINED_LANE and finding.kind in ASTRAY
    return is_undefined and (found.argument, found.line) == (finding.argument, finding.line)


# -- trying ---------------------------------------------------------------------------------------

#: Replays a launch with corrections of its arguments, or with another text.
TriedReplay = Callable[[Mapping[str, Any], SourceRecord | None, bool], Seen | None]


@dataclass(frozen=True, slots=True)
class Bench:
    """What a trial needs: the launch as recorded, a way to replay it, what makes a correction.

    `changed` is the text of this installation's own kernel where it differs, and its line.
    """

    before: Seen
    replay: TriedReplay
    make: Callable[..., Any]
    given: Mapping[str, Any]
    changed: tuple[int, str] | None = None
    site: str = ""
    text: SourceRecord | None = None


def fitting(bench: Bench, finding: Finding, causes: Sequence[ReplayCause]) -> list[Fitting]:
    """Of the first rank that has any, the causes with a right correction: those that lose least
    and have most to speak for them. More than one: nothing tells them apart."""
    ranked = sorted(causes, key=lambda cause: cause.rank)
    for _, same in groupby(ranked, key=lambda cause: cause.rank):
        resolved = (
            candidate
            for cause in same
            for candidate in (cause.resolve(bench, finding) if cause.resolve else (cause,))
        )
        found = [fit for cause in resolved if (fit := _try(bench, finding, cause)) is not None]
        if found:
            return _best(found)
    return []


def _best(found: list[Fitting]) -> list[Fitting]:
    def order(fit: Fitting) -> tuple[int, int]:
        effect = fit.green.effect
        lost = effect.num_lost + effect.num_moved if effect is not None else 0
        return lost, -len(fit.cause.support)

    best = min(map(order, found))
    kept: dict[object, Fitting] = {}
    for fit in found:
        if order(fit) == best:
            kept.setdefault(fit.edits or fit.cause.fix, fit)
    return list(kept.values())


def _try(bench: Bench, finding: Finding, cause: ReplayCause) -> Fitting | None:
    """The cause with the first of its corrections that is right."""
    if cause.settled is not None:
        return Fitting(cause, Green(*cause.settled, None))
    if cause.edit is not None:
        seen = bench.replay({}, cause.edit.source, False)
        green = _green(bench, finding, cause, seen, cause.edit.said)
        edits = edits_of(bench.text, cause.edit.source) if bench.text is not None else ()
        if green is None:
            return None
        return Fitting(cause, green, edits if cause.is_fix else (), cause.edit.source)
    if bench.changed is not None and cause.in_kernel:
        line, was = bench.changed
        seen = bench.replay({}, None, True)
        said = f"the kernel as it is installed (line {line}: `{was}`)"
        green = _green(bench, finding, cause, seen, said, other_text=True)
        if green is not None:
            return Fitting(cause, green)
    for said, corrections in cause.corrections(bench.make):
        green = _green(bench, finding, cause, bench.replay(corrections, None, False), said)
        if green is None:
            continue
        if cause.too_little is not None:
            less = bench.replay(cause.too_little(bench.make), None, False)
            if less is None or not has(less.report, finding):
                return None
        return Fitting(cause, green, _passed_values(bench, cause.passed), passed=corrections)
    return _with_scalar(bench, finding, cause) if cause.scalar else None


def _green(
    bench: Bench,
    finding: Finding,
    cause: ReplayCause,
    seen: Seen | None,
    said: str,
    *,
    other_text: bool = False,
) -> Green | None:
    if seen is None:
        return None
    ruling = judge(finding, bench.before, seen, cause.allowed, other_text=other_text)
    if not ruling.is_right or (cause.is_fix and seen.good_run is GoodRunSays.OTHER):
        return None
    effect = ruling.effect if cause.is_fix or other_text else None
    return Green(said, passes_text(said, seen), effect, seen.report.findings)


def passes_text(said: str, seen: Seen) -> str:
    coverage = seen.report.coverage
    is_same = seen.good_run is GoodRunSays.SAME
    return (
        f"the same replay with {said}: no such finding "
        f"({coverage.num_run} of {coverage.num_launched} programs)"
        + ", and what the good run gave"
        * is_same
    )


def _with_scalar(bench: Bench, finding: Finding, cause: ReplayCause) -> Fitting | None:
    """The largest value of a scalar with which the finding is gone, if it is the one expected."""
    name = cause.scalar or ""
    given = bench.given.get(name)
    if type(given) is not int or given < 2:
        return None
    passed: dict[int, Green] = {}

    def is_right(value: int) -> bool:
        said = f"{name} = {value}, the largest that is right"
        green = _green(bench, finding, cause, bench.replay({name: value}, None, False), said)
        if green is not None:
            passed[value] = green
        return green is not None

    def is_clean(value: int) -> bool:
        seen = bench.replay({name: value}, None, False)
        return seen is not None and not has(seen.report, finding)

    if cause.largest is not None:
        value = cause.largest
        if not 0 < value < given or is_clean(value + 1) or not is_right(value):
            return None
    elif not is_clean(1):
        return None
    else:
        value, wrong = 1, given
        while wrong - value > 1:
            middle = (value + wrong) // 2
            value, wrong = (middle, wrong) if is_clean(middle) else (value, middle)
        if not is_right(value):
            return None
    edits = _passed_values(bench, ((name, str(given), str(value)),))
    return Fitting(cause, passed[value], edits if cause.is_fix else (), passed={name: value})


def _passed_values(bench: Bench, values: Sequence[tuple[str, str, str]]) -> tuple[Edit, ...]:
    """What the launch passes otherwise, as edits of its line."""
    file, _, line = bench.site.rpartition(":")
    if not line.isdigit():
        return ()
    return tuple(
        Edit(file=file, line=int(line), old=was, new=now, name=name) for name, was, now in values
    )


def edits_of(source: SourceRecord, edited: SourceRecord) -> tuple[Edit, ...]:
    """The lines that differ, of two texts with equally many lines."""
    old, new = source.text.splitlines(), edited.text.splitlines()
    if len(old) != len(new):
        return ()
    return tuple(
        Edit(file=source.file, line=source.first_line + at, old=was.strip(), new=now.strip())
        for at, (was, now) in enumerate(zip(old, new, strict=True))
        if was.strip() != now.strip()
    )
