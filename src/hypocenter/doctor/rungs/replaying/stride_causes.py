"""Causes of an access outside that lie in a number that an index is multiplied by.

Which number multiplies which index is seen by the replay with one more of it: the addresses move
by the index. No name is asked for, and two values that happen to be equal prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import msgspec
import numpy as np

from hypocenter.base.tensor import span_of
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.edits.factor_text import Factor, factors_at, is_used_elsewhere, with_factor
from hypocenter.doctor.edits.index_text import sizes_along
from hypocenter.doctor.rungs.replaying.ranks import EXCHANGED, STRIDE, STRIDE_TEXT
from hypocenter.doctor.rungs.replaying.replay_cause import (
    Allowed,
    ReplayCause,
    TextEdit,
    place_of,
)
from hypocenter.doctor.rungs.replaying.trials import Bench, Seen
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord, TensorRecord
from hypocenter.replay.findings import Finding, Site

#: Corrections of one access that are tried.
_MAX_TRIES = 6
#: By so many elements a stride is larger, to see what it multiplies: a descriptor's are multiples
#: of 16 bytes.
_STEP = 16


@dataclass(frozen=True, slots=True)
class _Strided:
    """The access, and what its tensor and its launch say of strides."""

    use: LaunchMade
    source: SourceRecord
    finding: Finding
    tensor: TensorRecord
    site: Site

    @property
    def own(self) -> list[int]:
        """Strides of axes with more than one entry; with 1 hardly any access leaves a tensor."""
        pairs = zip(self.tensor.shape, self.tensor.strides, strict=True)
        return sorted({by for size, by in pairs if size > 1 and by > 1}, reverse=True)

    @property
    def given(self) -> dict[str, int]:
        return {
            argument.name: argument.value
            for argument in self.use.launch.arguments
            if argument.tensor is None and type(argument.value) is int
        }

    @property
    def name(self) -> str:
        return self.finding.argument or ""


def stride_causes(
    use: LaunchMade, source: SourceRecord, finding: Finding, tensor: TensorRecord, site: Site
) -> Iterator[ReplayCause]:
    """Two strides that were exchanged; one that is not the tensor's own; a wrong one in a line."""
    if len(tensor.shape) < 2 or len(tensor.shape) != len(tensor.strides):
        return
    at = _Strided(use, source, finding, tensor, site)
    for rank, found in (
        (EXCHANGED, _exchanges),
        (STRIDE, _passed_otherwise),
        (STRIDE_TEXT, _written_otherwise),
    ):
        yield ReplayCause(Cause.WRONG_STRIDE, "", (), (), rank=rank, resolve=partial(found, at))


def _exchanges(at: _Strided, bench: Bench, finding: Finding) -> Iterator[ReplayCause]:
    given = {name: value for name, value in at.given.items() if value in at.own or value == 1}
    for one, two in combinations(given, 2):
        if given[one] == given[two]:
            continue
        right = {one: given[two], two: given[one]}
        if all(_is_of_axis(at, bench, right, name) for name in (one, two)):
            yield _passing(at, right)


def _passed_otherwise(at: _Strided, bench: Bench, finding: Finding) -> Iterator[ReplayCause]:
    tries = [
        {name: stride}
        for name, value in at.given.items()
        if value not in at.own and value > 1
        for stride in at.own
    ]
    for right in tries[:_MAX_TRIES]:
        if _is_of_axis(at, bench, right, next(iter(right))):
            yield _passing(at, right)


def _passing(at: _Strided, right: Mapping[str, int]) -> ReplayCause:
    given = at.given
    now = " and ".join(f"{name} = {value}" for name, value in right.items())
    was = " and ".join(f"{name} = {given[name]}" for name in right)
    of = f"the strides of {at.name} are {at.tensor.strides}"
    return ReplayCause(
        Cause.WRONG_STRIDE,
        f"Pass {now} instead of {was}: {of}",
        (
            f"{was} was passed, but {of}",
            f"with {now} each index at {at.name} stays inside the axis that it runs along",
        ),
        ((now, lambda make: dict(right)),),
        **place_of(at.site),
        argument=next(iter(right)),
        in_kernel=False,
        is_fix=True,
        allowed=_moves(at),
        passed=tuple((name, str(given[name]), str(value)) for name, value in right.items()),
    )


def _written_otherwise(at: _Strided, bench: Bench, finding: Finding) -> Iterator[ReplayCause]:
    """A factor in the text that is no stride of the tensor, and another name or number there."""
    given = {**at.given, **at.use.launch.constants} if _is_kernel(at) else {}
    tried = 0
    for factor in factors_at(at.source, at.site.line, at.name):
        value = given.get(factor.name)
        if type(value) is not int or value in at.own or value < 2:
            continue
        for stride in at.own:
            tried += 1
            if tried <= _MAX_TRIES and _is_axis_in_text(at, bench, factor, stride):
                names = [name for name, number in given.items() if number == stride]
                for text in names or [str(stride)]:
                    yield _writing(at, factor, value, text, stride)


def _writing(at: _Strided, factor: Factor, value: int, text: str, stride: int) -> ReplayCause:
    edited = with_factor(at.source, factor, text)
    is_name = not text.isdigit()
    number = "" if is_name else f", the stride of {at.name}: pass it to the kernel"
    is_spare = is_name and not is_used_elsewhere(at.source, text)
    return ReplayCause(
        Cause.WRONG_STRIDE,
        f"Multiply by `{text}` instead of `{factor.name}`{number}",
        (
            f"{factor.name} is {value}, but the strides of {at.name} are {at.tensor.strides}",
            f"with {stride} each index at {at.name} stays inside the axis that it runs along",
        ),
        (),
        at.source.file,
        at.source.first_line + factor.line - 1,
        factor.statement,
        argument=factor.name,
        edit=TextEdit(
            f"`{text}` instead of `{factor.name}` in line {at.source.first_line + factor.line - 1}",
            msgspec.structs.replace(at.source, text=edited),
        ),
        is_fix=True,
        support=(f"{text} is passed and nothing else uses it",) if is_spare else (),
        allowed=_moves(at),
    )


def _moves(at: _Strided) -> Allowed:
    return Allowed(
        moved=frozenset({at.name}), why="each index goes to its own element with the right stride"
    )


def _is_kernel(at: _Strided) -> bool:
    return at.source.id == at.use.launch.source


# -- which axis an index runs along ----------------------------------------------------------------


def _is_of_axis(at: _Strided, bench: Bench, right: Mapping[str, int], name: str) -> bool:
    """Whether the index that a number multiplies stays inside the axis with that stride."""
    more = {**right, name: right[name] + _STEP}
    seen, after = bench.replay(right, None, False), bench.replay(more, None, False)
    return _stays(at, seen, after, right[name])


def _is_axis_in_text(at: _Strided, bench: Bench, factor: Factor, stride: int) -> bool:
    """The same of a factor in the text."""

    def replay_with(number: int) -> Seen | None:
        text = with_factor(at.source, factor, str(number))
        return bench.replay({}, msgspec.structs.replace(at.source, text=text), False)

    return _stays(at, replay_with(stride), replay_with(stride + _STEP), stride)


def _stays(at: _Strided, seen: Seen | None, more: Seen | None, stride: int) -> bool:
    """Whether at every lane the index is one of the axis, and the others stay in theirs.

    `more` is the replay with a stride that is larger by _STEP: the addresses differ by the index.
    """
    if seen is None or more is None:
        return False
    sizes = sizes_along(at.tensor.shape, at.tensor.strides, stride)
    span = _span(at.tensor, stride, is_inner=False)
    inner = _span(at.tensor, stride, is_inner=True)
    argument = next((a for a in seen.census.arguments if a.name == at.name), None)
    num_seen = 0
    for key, access in seen.census.accesses.items():
        again = more.census.accesses.get(key)
        if access.line != at.finding.line or argument is None or not access.active.any():
            continue
        if seen.census.aims_at(access) != at.name:
            continue
        if again is None or again.pointers.shape != access.pointers.shape:
            return False
        here, there = access.pointers[access.active], again.pointers[access.active]
        index = (there - here).view(np.int64) // (access.width_bytes * _STEP)
        offset = (here - np.uint64(argument.address)).view(np.int64) // access.width_bytes
        rest = offset - index * stride
        is_one = (index < sizes[0]) & (rest < span)
        # The axes before it may be counted with it, if nothing else indexes them.
        is_inside = (index >= 0) & (rest >= 0) & (is_one | ((index < sizes[-1]) & (rest < inner)))
        if not is_inside.all():
            return False
        num_seen += int(np.count_nonzero(index))
    return num_seen > 0


def _span(tensor: TensorRecord, stride: int, *, is_inner: bool) -> int:
    """Elements from the first to the last of the other axes, or of those with a smaller stride."""
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    others = [(size, by) for size, by in pairs if by < stride or (by > stride and not is_inner)]
    return span_of(tuple(size for size, _ in others), tuple(by for _, by in others))
