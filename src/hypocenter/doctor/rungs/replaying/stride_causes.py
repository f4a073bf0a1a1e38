"""Causes of an access outside that lie in a number that an index is multiplied by.

Which number multiplies which index is seen by the replay with one more of it: the addresses move
by the index. No name is asked for, and two values that happen to be equal prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import msgspec
import numpy as np

from hypocenter.base.tensor import contiguous_strides, span_of
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.edits.factor_text import Factor, factors_at, is_used_elsewhere, with_factor
from hypocenter.doctor.edits.index_text import sizes_along
from hypocenter.doctor.kernel_text import follows_what_it_loads
from hypocenter.doctor.rungs.replaying.ranks import EXCHANGED, PACKED, STRIDE, STRIDE_TEXT
from hypocenter.doctor.rungs.replaying.replay_cause import (
    TEST,
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
#: Numbers that are no strides of the tensor, and are corrected together.
_MAX_TOGETHER = 3
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
    """Two strides that were exchanged; some that are not the tensor's own; a wrong one in a line;
    a view that is taken for a packed tensor."""
    if len(tensor.shape) != len(tensor.strides):
        return
    at = _Strided(use, source, finding, tensor, site)
    if finding.layout is not None:
        yield ReplayCause(
            Cause.WRONG_STRIDE, "", (), (), rank=PACKED, resolve=partial(_packed_view, at)
        )
    if len(tensor.shape) < 2:
        return
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
            yield _passing(at, right, bench)


def _passed_otherwise(at: _Strided, bench: Bench, finding: Finding) -> Iterator[ReplayCause]:
    wrong = {
        name: value
        for name, value in at.given.items()
        if value not in at.own and value > 1 and _is_in_address(at, bench, name, value)
    }
    for num in range(1, _MAX_TOGETHER + 1):
        tries = [
            dict(zip(names, strides, strict=True))
            for names in combinations(sorted(wrong, key=lambda name: -wrong[name]), num)
            for strides in combinations(at.own, num)  # the larger one for the larger one
        ]
        for right in tries[:_MAX_TRIES]:
            if all(_is_of_axis(at, bench, right, name) for name in right):
                yield _passing(at, right, bench)


def _is_in_address(at: _Strided, bench: Bench, name: str, value: int) -> bool:
    """Whether the accesses of that line go elsewhere with a larger number."""
    more = bench.replay({name: value + _STEP}, None, False)
    if more is None:
        return False
    return any(
        not np.array_equal(access.pointers, more.census.accesses[key].pointers)
        for key, access in bench.before.census.accesses.items()
        if access.line == at.finding.line
        and bench.before.census.aims_at(access) == at.name
        and key in more.census.accesses
    )


def _packed_view(at: _Strided, bench: Bench, finding: Finding) -> Iterator[ReplayCause]:
    """A view of which the kernel would read each element once, were it packed, and none besides."""
    shape, name = tuple(at.tensor.shape), at.name
    packed = contiguous_strides(shape)
    right = {name: bench.make(shape=shape, strides=packed)}
    seen = bench.replay(right, None, False)
    argument = next((a for a in seen.census.arguments if a.name == name), None) if seen else None
    if seen is None or argument is None or not seen.report.coverage.is_complete:
        return
    aimed = [
        access.pointers[access.active]
        for access in seen.census.accesses.values()
        if access.line == finding.line and seen.census.aims_at(access) == name
    ]
    if not aimed or np.unique(np.concatenate(aimed)).size != math.prod(shape):
        return
    yield ReplayCause(
        Cause.WRONG_STRIDE,
        f"Give the kernel the strides {tuple(at.tensor.strides)} of {name} and step by them, or "
        f"give it a packed tensor: {name}.contiguous()",
        (
            f"{name} is a view of shape {shape} with the strides {tuple(at.tensor.strides)}",
            f"the kernel steps as through a packed one, with the strides {packed}",
        ),
        ((f"{name} packed", lambda make: {name: make(shape=shape, strides=packed)}),),
        **place_of(at.site),
        allowed=TEST,
    )


def _passing(at: _Strided, right: Mapping[str, int], bench: Bench) -> ReplayCause:
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
        allowed=_moves(at, _alike_tensors(at, bench)),
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


def _alike_tensors(at: _Strided, bench: Bench) -> frozenset[str]:
    """Tensors with that shape and these strides at which accesses go astray as well."""
    astray = {found.argument for found in bench.before.report.findings}
    return frozenset(
        argument.name
        for argument in bench.before.census.arguments
        if argument.name in astray
        and (argument.shape, argument.strides) == (at.tensor.shape, at.tensor.strides)
    )


def _moves(at: _Strided, alike: frozenset[str] = frozenset()) -> Allowed:
    why = "each index goes to its own element with the right stride"
    # What a table leads to is elsewhere too when its entries are read in their places.
    is_table = _is_kernel(at) and follows_what_it_loads(at.source, at.name)
    return Allowed(moved=alike | {at.name}, anywhere=is_table, why=why)


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
    What is left must begin at one place for all indices, or the index is in it as well.
    """
    if seen is None or more is None:
        return False
    sizes = sizes_along(at.tensor.shape, at.tensor.strides, stride)
    span = _span(at.tensor, stride, is_inner=False)
    inner = _span(at.tensor, stride, is_inner=True)
    extent = span_of(at.tensor.shape, at.tensor.strides)
    argument = next((a for a in seen.census.arguments if a.name == at.name), None)
    num_seen = 0
    begins: dict[int, int] = {}
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
        for row in map(int, np.unique(index)):
            begins[row] = min(int(rest[index == row].min()), begins.get(row, extent))
    return num_seen > 0 and len(set(begins.values())) == 1


def _span(tensor: TensorRecord, stride: int, *, is_inner: bool) -> int:
    """Elements from the first to the last of the other axes, or of those with a smaller stride."""
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    others = [(size, by) for size, by in pairs if by < stride or (by > stride and not is_inner)]
    return span_of(tuple(size for size, _ in others), tuple(by for _, by in others))
