"""Rung: the first launch that wrote a number which is none, and where that came from.

From the statistics of a traced run alone; what a kernel did inside is the replay's to say.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.judging.origin import last_writer
from hypocenter.doctor.kernel_text import guard_line
from hypocenter.doctor.rungs.engine.cache_overflow import Overflow, find_overflow
from hypocenter.doctor.rungs.engine.states import left_there, was_spoilt
from hypocenter.doctor.rungs.whose_number import whose
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import (
    ArgumentDeclaration,
    LaunchRecord,
    Place,
    Statistics,
    TensorRecord,
)
from hypocenter.record.gap import Gap

NAME = "values"
_CACHES = ("k_cache", "v_cache", "cache", "keys")
#: It holds what others have left, too: that a number there is none does not say who made it.
_STATE = "state"
_TABLES = ("cos", "sin")
#: Entries of a table that is made again to compare: a million positions of 128 columns.
_MAX_TABLE = 1 << 26


NOT_TRACED = Gap.not_recorded(
    "contents of tensors", "the run was not traced; `hypo doctor --suspect -- ...` traces it"
)
NO_LAUNCH = Gap.not_recorded("launches", "none of this run was recorded, so none was replayed")


@dataclass(frozen=True, slots=True)
class _First:
    """The first launch that spoilt something: what it wrote, and what it had read."""

    use: LaunchMade
    output: str
    wrote: Statistics
    read: dict[str, Statistics]
    num_before: int
    state: Statistics | None = None


def values(case: Case) -> list[Claim]:
    """Where NaN, infinity or undefined memory entered."""
    if not case.bundle.statistics:
        if not case.is_foreign:  # what was seen of a foreign program is told beside its launches
            case.leave_unseen(NOT_TRACED if case.launches else NO_LAUNCH)
        return []
    first = first_spoilt(case)
    if first is None:
        num = len(case.bundle.statistics)
        return [
            row(
                cause,
                Verdict.REFUTED,
                NAME,
                f"all of {num} tensors that were looked at after a launch are finite",
                would_refute="a tensor with a NaN or an infinity",
            )
            for cause in (Cause.NONFINITE_VALUE, Cause.NONFINITE_PADDING)
        ]
    claim = _judge(case, first)
    evidence = (*whose(case, first.use, first.wrote.first_nonfinite), *claim.hypothesis.evidence)
    hypothesis = msgspec.structs.replace(claim.hypothesis, evidence=evidence)
    return [dataclasses.replace(claim, hypothesis=hypothesis)]


def first_spoilt(case: Case) -> _First | None:
    """The first launch whose live output was not finite, or was never written."""
    grouped: dict[Place, list[Statistics]] = {}
    for statistics in case.bundle.statistics:
        grouped.setdefault(statistics.place, []).append(statistics)
    num_before = 0
    for use in case.launches:
        figures = grouped.get(use.place, []) if use.place is not None else []
        tensors = {t.id: name for name, t in case.tensors_of(use.launch).items()}
        written = case.written_by(use.launch)
        named = {
            tensors[statistics.tensor]: statistics
            for statistics in figures
            if statistics.tensor in tensors
        }
        read = {
            name: stats
            for name, stats in named.items()
            if name not in written and not stats.is_digest_alone
        }
        for name in [name for name in named if name in written and name not in (*_CACHES, _STATE)]:
            if is_spoilt(named[name], hides=_hides(case, name, use.launch)):
                return _First(use, name, named[name], read, num_before, named.get(_STATE))
        num_before += bool(figures)
    return None


def is_spoilt(statistics: Statistics, *, hides: bool = False) -> bool:
    """Whether something is no number; -infinity is none either but where it `hides`."""
    allowed = statistics.num_below if hides else 0
    return bool(statistics.num_nan or statistics.num_poisoned or statistics.num_inf > allowed)


def _hides(case: Case, name: str, launch: LaunchRecord) -> bool:
    argument = _declaration(case, name, launch)
    return argument is not None and argument.hides


def _judge(case: Case, first: _First) -> Claim:
    launch = first.use.launch
    bad = {name: statistics for name, statistics in first.read.items() if is_spoilt(statistics)}
    tables = [name for name in _TABLES if name in bad]
    if tables and _can_remake(case.tensor_of(launch, tables[0])):
        return _table(case, first, tables[0], bad[tables[0]])
    caches = [name for name in bad if name in _CACHES]
    if caches and (overflow := find_overflow(case, first.use, caches)) is not None:
        return _claim_of_overflow(case, first, overflow)
    if caches:
        return _padding(case, first, caches, bad)
    if not bad and (stale := _stale_state(case, first)):
        return stale
    if bad:
        name, statistics = next(iter(bad.items()))
        cause = Cause.UNINITIALISED_READ if statistics.num_poisoned else Cause.NONFINITE_VALUE
        return _claim_of_entry(
            case,
            first,
            cause,
            name,
            statistics,
            f"{name} was so before {launch.kernel} read it, and {_who_wrote(case, first, name)}",
        )
    if first.wrote.num_poisoned and (undefined := _undefined_output(case, first)):
        return undefined
    weights = [
        name
        for name, tensor in case.tensors_of(launch).items()
        if name not in first.read
        and name not in case.written_by(launch)
        and not tensor.part
        and not _is_index(case, name, launch)
    ]
    if weights:
        return _claim_of_entry(
            case,
            first,
            Cause.NONFINITE_VALUE,
            weights[0],
            None,
            f"everything else that {launch.kernel} read is finite; the contents of "
            f"{weights[0]} were not recorded",
        )
    return _made_inside(case, first)


def _who_wrote(case: Case, first: _First, name: str) -> str:
    writer = last_writer(case, first.use, case.tensor_of(first.use.launch, name))
    if writer is None:
        return "no launch of the run had written it"
    return f"{writer.where} ({writer.launch.kernel}), the last launch that writes it, came before"


def _is_index(case: Case, name: str, launch: LaunchRecord) -> bool:
    argument = _declaration(case, name, launch)
    return argument is not None and argument.dtypes[0] == "I32"


def _declaration(case: Case, name: str, launch: LaunchRecord) -> ArgumentDeclaration | None:
    declaration = case.bundle.declaration(launch)
    return declaration.argument(name) if declaration else None


def _show(statistics: Statistics) -> str:
    parts = [
        (statistics.num_nan, "NaN"),
        (statistics.num_inf, "infinite"),
        (statistics.num_poisoned, "never written"),
    ]
    text = ", ".join(f"{count} {word}" for count, word in parts if count)
    at = (
        f", the first at {list(statistics.first_nonfinite)}"
        if statistics.first_nonfinite is not None
        else ""
    )
    return f"{text}{at}"


def _before(first: _First) -> str:
    return (
        f"the {first.num_before} launches before, which were looked at one by one, wrote nothing "
        "that is not finite"
    )


def _can_remake(tensor: TensorRecord | None) -> bool:
    """Whether a rotation's table [num_positions, pairs] has a size that one of us could have."""
    return tensor is not None and len(tensor.shape) == 2 and math.prod(tensor.shape) <= _MAX_TABLE


def _table(case: Case, first: _First, name: str, statistics: Statistics) -> Claim:
    tensor = case.tensor_of(first.use.launch, name)
    assert tensor is not None
    good = _rope_table(tensor.shape, 10000.0)
    bad = _rope_table(tensor.shape, 0.0)
    like_zero = int(np.isnan(bad).sum()) == statistics.num_nan
    text = f"{name} ({tensor.name}) holds {_show(statistics)}"
    red = f"{text}; {_before(first)}"
    if like_zero:
        red += "; just so many NaN has a table of that shape that is made with base 0"
    root = RootCause(
        cause=Cause.BAD_SCALAR if like_zero else Cause.NONFINITE_VALUE,
        blames=Blame.MAKER,
        sentence=f"{first.use.launch.kernel}: {text}"
        + (": the base of the rotation (rope_base) was 0 when it was made" if like_zero else ""),
        fix=f"Refuse a rope_base of 0 (or NaN) where {tensor.name} is made "
        f"({_site(case, tensor)}); 10000 is usual",
        proof=Proof(
            red,
            "base 10000",
            f"the same table made with base 10000: "
            f"{int(np.isfinite(good).sum())} of {good.size} entries are finite",
        ),
        kernel=first.use.launch.kernel,
        argument=name,
        tensor=tensor.name,
        place=first.use.place,
        **_lines(case, first, name),
    )
    return proven(
        root,
        NAME,
        (f"{first.use.where}: {first.output} becomes {_show(first.wrote)}",),
        "a table that is finite",
        first.use.seq,
        (tensor.id,),
    )


@functools.lru_cache(maxsize=4)
def _rope_table(
    shape: tuple[int, ...], base: float
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Cosines of all angles of a table [num_positions, pairs] (`rope.py:tables`)."""
    pairs = np.arange(shape[1], dtype=np.float64)
    with np.errstate(all="ignore"):
        angles = np.arange(shape[0])[:, None] * np.float64(base) ** (-pairs / shape[1])
        return np.cos(angles)


def _padding(
    case: Case, first: _First, caches: list[str], bad: dict[str, Statistics], left: str = ""
) -> Claim:
    """Undefined memory of the cache came into the result: an entry that is not live was weighed.

    `left` says what was read of a state, where that is what was used.
    """
    launch = first.use.launch
    name = "v_cache" if "v_cache" in caches else caches[0]
    tensor = case.tensor_of(launch, name)
    text = f"{first.output} becomes {_show(first.wrote)} while {name} holds {_show(bad[name])}"
    red = f"{first.use.where}: {text}; {_before(first)}"
    root = RootCause(
        cause=Cause.NONFINITE_PADDING,
        sentence=f"{launch.kernel}: {text}: "
        + (f"{left} was" if left else f"entries of {name} that no token has written yet were")
        + " used (0 times NaN is NaN)",
        fix=f"Mask the load of {name} to the keys that are live, with other=0.0, or clear the "
        "cache when it is made"
        if not left
        else f"Mask the load of {name} to sequences that go on, with other=0.0",
        proof=Proof(
            red,
            f"{name} without its unwritten entries",
            f"every other input of {launch.kernel} is finite "
            f"({', '.join(k for k in first.read if k not in caches) or 'none'}), and all "
            "that has been written into the cache was finite",
        ),
        kernel=launch.kernel,
        argument=name,
        tensor=tensor.name if tensor else None,
        place=first.use.place,
        **_lines(case, first, name),
    )
    return proven(
        root,
        NAME,
        (),
        "live entries of the cache that are not finite",
        first.use.seq,
        (tensor.id,) if tensor else (),
    )


def _claim_of_overflow(case: Case, first: _First, found: Overflow) -> Claim:
    """A launch wrote numbers into the cache that have no room in its type."""
    launch, tensor = found.use.launch, found.tensor
    text = (
        f"{found.source} of up to {found.largest:.3g} is stored into {found.cache} ({tensor.name}),"
        f" whose {tensor.dtype} holds at most {found.limit:.0f}"
    )
    root = RootCause(
        cause=Cause.NONFINITE_VALUE,
        sentence=f"{launch.kernel}: {text}",
        fix=f"Look at what makes {found.source} so large, or keep the cache in a wider type",
        proof=Proof(
            f"{found.use.where}: {text}; {first.use.where} reads it, and {first.output} becomes "
            f"{_show(first.wrote)}",
            f"{found.source} of at most {found.limit:.0f}",
            f"such numbers are finite in {tensor.dtype}; {_before(first)}",
        ),
        kernel=launch.kernel,
        argument=found.source,
        tensor=tensor.name,
        place=found.use.place,
    ).at(case.access(launch, found.cache, "store"))
    return proven(root, NAME, (), f"{found.source} in range", found.use.seq, (tensor.id,))


def _stale_state(case: Case, first: _First) -> Claim | None:
    """What a slot of the states was left with came into the result of its next request."""
    state, at = case.tensor_of(first.use.launch, _STATE), first.wrote.first_nonfinite
    if state is None or first.state is None or at is None:
        return None
    how = was_spoilt(case, first.use, state)
    left = left_there(case, first.use, at[0]) if how else ""
    if not left:
        return None
    return _padding(case, first, [_STATE], {_STATE: first.state}, f"{left} ({how})")


def _claim_of_entry(
    case: Case, first: _First, cause: Cause, name: str, statistics: Statistics | None, why: str
) -> Claim:
    launch = first.use.launch
    tensor = case.tensor_of(launch, name)
    held = f" holds {_show(statistics)}" if statistics else ""
    whose = f"{name} ({tensor.name}, {tensor.owner})" if tensor else name
    others = [k for k in first.read if k != name]
    red = f"{first.use.where}: {first.output} becomes {_show(first.wrote)}; {why}"
    same = _same_kernel_before(case, first)
    if not same and statistics is None:
        return row(
            cause,
            Verdict.INCONCLUSIVE,
            NAME,
            red,
            "no launch of the same kernel came before, to compare with",
            would_refute=f"a {name} whose elements are all finite",
            kernel=launch.kernel,
            argument=name,
        )
    root = RootCause(
        cause=cause,
        sentence=f"{launch.kernel}: {whose}{held}, and {first.output} becomes {_show(first.wrote)}",
        fix=f"Look into {whose}: `hypo inspect MODEL --check` looks for NaN in a model's weights"
        if statistics is None
        else f"Write finite numbers into {whose} before it is read ({_site(case, tensor)})",
        proof=Proof(
            red,
            f"another tensor for {name}",
            f"{same} launches of {launch.kernel} before, each with another {name}, gave finite "
            f"results; the other inputs here ({', '.join(others) or 'none'}) are finite",
        ),
        kernel=launch.kernel,
        argument=name,
        tensor=tensor.name if tensor else None,
        place=first.use.place,
        **_lines(case, first, name),
    )
    return proven(
        root,
        NAME,
        (_before(first),),
        f"a {name} whose elements are all finite",
        first.use.seq,
        (tensor.id,) if tensor else (),
    )


def _made_inside(case: Case, first: _First) -> Claim:
    launch = first.use.launch
    tensor = case.tensor_of(launch, first.output)
    largest = max(
        (max(abs(statistics.low), abs(statistics.high)) for statistics in first.read.values()),
        default=0.0,
    )
    access = case.access(launch, first.output, "store")
    red = (
        f"{first.use.where}: {first.output} becomes {_show(first.wrote)}, though all that "
        f"{launch.kernel} read is finite (at most {largest:.3g})"
    )
    root = RootCause(
        cause=Cause.NONFINITE_VALUE,
        sentence=f"{launch.kernel} makes {_show(first.wrote)} in {first.output} out of finite "
        f"numbers of at most {largest:.3g}",
        fix=f"Keep the arithmetic of {launch.kernel} in range: see what is stored to "
        f"{first.output}",
        proof=Proof(
            red,
            f"{launch.kernel} left out",
            f"without this launch all is finite up to here: {_before(first)}",
        ),
        kernel=launch.kernel,
        argument=first.output,
        tensor=tensor.name if tensor else None,
        place=first.use.place,
    ).at(access)
    return proven(
        root, NAME, (), "an input that is not finite", first.use.seq, (tensor.id,) if tensor else ()
    )


def _undefined_output(case: Case, first: _First) -> Claim | None:
    """The output still holds what undefined memory holds: never written, or read and written."""
    launch = first.use.launch
    tensor = case.tensor_of(launch, first.output)
    source = case.sources.get(launch.source)
    if tensor is None or source is None:
        return None
    loads = case.access(launch, first.output, "load")
    reads = (
        loads is not None
        and loads.operation == "load"
        and (launch.constants.get("ACCUMULATE") is not False)
    )
    access = loads if reads else case.access(launch, first.output, "store")
    guard = guard_line(source, access.line) if access and not reads else None
    cause = Cause.UNINITIALISED_READ if reads else Cause.OUTPUT_NOT_WRITTEN
    text = f"{first.output} ({tensor.name}) still holds {_show(first.wrote)} after {launch.kernel}"
    why = "which adds to what was there" if reads else "which only writes it"
    root = RootCause(
        cause=cause,
        sentence=f"{text}, {why}",
        fix=f"Clear {tensor.name} before {launch.kernel} adds to it"
        if reads
        else f"Write every element of {first.output}: the mask of the store leaves some out",
        proof=Proof(
            f"{first.use.where}: {text}; {_before(first)}",
            f"{tensor.name} cleared before" if reads else "the elements that were written",
            f"all that {launch.kernel} read beside it is finite, so the sum would be"
            if reads
            else f"the other elements of {math.prod(tensor.shape)}, which were written, are finite",
        ),
        kernel=launch.kernel,
        argument=first.output,
        tensor=tensor.name,
        file=access.file if access else None,
        line=guard[0] if guard else access.line if access else None,
        expression=guard[1] if guard else access.expression if access else None,
        place=first.use.place,
    )
    return proven(
        root, NAME, (), "an output without undefined elements", first.use.seq, (tensor.id,)
    )


def _same_kernel_before(case: Case, first: _First) -> int:
    kernel = first.use.launch.kernel
    return sum(use.launch.kernel == kernel for use in _until(case, first.use))


def _until(case: Case, last: LaunchMade) -> Iterator[LaunchMade]:
    for use in case.launches:
        if use is last:
            return
        yield use


def _lines(case: Case, first: _First, name: str) -> dict[str, Any]:
    access = case.access(first.use.launch, name)
    return {
        "file": access.file if access else None,
        "line": access.line if access else None,
        "expression": access.expression if access else None,
    }


def _site(case: Case, tensor: TensorRecord | None) -> str:
    memory = case.allocations.get(tensor.allocation) if tensor else None
    return f"made at {memory.site}" if memory and memory.site else "its maker is not on record"
