"""Causes of an access outside its tensor: an index, a mask, a stride, a number, or the tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from hypocenter.doctor.case import Case, array_of
from hypocenter.doctor.causes import Cause, index_cause
from hypocenter.doctor.kernel_text import (
    follows_what_it_loads,
    guard_line,
    is_index_in,
    is_mask_in,
    is_masked,
    line_text,
)
from hypocenter.doctor.rungs.replaying.mask_causes import (
    bounded_masks,
    by_one_causes,
    lacks_bound,
    lower_masks,
    strict_masks,
)
from hypocenter.doctor.rungs.replaying.replay_cause import (
    MakeCorrection,
    ReplayCause,
    causes_sooner_than_room,
    indices_of,
    place_of,
    source_of,
)
from hypocenter.doctor.rungs.replaying.stride_causes import wrong_strides
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord, TensorRecord, Values
from hypocenter.replay.findings import Finding, Site
from hypocenter.tensor import span_of

_CAST = re.compile(r"pointer_type|\.to\(tl\.pointer|bitcast")
_LOOSE = re.compile(r"<=|>=|[^-=<>]>[^=>]|\+ 1\b")
_INCLUSIVE = re.compile(r"<=|>=")

_Try = tuple[str, Callable[[MakeCorrection], Mapping[str, Any]]]


def cause_outside(
    case: Case, use: LaunchMade, finding: Finding, tensor: TensorRecord, site: Site | None
) -> ReplayCause:
    """What an access outside `tensor` is taken for; what may be to blame instead comes before."""
    access = _Access(case, use, finding, tensor, site)
    found = _of_cast(access) or _index_of(case, use, finding, tensor, access.number)
    if found:
        return found
    of_floats, cause = _of_floats(access), _of_mask(access)
    return cause if of_floats is None else replace(cause, sooner=(of_floats, *cause.sooner))


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
        """Lanes outside of a program that has any."""
        return self.finding.num_lanes / max(self.finding.num_programs, 1)


def _of_cast(access: _Access) -> ReplayCause | None:
    site = access.site
    if not _CAST.search(f"{access.line} {site.expression if site else ''}"):
        return None
    return ReplayCause(
        Cause.DTYPE_WIDTH,
        f"Read {access.name} with the width of its elements ({access.width:.0f} bytes): take the "
        "cast of the pointer away",
        (f"the kernel casts the pointer {access.name}: {access.line}",),
        (access.grown,),
        **place_of(site),
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
    )


def _of_mask(access: _Access) -> ReplayCause:
    """The mask, or the tensor; before that what else a replay may show to be wrong."""
    source, site = access.source, access.site
    is_own = not access.use.launch.facts
    is_free = bool(is_own and source and site and lacks_bound(source, access.finding, site))
    sooner = tuple(_sooner(access, is_free=is_free))
    if not is_own and (by_one := _by_one_of_the_engine(access, sooner)) is not None:
        return by_one
    if not access.has_mask or is_free:
        return ReplayCause(
            Cause.MISSING_MASK,
            f"Mask the access: `mask=` with the columns or rows that {access.name} has",
            (
                access.beyond,
                f"{access.lanes:.0f} lanes of a program are outside, and "
                + (
                    "its mask leaves an index free" if access.has_mask else "the access has no mask"
                ),
            ),
            (access.grown,),
            **place_of(site),
            sooner=sooner,
        )
    return ReplayCause(
        Cause.BUFFER_TOO_SMALL,
        f"Mask what lies beyond {access.name}, or make {access.tensor.name} larger",
        (access.beyond,),
        (access.grown,),
        **place_of(site),
        sooner=sooner,
    )


def _sooner(access: _Access, *, is_free: bool) -> Iterator[ReplayCause]:
    """What may be to blame instead, the likeliest first."""
    use, finding, tensor, site = access.use, access.finding, access.tensor, access.site
    sizes = dict.fromkeys((access.extent, *tensor.shape))
    guard = access.guard[1] if access.guard else ""
    numbers = causes_sooner_than_room(use, finding, sizes, guard, site)
    source = access.source
    if source is None or site is None or use.launch.facts:
        yield from numbers
        return
    strides = partial(wrong_strides, use, source, finding, tensor, site)
    by_one = by_one_causes(finding, tensor, site, access.guard, access.extent, access.width)
    for cause in (
        *strict_masks(source, finding, site),
        *(lower_masks(source, finding, site) if access.number < 0 else ()),
        *strides(exchanged=True),
        *(cause for cause in numbers if cause.scalar),
        *strides(exchanged=False),
        *(cause for cause in numbers if not cause.scalar),
        *bounded_masks(use, source, finding, tensor, site),
        *(() if is_free else by_one),
    ):
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
        )
    if access.has_mask or access.lanes > 1:
        return None
    return ReplayCause(
        Cause.OFF_BY_ONE,
        f"End one element earlier at {name}",
        (access.beyond, "one element of one lane, and no mask"),
        (access.grown,),
        **place_of(site),
    )


def _index_of(
    case: Case, use: LaunchMade, finding: Finding, tensor: TensorRecord, number: int
) -> ReplayCause | None:
    """The entry of an index tensor that led out of `tensor`, in a kernel without a contract."""
    source = case.sources.get(use.launch.source)
    if use.launch.facts or not tensor.shape or not tensor.strides[0] or not source:
        return None
    name, access = finding.argument or "", finding.sites[-1].expression if finding.sites else ""
    wanted, bound = number // tensor.strides[0], tensor.shape[0]
    if 0 <= wanted < bound:
        return None
    for parameter, other in case.tensors_of(use.launch).items():
        recorded = case.index.values_of(other.id, use.seq)
        if recorded is None or parameter == name or not recorded.dtype.startswith(("I", "U")):
            continue
        is_index = is_index_in(source, access, parameter)
        if not is_index and not follows_what_it_loads(source, parameter):
            continue
        entries = dict(zip(indices_of(recorded.shape), array_of(recorded).flat, strict=False))
        # What only says where a loop or a mask ends may be as large as the tensor is.
        most = bound - 1 if is_index else bound
        bad = {at: int(value) for at, value in entries.items() if not 0 <= value <= most}
        # An entry that is added to a row's start is known by its value at the faulty lane.
        seen = {value for value in finding.values.values() if type(value) is int}
        own = [v for v in bad.values() if v in seen or (is_index and v == wanted)]
        if not own:
            continue
        at = next(at for at, value in bad.items() if value == own[0])
        shown = f"{parameter}[{', '.join(map(str, at))}]"
        others = f", and {len(bad) - 1} others" if len(bad) > 1 else ""
        return ReplayCause(
            index_cause(own[0]),
            f"Keep {parameter} inside 0 to {most}: {name} has {bound} entries"
            if own[0] == wanted or not is_index
            else f"Keep {parameter} inside {name}: of {shown} = {own[0]} the address is "
            f"element {number}",
            (f"{shown} = {own[0]}, but {name} has {bound} entries",),
            ((f"{shown} = 0{others}", elements_of(parameter, dict.fromkeys(bad, 0))),),
            **place_of(finding.sites[0]),
            argument=parameter,
            entry=(at, own[0]),
        )
    return None


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


def elements_of(
    parameter: str, elements: Mapping[tuple[int, ...], int]
) -> Callable[[MakeCorrection], Mapping[str, Any]]:
    return lambda make: {parameter: make(elements=elements)}
