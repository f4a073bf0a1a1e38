"""Causes of an access outside its tensor: an index, a mask, a stride, a number, or the tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hypocenter.base.tensor import span_of
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.kernel_text import (
    guard_line,
    is_index_in,
    is_mask_in,
    is_masked,
    line_text,
)
from hypocenter.doctor.mask_text import uncast_edits
from hypocenter.doctor.rungs.replaying.index_causes import ENTRIES, elements_of, index_causes
from hypocenter.doctor.rungs.replaying.mask_causes import (
    MaskedSite,
    mask_causes,
    with_edit,
)
from hypocenter.doctor.rungs.replaying.ranks import INDEX, LAST
from hypocenter.doctor.rungs.replaying.replay_cause import (
    TEST,
    Allowed,
    MakeCorrection,
    ReplayCause,
    TextEdit,
    counts_and_grids,
    indices_of,
    place_of,
    source_of,
)
from hypocenter.doctor.rungs.replaying.stride_causes import stride_causes
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord, TensorRecord, Values
from hypocenter.replay.findings import Finding, Site

_CAST = re.compile(r"pointer_type|\.to\(tl\.pointer|bitcast")
_LOOSE = re.compile(r"<=|>=|[^-=<>]>[^=>]|\+ 1\b")
_INCLUSIVE = re.compile(r"<=|>=")

_Try = tuple[str, Callable[[MakeCorrection], Mapping[str, Any]]]


def cause_outside(
    case: Case, use: LaunchMade, finding: Finding, tensor: TensorRecord, site: Site | None
) -> ReplayCause:
    """What an access outside `tensor` is taken for; what may be to blame instead comes before."""
    access = _Access(case, use, finding, tensor, site)
    cast = _of_cast(access)
    if cast is not None:
        return cast
    cause, of_floats = _of_mask(access), _of_floats(access)
    entries = index_causes(case, use, finding, tensor)
    return replace(cause, sooner=(*entries, *((of_floats,) if of_floats else ()), *cause.sooner))


@dataclass(frozen=True)
class _Access:
    """An access outside of a tensor, and what the kernel's text says of it."""

    case: Case
    use: LaunchMade
    finding: Finding
    tensor: TensorRecord
    site: Site | None

    @cached_property
    def name(self) -> str:
        return self.finding.argument or ""

    @cached_property
    def source(self) -> SourceRecord | None:
        return source_of(self.case, self.use, self.site)

    @cached_property
    def line(self) -> str:
        return line_text(self.source, self.site.line) if self.source and self.site else ""

    @cached_property
    def extent(self) -> int:
        """Elements that the tensor holds."""
        return span_of(self.tensor.shape, self.tensor.strides)

    @cached_property
    def width(self) -> float:
        """Bytes of an element."""
        return self.tensor.extent_bytes / max(self.extent, 1)

    @cached_property
    def number(self) -> int:
        """The first element outside."""
        return self.extent if self.finding.number is None else self.finding.number

    @cached_property
    def grown(self) -> _Try:
        """The correction with which nothing of this kind can be outside."""
        more = int((max(self.number, 0) + self.finding.num_lanes) * self.width)
        room = 2 * self.tensor.extent_bytes + more + 4096
        text = f"room for {int(room / max(self.width, 1))} elements behind {self.name}"
        return text, lambda make: {self.name: make(num_bytes=room)}

    @cached_property
    def has_mask(self) -> bool:
        # Another access of the same line may have the mask that this one has not.
        expression = self.site.expression if self.site else ""
        return is_masked(expression) if expression else "mask" in self.line

    @cached_property
    def guard(self) -> tuple[int, str] | None:
        """Line and text of what compares in the mask."""
        if not self.has_mask or self.source is None or self.site is None:
            return None
        return guard_line(self.source, self.site.line)

    @cached_property
    def distance(self) -> int:
        return self.number - self.extent + 1 if self.number >= 0 else -self.number

    @cached_property
    def beyond(self) -> str:
        side = "past the last" if self.number >= 0 else "before the first"
        return f"element {self.number} of {self.extent}: {self.distance} {side}"

    @cached_property
    def lanes(self) -> float:
        """Lanes outside of a program that has any: a mean, and no count to be told."""
        return self.finding.num_lanes / max(self.finding.num_programs, 1)


def _of_cast(access: _Access) -> ReplayCause | None:
    site, source = access.site, access.source
    if not _CAST.search(f"{access.line} {site.expression if site else ''}"):
        return None
    fix = (
        f"Read {access.name} with the width of its elements ({access.width:.0f} bytes): take the "
        "cast of the pointer away"
    )
    told = (f"the kernel casts the pointer {access.name}: {access.line}",)
    uncast = [
        ReplayCause(
            Cause.DTYPE_WIDTH,
            fix,
            told,
            (),
            **place_of(site),
            edit=TextEdit(f"`{edit.now}` in line {edit.line}", with_edit(source, edit)),
            is_fix=True,
            allowed=Allowed(
                lost=True, anywhere=True, why="elements of the right width lie elsewhere"
            ),
        )
        for edit in (uncast_edits(source, site.line) if source and site else ())
        if source is not None
    ]
    return ReplayCause(
        Cause.DTYPE_WIDTH,
        fix,
        told,
        (access.grown,),
        **place_of(site),
        sooner=tuple(uncast),
        rank=LAST,
        allowed=TEST,
    )


def _of_floats(access: _Access) -> ReplayCause | None:
    found = _led_by(access.case, access.use, access.finding)
    if not found:
        return None
    leader, recorded = found
    zeros = dict.fromkeys(indices_of(recorded.shape), 0)
    return ReplayCause(
        Cause.INDEX_RANGE,
        f"Keep what is worked out from {leader} inside {access.name}: it led to element "
        f"{access.number} of {access.extent}",
        (f"the address is worked out from what {leader} holds",),
        ((f"all of {leader} = 0", elements_of(leader, zeros)),),
        **place_of(access.site),
        argument=leader,
        rank=INDEX,
        allowed=ENTRIES,
    )


def _of_mask(access: _Access) -> ReplayCause:
    """The access itself; before that what a replay may show to be wrong."""
    sooner = tuple(_sooner(access))
    if access.use.launch.facts and (by_one := _by_one_of_the_engine(access, sooner)) is not None:
        return by_one
    masked = "its mask lets it through" if access.has_mask else "the access has no mask"
    if access.use.launch.facts and not access.has_mask:
        return ReplayCause(
            Cause.MISSING_MASK,
            f"Mask the access: `mask=` with the columns or rows that {access.name} has",
            (access.beyond, masked),
            (access.grown,),
            **place_of(access.site),
            sooner=sooner,
            rank=LAST,
            allowed=TEST,
        )
    return ReplayCause(
        Cause.ACCESS_OUTSIDE,
        f"Keep what this reaches inside {access.name}, by its index, its mask or the grid; or give "
        f"{access.tensor.name} more elements: no one change that was tried does it without a loss",
        (access.beyond, masked),
        (access.grown,),
        **place_of(access.site),
        sooner=sooner,
        rank=LAST,
        allowed=TEST,
    )


def _sooner(access: _Access) -> Iterator[ReplayCause]:
    """What may be to blame instead."""
    use, finding, tensor, site = access.use, access.finding, access.tensor, access.site
    sizes = dict.fromkeys((access.extent, *tensor.shape))
    guard = access.guard[1] if access.guard else ""
    found = list(counts_and_grids(use, finding, sizes, guard, site))
    source = access.source
    if source is not None and site is not None and not use.launch.facts:
        is_known = access.case.index.values_of(tensor.id, use.seq) is not None
        found += mask_causes(MaskedSite(use, source, finding, tensor, site, is_known))
        found += stride_causes(use, source, finding, tensor, site)
    for cause in found:
        yield replace(cause, evidence=(access.beyond, *cause.evidence))


def _by_one_of_the_engine(access: _Access, sooner: tuple[ReplayCause, ...]) -> ReplayCause | None:
    """Of this package's own kernels the distance says it; of others a replay does."""
    guard, site, name = access.guard, access.site, access.name
    is_loose = bool(guard and _LOOSE.search(guard[1]))
    if not (access.number in (access.extent, -1) or access.lanes <= 1 or is_loose):
        return None
    if access.has_mask and guard:
        return ReplayCause(
            Cause.OFF_BY_ONE,
            f"Compare with < instead of <= in `{guard[1]}`"
            if is_loose and _INCLUSIVE.search(guard[1])
            else f"Let the mask end {access.distance} earlier: `{guard[1]}` lets {access.beyond} "
            "through",
            (access.beyond, f"the access is masked, by line {guard[0]}: {guard[1]}"),
            (access.grown,),
            site.file if site else None,
            guard[0],
            guard[1],
            sooner=sooner,
            rank=LAST,
            allowed=TEST,
        )
    if access.has_mask or access.lanes > 1:
        return None
    return ReplayCause(
        Cause.OFF_BY_ONE,
        f"End one element earlier at {name}",
        (access.beyond, "one element of one lane, and no mask"),
        (access.grown,),
        **place_of(site),
        sooner=sooner,
        rank=LAST,
        allowed=TEST,
    )


def _led_by(case: Case, use: LaunchMade, finding: Finding) -> tuple[str, Values] | None:
    """A tensor of floats from which the address of an access is worked out, and what it held."""
    source = case.sources.get(use.launch.source)
    access = finding.sites[-1].expression if finding.sites else ""
    for parameter, tensor in case.tensors_of(use.launch).items():
        recorded = case.index.values_of(tensor.id, use.seq)
        is_float = not tensor.dtype.startswith(("I", "U"))
        if not source or not recorded or not is_float:
            continue
        # Zeros that turn lanes off would prove nothing.
        if is_index_in(source, access, parameter) and not is_mask_in(source, access, parameter):
            return parameter, recorded
    return None
