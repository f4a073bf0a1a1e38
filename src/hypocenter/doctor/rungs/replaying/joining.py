"""Fixes of several accesses of one launch, joined until they leave nothing of what they mend.

One edit mends one access, and a launch is right when all of its accesses are.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from hypocenter.doctor.rungs.replaying.good_outcome import GoodRunSays
from hypocenter.doctor.rungs.replaying.replay_cause import Allowed, ReplayCause, TextEdit
from hypocenter.doctor.rungs.replaying.trials import (
    Bench,
    Fitting,
    Green,
    edits_of,
    has,
    is_same,
    judge,
    passes_text,
)
from hypocenter.record.events import SourceRecord
from hypocenter.replay.findings import Finding

#: Accesses beside the first one whose fixes are joined with its own.
_MAX_JOINED = 5

#: What fits a finding of the same replay, by itself.
FitsOf = Callable[[Finding], Sequence[Fitting]]

#: Behind a change that several accesses of its line get.
_AT_EACH = ", at each access of it"


def join_fixes(
    bench: Bench, finding: Finding, found: Sequence[Fitting], fits_of: FitsOf
) -> list[Fitting]:
    """What fits, each with the fixes of the same kind that other accesses of the launch need.

    One that gives other results than the good run, with all of those, is none.
    """
    joined = (_join(bench, finding, fit, fits_of) for fit in found)
    return [fit for fit in joined if fit is not None]


def _join(bench: Bench, finding: Finding, fit: Fitting, fits_of: FitsOf) -> Fitting | None:
    if fit.green.effect is None or not fit.cause.is_fix:
        return fit
    mended = [finding]
    for other in [left for left in fit.green.left if not is_same(left, finding)][:_MAX_JOINED]:
        if not any(is_same(other, left) for left in fit.green.left):
            continue  # what another one needed has mended it
        own = _fix_alike(fit, fits_of(other))
        both = _join_two(bench, [*mended, other], fit, own) if own is not None else None
        if both is not None and both.good_run is GoodRunSays.OTHER:
            return None
        if both is not None:
            fit, mended = both, [*mended, other]
    return fit


def _fix_alike(fit: Fitting, others: Sequence[Fitting]) -> Fitting | None:
    """The fix of another access that is of the same kind; None where several may be meant."""
    same = [
        other
        for other in others
        if other.cause.cause is fit.cause.cause
        and other.cause.is_fix
        and other.green.effect is not None
    ]
    said = [other for other in same if other.cause.fix == fit.cause.fix]
    return said[0] if said else same[0] if len(others) == len(same) == 1 else None


def _join_two(
    bench: Bench, findings: Sequence[Finding], fit: Fitting, other: Fitting
) -> Fitting | None:
    """Both fixes at once, where they take away all of those findings and nothing else."""
    if any(fit.passed.get(name, value) != value for name, value in other.passed.items()):
        return None
    text = _merged_text(bench, fit, other)
    if text is None and (fit.text is not None or other.text is not None):
        return None
    passed = {**fit.passed, **other.passed}
    seen = bench.replay(passed, text, False)
    if seen is None or any(has(seen.report, finding) for finding in findings):
        return None
    allowed = _either(fit.cause.allowed, other.cause.allowed)
    ruling = judge(findings[0], bench.before, seen, allowed)
    if not ruling.is_right:
        return None
    said = _changes_text(fit.green.corrected, other.green.corrected)
    edits = edits_of(bench.text, text) if bench.text is not None and text is not None else ()
    values = [edit for edit in (*fit.edits, *other.edits) if edit.name]
    green = Green(said, passes_text(said, seen), ruling.effect, seen.report.findings)
    parts = (*(fit.parts or (fit.cause,)), other.cause)
    cause = replace(
        fit.cause,
        fix=_fixes_text(parts),
        edit=TextEdit(said, text) if text is not None else None,
        passed=(*fit.cause.passed, *other.cause.passed),
        allowed=allowed,
    )
    every = (*edits, *dict.fromkeys(values))
    return Fitting(cause, green, every, text, passed, parts, seen.good_run)


def _changes_text(one: str, other: str) -> str:
    """Both changes; of the same one in accesses of one line only once."""
    if one.removesuffix(_AT_EACH) == other:
        return f"{other}{_AT_EACH}"
    return f"{one} and {other}"


def _fixes_text(parts: Sequence[ReplayCause]) -> str:
    """All fixes, each with the lines that it is for."""
    lines: dict[str, list[int | None]] = {}
    for part in parts:
        lines.setdefault(part.fix, []).append(part.line)
    texts = [f"{fix}, {_lines_text(at)}" for fix, at in lines.items()]
    return "; ".join((texts[0], *(f"{text[:1].lower()}{text[1:]}" for text in texts[1:])))


def _lines_text(lines: Sequence[int | None]) -> str:
    distinct = list(dict.fromkeys(lines))
    if len(distinct) < len(lines):
        return f"at each access of line {' and '.join(map(str, distinct))}"
    return " and ".join(f"in line {line}" for line in distinct)


def _either(one: Allowed, other: Allowed) -> Allowed:
    """What one or the other of two corrections may do besides."""
    return Allowed(
        lost=one.lost or other.lost,
        moved=one.moved | other.moved,
        anywhere=one.anywhere or other.anywhere,
        races=one.races or other.races,
        if_same_results=one.if_same_results or other.if_same_results,
        why="; ".join(dict.fromkeys(filter(None, (one.why, other.why)))),
    )


# -- texts ----------------------------------------------------------------------------------------


def _merged_text(bench: Bench, fit: Fitting, other: Fitting) -> SourceRecord | None:
    """The kernel with the changes of both; None where they change one place, or two functions."""
    texts = [part.text for part in (fit, other) if part.text is not None]
    if bench.text is None or any(text.id != bench.text.id for text in texts):
        return None
    merged = textwrap.dedent(bench.text.text)
    for text in texts:
        both = merged_lines(textwrap.dedent(bench.text.text), merged, text.text)
        if both is None:
            return None
        merged = both
    return msgspec.structs.replace(bench.text, text=merged) if texts else None


def merged_lines(base: str, one: str, other: str) -> str | None:
    """What two texts make of a third one of as many lines; None where they change one place."""
    lines = [text.splitlines(keepends=True) for text in (base, one, other)]
    if len({len(found) for found in lines}) > 1:
        return None
    merged = [_merged_line(*versions) for versions in zip(*lines, strict=True)]
    return None if None in merged else "".join(filter(None, merged))


def _merged_line(base: str, one: str, other: str) -> str | None:
    if one == other or other == base:
        return one
    if one == base:
        return other
    first, last = sorted((_change(base, one), _change(base, other)))
    if first[1] > last[0] or first[:2] == last[:2]:
        return None
    return f"{base[: first[0]]}{first[2]}{base[first[1] : last[0]]}{last[2]}{base[last[1] :]}"


def _change(base: str, text: str) -> tuple[int, int, str]:
    """From where to where a line was changed, and what stands there now."""
    short = min(len(base), len(text))
    start = next((at for at in range(short) if base[at] != text[at]), short)
    same = next(
        (at for at in range(short - start) if base[-1 - at] != text[-1 - at]), short - start
    )
    return start, len(base) - same, text[start : len(text) - same]
