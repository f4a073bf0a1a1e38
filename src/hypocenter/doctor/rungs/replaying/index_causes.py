"""Entries of index tensors that led outside: known by the address that moves when they change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypocenter.base.tensor import span_of
from hypocenter.doctor.case import Case, array_of
from hypocenter.doctor.causes import index_cause
from hypocenter.doctor.edits.index_text import indices_of as address_indices
from hypocenter.doctor.edits.index_text import number_of, scalars_of, sizes_along
from hypocenter.doctor.kernel_text import follows_what_it_loads, is_divided_in, is_index_in
from hypocenter.doctor.mask_text import accesses_at
from hypocenter.doctor.rungs.replaying.lanes import lane_of, moved_by
from hypocenter.doctor.rungs.replaying.ranks import INDEX
from hypocenter.doctor.rungs.replaying.replay_cause import (
    Allowed,
    MakeCorrection,
    ReplayCause,
    indices_of,
    place_of,
    source_of,
)
from hypocenter.doctor.rungs.replaying.trials import Bench
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord, TensorRecord
from hypocenter.replay.findings import Finding

_Entries = Mapping[tuple[int, ...], int]

#: Other entries lead elsewhere, and may meet there: the test changes values and no text.
ENTRIES = Allowed(anywhere=True, races=True)
#: Entries of one tensor that are changed to see whether the lane hangs on them.
_MAX_ASKED = 8


def index_causes(
    case: Case, use: LaunchMade, finding: Finding, tensor: TensorRecord
) -> Iterator[ReplayCause]:
    """One for each tensor of integers that the address or a loop may hang on.

    Of kernels with a contract another rung has looked at the entries.
    """
    source = case.sources.get(use.launch.source)
    if use.launch.facts or not tensor.shape or not source:
        return
    access = finding.sites[-1].expression if finding.sites else ""
    site = finding.sites[0] if finding.sites else None
    given: dict[str, object] = {a.name: a.value for a in use.launch.arguments if a.tensor is None}
    given |= use.launch.constants
    for parameter, other in case.tensors_of(use.launch).items():
        recorded = case.index.values_of(other.id, use.seq)
        is_integers = recorded is not None and recorded.dtype.startswith(("I", "U"))
        if recorded is None or not is_integers or parameter == finding.argument:
            continue
        is_index = is_index_in(source, access, parameter)
        if not is_index and not follows_what_it_loads(source, parameter):
            continue
        values = array_of(recorded).flat
        entries = {
            at: int(value) for at, value in zip(indices_of(recorded.shape), values, strict=False)
        }
        yield ReplayCause(
            index_cause(-1),
            "",
            (),
            (),
            rank=INDEX,
            resolve=partial(
                _resolve,
                _Indexed(
                    tensor,
                    parameter,
                    source_of(case, use, site),
                    given,
                    site.line if site else 0,
                    finding.argument or "",
                ),
                entries,
                is_index,
            ),
        )


@dataclass(frozen=True, slots=True)
class _Indexed:
    """A tensor that left its bounds, and what the text says of the table that led there."""

    tensor: TensorRecord
    parameter: str
    source: SourceRecord | None
    given: Mapping[str, object]
    line: int
    name: str

    def has_index_before(self, step: int) -> bool | None:
        """Whether another index of the address steps over that many elements; None: not known."""
        accesses = accesses_at(self.source, self.line, self.name) if self.source else []
        if not accesses:
            return None
        for access in accesses:
            for index in (*address_indices(access), *scalars_of(access)):
                by = 1
                for factor in index.multipliers:
                    number = number_of(factor, access, self.given)
                    if number is None:
                        return None
                    by *= number
                if by >= step and by in self.tensor.strides:
                    return True
        return False


def _resolve(
    indexed: _Indexed, entries: _Entries, is_index: bool, bench: Bench, finding: Finding
) -> Iterator[ReplayCause]:
    """The cause, where an entry leads to the lane of the finding and is none of the axis."""
    lane = lane_of(bench.before, finding)
    if lane is None:
        return
    parameter = indexed.parameter
    if not is_index:
        yield from _of_end(indexed.tensor, parameter, entries, finding)
        return
    for at, value in _entries_to_ask(entries, finding, indexed.tensor):
        other = 0 if value else 1
        elements = {parameter: bench.make(elements={at: other})}
        moved = moved_by(bench, lane, elements)
        if not moved:
            continue
        bound = _bound(indexed, finding, value, moved, value - other)
        if bound is not None:
            yield _of_entry(parameter, entries, finding, at, *bound)
            return


def _entries_to_ask(
    entries: _Entries, finding: Finding, tensor: TensorRecord
) -> list[tuple[tuple[int, ...], int]]:
    """Entries to ask of: those with values that are seen at the lane, then the extreme ones."""
    seen = {value for value in finding.values.values() if type(value) is int}
    if finding.number is not None and tensor.strides[0]:
        seen.add(finding.number // tensor.strides[0])
    first = [(at, value) for at, value in entries.items() if value in seen]
    rest = sorted(entries.items(), key=lambda item: (item[1] >= 0, -item[1]))
    return list(dict.fromkeys((*first[:_MAX_ASKED], *rest[:_MAX_ASKED])))


def _bound(
    at: _Indexed, finding: Finding, value: int, moved: int, by: int
) -> tuple[int, bool] | None:
    """How many entries there are to index, and whether that is known; None if the entry is one.

    The address moved by `moved` elements with an entry that is less by `by`: where that is the
    stride of no axis, the entry is divided, or the stride is another tensor's.
    """
    tensor = at.tensor
    extent = span_of(tensor.shape, tensor.strides)
    step = abs(moved // by)
    sizes = sizes_along(tensor.shape, tensor.strides, step) if not moved % by else []
    if not sizes:
        is_divided = at.source is not None and is_divided_in(at.source, at.parameter)
        num_axes = sum(size > 1 for size in tensor.shape)
        if num_axes > 1 and not is_divided and value >= 0:
            return None
        if moved % by or not step:
            # Of a divided entry no bound follows; that this one leads outside does.
            led_to = moved if by == value else moved + (finding.number or 0)
            is_inside = 0 <= led_to < extent
            return (value, False) if is_divided and not is_inside and value > 0 else None
        bound, is_known = -(-extent // step), num_axes < 2 and not is_divided
    elif len(sizes) == 1:
        bound, is_known = sizes[0], True
    else:
        is_inner = at.has_index_before(step * sizes[0])
        bound = sizes[-1] if is_inner is False else sizes[0]
        is_known = is_inner is not None
        if not is_known and value >= 0:  # an entry that is none of either
            bound = sizes[-1]
    return None if 0 <= value < bound else (bound, is_known)


def _of_entry(
    parameter: str,
    entries: _Entries,
    finding: Finding,
    at: tuple[int, ...],
    bound: int,
    is_known: bool,
) -> ReplayCause:
    """With `is_known` the bound is told; else it only serves to show that entries lead there."""
    value, name = entries[at], finding.argument or ""
    bad = {
        at: max(0, min(value, bound - 1)) for at, value in entries.items() if not 0 <= value < bound
    }
    shown = f"{parameter}[{', '.join(map(str, at))}]"
    others = f", and {len(bad) - 1} others" if len(bad) > 1 else ""
    return ReplayCause(
        index_cause(value),
        f"Keep {parameter} inside 0 to {bound - 1}: {name} has {bound} entries for it"
        if is_known
        else f"Keep what {parameter} holds inside the axis of {name} that it indexes",
        (
            f"{shown} = {value}, but {name} has {bound} entries"
            if is_known
            else f"{shown} = {value} leads outside {name}",
            f"the address moves with {shown}",
        ),
        ((f"{shown} = {bad[at]}{others}", elements_of(parameter, bad)),),
        **place_of(finding.sites[0] if finding.sites else None),
        argument=parameter,
        allowed=ENTRIES,
        entry=(at, value),
    )


def _of_end(
    tensor: TensorRecord, parameter: str, entries: _Entries, finding: Finding
) -> Iterator[ReplayCause]:
    """An entry that only says where a loop or a mask ends, which may be as large as the tensor."""
    bound, name = tensor.shape[0], finding.argument or ""
    seen = {value for value in finding.values.values() if type(value) is int}
    bad = {at: value for at, value in entries.items() if not 0 <= value <= bound}
    own = next((at for at, value in bad.items() if value in seen), None)
    if own is None:
        return
    right = {at: 0 if value < 0 else bound for at, value in bad.items()}
    shown = f"{parameter}[{', '.join(map(str, own))}]"
    others = f", and {len(bad) - 1} others" if len(bad) > 1 else ""
    yield ReplayCause(
        index_cause(bad[own]),
        f"Keep {parameter} inside 0 to {bound}: {name} has {bound} entries",
        (f"{shown} = {bad[own]}, but {name} has {bound} entries",),
        ((f"{shown} = {right[own]}{others}", elements_of(parameter, right)),),
        **place_of(finding.sites[0] if finding.sites else None),
        argument=parameter,
        allowed=ENTRIES,
        entry=(own, bad[own]),
    )


def elements_of(
    parameter: str, elements: Mapping[tuple[int, ...], int]
) -> Callable[[MakeCorrection], Mapping[str, Any]]:
    return lambda make: {parameter: make(elements=elements)}
