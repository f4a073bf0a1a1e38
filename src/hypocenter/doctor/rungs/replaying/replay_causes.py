"""What class of defect a replay's finding is, by its kind, its distance and the kernel's text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hypocenter.doctor.case import Case, array_of
from hypocenter.doctor.causes import Cause, index_cause
from hypocenter.doctor.kernel_text import (
    follows_what_it_loads,
    guard_line,
    is_index_in,
    is_masked,
    line_text,
    program_line,
)
from hypocenter.doctor.rungs.replaying.mask_causes import (
    bounded_masks,
    by_one_causes,
    lacks_bound,
    strict_masks,
)
from hypocenter.doctor.rungs.replaying.replay_cause import (
    MakeCorrection,
    ReplayCause,
    causes_sooner_than_room,
    place_of,
    scalars_in,
)
from hypocenter.doctor.rungs.replaying.stride_causes import wrong_strides
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord, TensorRecord
from hypocenter.replay.findings import AXES, Finding, FindingKind, Site
from hypocenter.tensor import span_of

_CAST = re.compile(r"pointer_type|\.to\(tl\.pointer|bitcast")
_LOOSE = re.compile(r"<=|>=|[^-=<>]>[^=>]|\+ 1\b")
_INCLUSIVE = re.compile(r"<=|>=")


#: Of several findings of a launch the earlier kinds explain the later ones.
_ORDER = (
    FindingKind.FREED_MEMORY, FindingKind.NULL_POINTER, FindingKind.ELEMENT_WIDTH,
    FindingKind.INT32_OVERFLOW, FindingKind.OUT_OF_BOUNDS, FindingKind.UNINITIALISED_READ,
    FindingKind.NEVER_WRITTEN, FindingKind.RACE,
)  # fmt: skip


def weight(finding: Finding) -> tuple[int, int]:
    """Lower for what is nearer to the cause: its kind, then the place in the kernel's text."""
    kind = FindingKind.INT32_OVERFLOW if finding.is_overflow else finding.kind
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER), finding.line or 0


def classify(
    case: Case, use: LaunchMade, finding: Finding, all_of_them: Sequence[Finding] = ()
) -> ReplayCause | None:
    """None for a finding that is no defect of the run."""
    tensor = case.tensor_of(use.launch, finding.argument or "")
    site = finding.sites[0] if finding.sites else None
    if finding.is_overflow:
        return _overflow(case, use, finding)
    if finding.kind is FindingKind.OUT_OF_BOUNDS and tensor is not None:
        if not tensor.address:  # torch's tensors of no elements
            return _null(finding, tensor, site)
        return _outside(case, use, finding, tensor, site)
    if finding.kind is FindingKind.ELEMENT_WIDTH and tensor is not None:
        return _other_width(finding, tensor, site, all_of_them)
    if finding.kind is FindingKind.RACE:
        return _race(case, use, finding, site)
    if finding.kind is FindingKind.NEVER_WRITTEN:
        return _unwritten(case, use, finding)
    if finding.kind is FindingKind.UNINITIALISED_READ and tensor is not None:
        return _uninitialised_read(case, use, finding, tensor, site)
    if finding.kind is FindingKind.FREED_MEMORY and tensor is not None:
        return _use_after_free(finding, tensor, site)
    if finding.kind is FindingKind.NULL_POINTER:
        return _null(finding, tensor, site)
    if finding.kind in _ELSEWHERE and tensor is not None:
        return _elsewhere(finding, tensor, site)
    return None


#: Memory that the launch cannot reach, and what that is called.
_ELSEWHERE = {
    FindingKind.HOST_POINTER: Cause.HOST_POINTER,
    FindingKind.WRONG_DEVICE: Cause.WRONG_DEVICE,
}


# -- addresses ------------------------------------------------------------------------------------


def _overflow(case: Case, use: LaunchMade, finding: Finding) -> ReplayCause:
    evidence: tuple[str, ...] = ()
    if finding.threshold is not None:
        evidence = (
            f"it overflows from program {AXES[finding.axis or 0]} = {finding.threshold} on",
        )
    small = tuple(
        small
        for name, tensor in case.tensors_of(use.launch).items()
        if tensor.dtype.lower() in ("i32", "i64") and (small := _small(case, use, name))
    )
    tries: list[tuple[str, Callable[[MakeCorrection], Mapping[str, Any]]]] = []
    if use.launch.constants.get("WIDE") is False:
        tries.append(("WIDE = True (64-bit offsets)", lambda make: {"WIDE": True}))
    tries += [(f"{name} small enough for 32 bits", make) for name, make in small]
    if finding.axis is not None and 0 < (finding.threshold or 0) < use.launch.grid[finding.axis]:
        grid, axis = use.launch.grid, finding.axis
        cut = (*grid[:axis], finding.threshold, *grid[axis + 1 :])
        tries.append(
            (
                f"grid {cut}, which ends before the first program that overflows",
                lambda make: {"grid": cut},
            )
        )
    kept = finding.origin.expression if finding.origin else "the offset"
    scalars = [] if use.launch.facts else scalars_in(use, finding)
    return ReplayCause(
        Cause.OFFSET_OVERFLOW,
        f"Compute {kept} in 64 bits: cast the index to int64 before it is multiplied",
        evidence,
        tuple(tries),
        **place_of(finding.origin),
        scalar=scalars[0] if scalars else None,
    )


def _small(
    case: Case, use: LaunchMade, name: str
) -> tuple[str, Callable[[MakeCorrection], Mapping[str, Any]]] | None:
    """A correction that makes an index tensor's entries small."""
    tensor = case.tensor_of(use.launch, name)
    recorded = case.index.values_of(tensor.id, use.seq) if tensor else None
    if tensor is None or recorded is None:
        return None
    values = case.full_array(recorded, tensor.shape)
    parameter = case.parameter_of(use.launch, name)
    elements = {
        tuple(map(int, at)): int(value) % 16
        for at, value in zip(_indices(values.shape), values.reshape(-1), strict=True)
        if value > 15
    }
    return (name, lambda make: {parameter: make(elements=elements)}) if elements else None


def _indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    import itertools

    yield from itertools.product(*map(range, shape))


def _other_width(
    finding: Finding, tensor: TensorRecord, site: Site | None, all_of_them: Sequence[Finding]
) -> ReplayCause | None:
    """A kernel that reads pairs on purpose is healthy as long as the pairs begin where they may."""
    name = finding.argument or ""
    width = finding.width_bytes or 8
    off = tensor.address % width
    if off:
        there = tensor.address - off
        return ReplayCause(
            Cause.MISALIGNMENT,
            f"Begin {tensor.name} at a multiple of {width} bytes, or read it element by element",
            (
                f"{tensor.name} begins at {tensor.address:#x}, {off} bytes past a multiple of "
                f"{width}, and is read {width} bytes at a time",
            ),
            (),
            **place_of(site),
            in_kernel=False,
            settled=(
                f"{tensor.name} at {there:#x}",
                f"{there:#x} is a multiple of {width}; {tensor.address:#x} is not",
            ),
        )
    if not any(finding.kind is FindingKind.OUT_OF_BOUNDS for finding in all_of_them):
        return None
    return ReplayCause(
        Cause.DTYPE_WIDTH,
        f"Read {name} with the width of its elements: take the cast of the pointer away",
        (f"what is read from {name} in the wrong width leads out of bounds",),
        (),
        **place_of(site),
    )


def _outside(
    case: Case, use: LaunchMade, finding: Finding, tensor: TensorRecord, site: Site | None
) -> ReplayCause:
    name = finding.argument or ""
    source = _source(case, use, site)
    line = line_text(source, site.line) if source and site else ""
    width = tensor.extent_bytes / max(span_of(tensor.shape, tensor.strides), 1)
    extent = span_of(tensor.shape, tensor.strides)
    number = finding.number if finding.number is not None else extent
    beyond_bytes = int((max(number, 0) + finding.num_lanes) * width)
    room = 2 * tensor.extent_bytes + beyond_bytes + 4096
    grown = (
        f"room for {int(room / max(width, 1))} elements behind {name}",
        lambda make: {name: make(num_bytes=room)},
    )
    if _CAST.search(f"{line} {site.expression if site else ''}"):
        return ReplayCause(
            Cause.DTYPE_WIDTH,
            f"Read {name} with the width of its elements ({width:.0f} bytes): take the cast of "
            "the pointer away",
            (f"the kernel casts the pointer {name}: {line}",),
            (grown,),
            **place_of(site),
        )
    lanes = finding.num_lanes / max(finding.num_programs, 1)
    guard = guard_line(source, site.line) if source and site else None
    if (found := _index_of(case, use, finding, tensor, number)) is not None:
        return found
    if leader := _led_by(case, use, finding):
        return ReplayCause(
            Cause.INDEX_RANGE,
            f"Keep what is worked out from {leader} inside {name}: it led to element {number} of "
            f"{extent}",
            (f"the address is worked out from what {leader} holds",),
            (grown,),
            **place_of(site),
            argument=leader,
        )
    # Another access of the same line may have the mask that this one has not.
    has_mask = is_masked(site.expression) if site and site.expression else "mask" in line
    distance = number - extent + 1 if number >= 0 else -number
    side = "past the last" if number >= 0 else "before the first"
    beyond = f"element {number} of {extent}: {distance} {side}"
    sizes = dict.fromkeys((extent, *tensor.shape))
    sooner = causes_sooner_than_room(
        use, finding, sizes, guard[1] if has_mask and guard else "", site
    )
    is_free = False
    if source is not None and site is not None and not use.launch.facts:
        inclusive = strict_masks(source, finding, site)
        unbounded = bounded_masks(use, source, finding, tensor, site)
        is_free = lacks_bound(source, finding, site)
        strides = partial(wrong_strides, use, source, finding, tensor, site)
        by_one = by_one_causes(finding, tensor, site, guard if has_mask else None, extent, width)
        sooner = tuple(
            replace(cause, evidence=(beyond, *cause.evidence))
            for cause in (
                *inclusive,
                *strides(exchanged=True),
                *(cause for cause in sooner if cause.scalar),
                *strides(exchanged=False),
                *(cause for cause in sooner if not cause.scalar),
                *unbounded,
                *(() if is_free else by_one),
            )
        )
    # Of a program's own kernel a replay says whether `<` is right; `strict_masks` has that.
    is_loose = bool(use.launch.facts and guard and _LOOSE.search(guard[1]))
    is_near = (number in (extent, -1) or lanes <= 1 or is_loose) and bool(use.launch.facts)
    if has_mask and guard and is_near and not is_free:
        return ReplayCause(
            Cause.OFF_BY_ONE,
            f"Compare with < instead of <= in `{guard[1]}`"
            if is_loose and _INCLUSIVE.search(guard[1])
            else f"Let the mask end {distance} earlier: `{guard[1]}` lets {beyond} through",
            (beyond, f"the access is masked, by line {guard[0]}: {guard[1]}"),
            (grown,),
            site.file if site else None,
            guard[0],
            guard[1],
            sooner=sooner,
        )
    if not has_mask and is_near and lanes <= 1:
        return ReplayCause(
            Cause.OFF_BY_ONE,
            f"End one element earlier at {name}",
            (beyond, "one element of one lane, and no mask"),
            (grown,),
            **place_of(site),
        )
    if not has_mask or is_free:
        return ReplayCause(
            Cause.MISSING_MASK,
            f"Mask the access: `mask=` with the columns or rows that {name} has",
            (
                beyond,
                f"{lanes:.0f} lanes of a program are outside, and "
                + ("its mask leaves an index free" if has_mask else "the access has no mask"),
            ),
            (grown,),
            **place_of(site),
            sooner=sooner,
        )
    return ReplayCause(
        Cause.BUFFER_TOO_SMALL,
        f"Mask what lies beyond {name}, or make {tensor.name} larger",
        (beyond,),
        (grown,),
        **place_of(site),
        sooner=sooner,
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
        entries = dict(zip(_indices(recorded.shape), array_of(recorded).flat, strict=False))
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
            ((f"{shown} = 0{others}", _elements(parameter, dict.fromkeys(bad, 0))),),
            **place_of(finding.sites[0]),
            argument=parameter,
        )
    return None


def _led_by(case: Case, use: LaunchMade, finding: Finding) -> str:
    """A tensor of floats, recorded, from which the address of an access is worked out."""
    source = case.sources.get(use.launch.source)
    access = finding.sites[-1].expression if finding.sites else ""
    for parameter, tensor in case.tensors_of(use.launch).items():
        is_known = case.index.values_of(tensor.id, use.seq) is not None
        is_float = not tensor.dtype.startswith(("I", "U"))
        if source and is_known and is_float and is_index_in(source, access, parameter):
            return parameter
    return ""


def _elements(
    parameter: str, elements: Mapping[tuple[int, ...], int]
) -> Callable[[MakeCorrection], Mapping[str, Any]]:
    return lambda make: {parameter: make(elements=elements)}


def _use_after_free(finding: Finding, tensor: TensorRecord, site: Site | None) -> ReplayCause:
    name = finding.argument or ""
    return ReplayCause(
        Cause.USE_AFTER_FREE,
        f"Keep {tensor.name} until its last launch has ended",
        (),
        ((f"{tensor.name} not freed", lambda make: {name: make(is_alive=True)}),),
        **place_of(site),
    )


def _elsewhere(finding: Finding, tensor: TensorRecord, site: Site | None) -> ReplayCause:
    name = finding.argument or ""
    there = (f"{tensor.name} on the launch's device", lambda make: {name: make(is_alive=True)})
    fix = f"Copy {tensor.name} to the device of the launch"
    cause = _ELSEWHERE[finding.kind]
    return ReplayCause(cause, fix, (finding.detail,), (there,), **place_of(site), in_kernel=False)


def _null(finding: Finding, tensor: TensorRecord | None, site: Site | None) -> ReplayCause:
    name = finding.argument or ""
    num_bytes = max(tensor.extent_bytes if tensor else 0, 4096 + 8 * finding.num_lanes)
    return ReplayCause(
        Cause.NULL_POINTER,
        f"Pass a tensor for {name}",
        (),
        ((f"{num_bytes} bytes behind {name}", lambda make: {name: make(num_bytes=num_bytes)}),),
        **place_of(site),
    )


# -- values ---------------------------------------------------------------------------------------


def _race(case: Case, use: LaunchMade, finding: Finding, site: Site | None) -> ReplayCause:
    source = _source(case, use, site)
    folded = program_line(source) if source else None
    place = place_of(site)
    if folded is not None and site is not None:
        place = {"file": site.file, "line": folded[0], "expression": folded[1]}
    single = (1,) * len(use.launch.grid)
    is_read = finding.has_read and not folded and finding.written_back_line is None
    name = finding.argument or "it"
    return ReplayCause(
        Cause.PROGRAM_RACE,
        f"Let no program read what another one writes: make two launches of it, or read from a "
        f"copy of {name}"
        if is_read
        else "Let one program write each element, or add with an atomic",
        (f"`{folded[1]}` gives several programs one index",) if folded else (),
        (("a grid of one program, which has nobody to race with", lambda make: {"grid": single}),),
        **place,
    )


def _unwritten(case: Case, use: LaunchMade, finding: Finding) -> ReplayCause:
    launch = use.launch
    name = finding.argument or ""
    access = case.access(launch, name, "store")
    source = case.sources.get(launch.source)
    guard = guard_line(source, access.line) if source and access else None
    counts = case.tensor_of(launch, "counts")
    tries: list[tuple[str, Callable[[MakeCorrection], Mapping[str, Any]]]] = []
    if counts is not None:
        parameter = case.parameter_of(launch, "counts")
        none = {(i,): 0 for i in range(counts.shape[0])}
        tries.append(("no row live", lambda make: {parameter: make(elements=none)}))
    tensor = case.tensor_of(launch, name)
    if tensor is not None and finding.element and len(finding.element) > 1:
        columns, strides = finding.element[-1], tensor.strides
        shape = (*tensor.shape[:-1], columns)
        tries.insert(
            0,
            (
                f"{name} only {columns} columns wide",
                lambda make: {name: make(shape=shape, strides=strides)},
            ),
        )
    if case.is_foreign:
        text = f"{tensor.name if tensor else name} filled with zeros before"
        tries = [(text, lambda make: {name: make(is_defined=True)})]
    return ReplayCause(
        Cause.OUTPUT_NOT_WRITTEN,
        f"Write every element of {name}: the mask of the store leaves some out"
        if guard or not case.is_foreign
        else f"Write every element of {name}: no program of the launch writes those",
        (f"the store is masked, by line {guard[0]}: {guard[1]}",) if guard else (),
        tuple(tries),
        access.file if access else None,
        guard[0] if guard else access.line if access else None,
        guard[1] if guard else access.expression if access else None,
    )


def _uninitialised_read(
    case: Case, use: LaunchMade, finding: Finding, tensor: TensorRecord, site: Site | None
) -> ReplayCause:
    name = finding.argument or ""
    whole = tensor.extent_bytes
    if case.fact_of(use.launch, name) in ("k_cache", "v_cache", "cache"):
        return ReplayCause(
            Cause.NONFINITE_PADDING,
            f"Mask the load of {name} to the keys that are live, with other=0.0",
            (f"entries of {tensor.name} that no token has written are read: 0 times NaN is NaN",),
            ((f"{tensor.name} cleared before", lambda make: {name: make(num_bytes=whole)}),),
            **place_of(site),
        )
    return ReplayCause(
        Cause.UNINITIALISED_READ,
        f"Write or clear {tensor.name} before it is read",
        (),
        ((f"{tensor.name} cleared before", lambda make: {name: make(num_bytes=whole)}),),
        **place_of(site),
    )


# -- text -----------------------------------------------------------------------------------------


def _source(case: Case, use: LaunchMade, site: Site | None) -> SourceRecord | None:
    """The text of the function that a site lies in."""
    if site is None:
        return None
    for source in case.bundle.sources:
        last = source.first_line + source.text.count("\n") + 1
        if source.function == site.function and source.first_line <= site.line <= last:
            return source
    return case.sources.get(use.launch.source)
