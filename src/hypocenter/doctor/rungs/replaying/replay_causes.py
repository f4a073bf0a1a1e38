"""What class of defect a replay's finding is, by its kind, its distance and the kernel's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hypocenter.base.tensor import contiguous_strides
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.edits.product_text import wide_edits
from hypocenter.doctor.kernel_text import guard_line
from hypocenter.doctor.rungs.replaying.mask_causes import with_edit
from hypocenter.doctor.rungs.replaying.outside_causes import cause_outside
from hypocenter.doctor.rungs.replaying.race_causes import atomic_causes, race_cause
from hypocenter.doctor.rungs.replaying.ranks import LAST
from hypocenter.doctor.rungs.replaying.replay_cause import (
    TEST,
    Allowed,
    MakeCorrection,
    ReplayCause,
    TextEdit,
    indices_of,
    place_of,
    scalars_in,
    source_of,
)
from hypocenter.doctor.rungs.replaying.unwritten_causes import grids, wider_masks
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import TensorRecord
from hypocenter.replay.findings import AXES, Finding, FindingKind, Site

#: Of several findings of a launch the earlier kinds explain the later ones.
_ORDER = (
    FindingKind.FREED_MEMORY, FindingKind.NULL_POINTER, FindingKind.ELEMENT_WIDTH,
    FindingKind.INT32_OVERFLOW, FindingKind.OUT_OF_BOUNDS, FindingKind.BETWEEN_ROWS,
    FindingKind.UNDEFINED_LANE, FindingKind.UNINITIALISED_READ, FindingKind.NEVER_WRITTEN,
    FindingKind.RACE,
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
        return cause_outside(case, use, finding, tensor, site)
    if finding.kind is FindingKind.BETWEEN_ROWS and tensor is not None:
        return _between_rows(finding, tensor, site)
    if finding.kind is FindingKind.ELEMENT_WIDTH and tensor is not None:
        return _other_width(finding, tensor, site, all_of_them)
    if finding.kind is FindingKind.RACE and finding.is_of_lanes:
        return _race_of_lanes(case, use, finding, site)
    if finding.kind is FindingKind.UNDEFINED_LANE:
        return _undefined_lane(case, use, finding, site)
    if finding.kind is FindingKind.RACE:
        return race_cause(case, use, finding, site)
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


def _between_rows(finding: Finding, tensor: TensorRecord, site: Site | None) -> ReplayCause:
    """A kernel that takes a view for a packed tensor; the same launch of a packed one says so."""
    name, shape = finding.argument or "", tuple(tensor.shape)
    packed = contiguous_strides(shape)
    return ReplayCause(
        Cause.WRONG_STRIDE,
        f"Give the kernel the strides {tuple(tensor.strides)} of {name} and step by them, or give "
        "it a packed tensor",
        (f"{name} is a view of shape {shape}, whose rows do not lie one behind another",),
        ((f"{name} packed", lambda make: {name: make(shape=shape, strides=packed)}),),
        **place_of(site),
        allowed=TEST,
    )


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
    if not finding.is_meant_inside:  # 64 bits put nothing right: another number is wrong
        evidence += ("in 64 bits it would lie outside of its tensor as well",)
        return ReplayCause(
            Cause.OFFSET_OVERFLOW, "", evidence, (), **place_of(finding.origin), rank=LAST
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
        sooner=tuple(_wider(case, use, finding, evidence)),
        rank=LAST,
        allowed=TEST,
    )


def _wider(
    case: Case, use: LaunchMade, finding: Finding, evidence: tuple[str, ...]
) -> Iterator[ReplayCause]:
    """The product that overflows with one factor of 64 bits, the left one first."""
    source = source_of(case, use, finding.origin)
    if source is None or finding.origin is None or use.launch.facts:
        return
    edits = wide_edits(source, finding.origin.line, finding.origin.expression)
    for rank, edit in enumerate(edits):
        yield ReplayCause(
            Cause.OFFSET_OVERFLOW,
            f"Compute {edit.was} in 64 bits: `{edit.now}`",
            evidence,
            (),
            **place_of(finding.origin),
            edit=TextEdit(f"`{edit.now}` in line {edit.line}", with_edit(source, edit)),
            is_fix=True,
            rank=rank,
            allowed=Allowed(
                moved=frozenset({finding.argument or ""}), why="what has wrapped goes elsewhere"
            ),
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
        for at, value in zip(indices_of(values.shape), values.reshape(-1), strict=True)
        if value > 15
    }
    return (name, lambda make: {parameter: make(elements=elements)}) if elements else None


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


def _use_after_free(finding: Finding, tensor: TensorRecord, site: Site | None) -> ReplayCause:
    name = finding.argument or ""
    return ReplayCause(
        Cause.USE_AFTER_FREE,
        f"Keep {tensor.name} until its last launch has ended",
        (),
        ((f"{tensor.name} not freed", lambda make: {name: make(is_alive=True)}),),
        **place_of(site),
        is_fix=True,
    )


def _elsewhere(finding: Finding, tensor: TensorRecord, site: Site | None) -> ReplayCause:
    name = finding.argument or ""
    there = (f"{tensor.name} on the launch's device", lambda make: {name: make(is_alive=True)})
    fix = f"Copy {tensor.name} to the device of the launch"
    cause = _ELSEWHERE[finding.kind]
    return ReplayCause(
        cause, fix, (finding.detail,), (there,), **place_of(site), in_kernel=False, is_fix=True
    )


def _null(finding: Finding, tensor: TensorRecord | None, site: Site | None) -> ReplayCause:
    name = finding.argument or ""
    num_bytes = max(tensor.extent_bytes if tensor else 0, 4096 + 8 * finding.num_lanes)
    return ReplayCause(
        Cause.NULL_POINTER,
        f"Pass a tensor for {name}",
        (),
        ((f"{num_bytes} bytes behind {name}", lambda make: {name: make(num_bytes=num_bytes)}),),
        **place_of(site),
        allowed=TEST,
    )


# -- values ---------------------------------------------------------------------------------------


def _race_of_lanes(case: Case, use: LaunchMade, finding: Finding, site: Site | None) -> ReplayCause:
    """Which lane is to store what the kernel alone does not say, but where each adds to what is
    there."""
    name = finding.argument or "it"
    return ReplayCause(
        Cause.LANE_RACE,
        f"Put tl.debug_barrier() before the load, or keep what was stored to {name} in a variable"
        if finding.operation == "load"
        else f"Let one lane store each element of {name}, or add with an atomic",
        (),
        (),
        **place_of(site),
        sooner=tuple(atomic_causes(source_of(case, use, site), finding, site, Cause.LANE_RACE)),
        rank=LAST,
    )


def _undefined_lane(
    case: Case, use: LaunchMade, finding: Finding, site: Site | None
) -> ReplayCause:
    source = source_of(case, use, site)
    expression = site.expression if site else ""
    edit = None
    if source is not None and source.text.count(expression) == 1 and expression.endswith(")"):
        given = f"{expression[:-1]}, other=0)"
        text = source.text.replace(expression, given)
        edit = TextEdit(given, msgspec.structs.replace(source, text=text))
    return ReplayCause(
        Cause.UNDEFINED_LANE,
        "Give the load the `other` that changes nothing: 0 for a sum, -inf for a maximum",
        (finding.detail,),
        (),
        **place_of(site),
        edit=edit,
    )


def _unwritten(case: Case, use: LaunchMade, finding: Finding) -> ReplayCause:
    launch = use.launch
    name = finding.argument or ""
    access = case.access(launch, name, "store")
    source = case.sources.get(launch.source)
    tensor = case.tensor_of(launch, name)
    counts = case.tensor_of(launch, "counts")
    tries: list[tuple[str, Callable[[MakeCorrection], Mapping[str, Any]]]] = []
    if case.is_foreign:
        text = f"{tensor.name if tensor else name} filled with zeros before"
        tries = [(text, lambda make: {name: make(defined_as=0.0)})]
    elif counts is not None:
        parameter = case.parameter_of(launch, "counts")
        none = {(i,): 0 for i in range(counts.shape[0])}
        tries.append(("no row live", lambda make: {parameter: make(elements=none)}))
    sooner: list[ReplayCause] = []
    if case.is_foreign and access is not None and source is not None and tensor is not None:
        sooner += wider_masks(launch, source, access, tensor)
    if case.is_foreign:
        sooner.append(grids(launch, name))
    guard = guard_line(source, access.line) if source and access else None
    masked = guard if not case.is_foreign else None
    return ReplayCause(
        Cause.OUTPUT_NOT_WRITTEN,
        f"Write every element of {name}: "
        + (
            "no program of the launch writes those"
            if case.is_foreign
            else "the mask of the store leaves some out"
        ),
        (f"the store is masked, by line {masked[0]}: {masked[1]}",) if masked else (),
        tuple(tries),
        access.file if access else None,
        masked[0] if masked else access.line if access else None,
        masked[1] if masked else access.expression if access else None,
        sooner=tuple(sooner),
        rank=LAST,
        allowed=TEST,
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
            allowed=TEST,
        )
    return ReplayCause(
        Cause.UNINITIALISED_READ,
        f"Write or clear {tensor.name} before it is read",
        (),
        ((f"{tensor.name} cleared before", lambda make: {name: make(num_bytes=whole)}),),
        **place_of(site),
        is_fix=True,
    )
