"""Causes of an access outside that lie in its mask, each with the text to try instead."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.mask_text import (
    MaskedAccess,
    MaskEdit,
    accesses_at,
    bound_edits,
    is_bounded,
    lower_edits,
    strict_edits,
)
from hypocenter.doctor.rungs.replaying.replay_cause import (
    MakeCorrection,
    ReplayCause,
    TextEdit,
    place_of,
)
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord, TensorRecord
from hypocenter.replay.findings import Finding, Site
from hypocenter.tensor import span_of

#: Conditions that are tried for one access; each is a replay.
_MAX_TRIES = 6


def strict_masks(source: SourceRecord, finding: Finding, site: Site) -> Iterator[ReplayCause]:
    """One for each `<=` in the mask where `<` may be meant."""
    for access in accesses_at(source, site.line, finding.argument or ""):
        for edit in strict_edits(source, access):
            was, now = ("<=", "<") if "<=" in edit.was else (">=", ">")
            yield ReplayCause(
                Cause.OFF_BY_ONE,
                f"Compare with {now} instead of {was} in `{edit.was}`",
                (f"the access is masked, by line {edit.line}: {edit.was}",),
                (),
                source.file,
                edit.line,
                edit.was,
                edit=_text_edit(source, edit, f"`{edit.now}` in line {edit.line}"),
            )


def bounded_masks(
    use: LaunchMade, source: SourceRecord, finding: Finding, tensor: TensorRecord, site: Site
) -> Iterator[ReplayCause]:
    """One for each condition that may be missing: an end of a loop, a number that was passed."""
    scalars = _scalars(use, tensor) if source.id == use.launch.source else []
    for access in accesses_at(source, site.line, finding.argument or ""):
        for edit in itertools.islice(bound_edits(source, access, scalars), _MAX_TRIES):
            compared = f"nothing in the mask compares `{edit.now.split(' < ')[0]}`"
            yield _lacking(source, site, access, edit, (compared,) if access.mask else ())


def lower_masks(source: SourceRecord, finding: Finding, site: Site) -> Iterator[ReplayCause]:
    """One for each index that the mask may have to keep from being negative."""
    for access in accesses_at(source, site.line, finding.argument or ""):
        for edit in itertools.islice(lower_edits(source, access), _MAX_TRIES):
            yield _lacking(source, site, access, edit, ())


def _lacking(
    source: SourceRecord,
    site: Site,
    access: MaskedAccess,
    edit: MaskEdit,
    evidence: tuple[str, ...],
) -> ReplayCause:
    """A mask that lacks the condition of `edit`."""
    where = f"in the mask of line {edit.line}" if access.mask else "as the mask"
    return ReplayCause(
        Cause.MISSING_MASK,
        f"Mask the access with `{edit.now}`{' as well' if access.mask else ''}",
        evidence,
        (),
        site.file,
        site.line,
        site.expression,
        edit=_text_edit(source, edit, f"`{edit.now}` {where}"),
    )


def lacks_bound(source: SourceRecord, finding: Finding, site: Site) -> bool:
    """Whether an access has a mask that leaves an index of its address free."""
    found = accesses_at(source, site.line, finding.argument or "")
    return any(access.mask is not None and not is_bounded(access) for access in found)


def _scalars(use: LaunchMade, tensor: TensorRecord) -> list[str]:
    """Whole numbers that the launch was given, the largest first: that leaves out the least.

    Of constants those that are a size of the tensor: others are sizes of blocks.
    """
    given = {a.name: a.value for a in use.launch.arguments if a.tensor is None}
    sizes = {*tensor.shape, span_of(tensor.shape, tensor.strides)}
    numbers = {
        name: value
        for name, value in (
            given | {name: n for name, n in use.launch.constants.items() if n in sizes}
        ).items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 1
    }
    return sorted(numbers, key=lambda name: -numbers[name])


def _text_edit(source: SourceRecord, edit: MaskEdit, text: str) -> TextEdit:
    return TextEdit(text, msgspec.structs.replace(source, text=edit.text))


def by_one_causes(
    finding: Finding,
    tensor: TensorRecord,
    site: Site,
    guard: tuple[int, str] | None,
    extent: int,
    width: float,
) -> Iterator[ReplayCause]:
    """One element too many, or one row: with room for that the replay is clean.

    `guard` is line and text of the mask, `extent` what the tensor holds, in elements of `width`
    bytes.
    """
    name = finding.argument or ""
    if finding.number != extent:
        return
    has_rows = len(tensor.shape) > 1 and tensor.shape[0] > 1
    steps = {"element": 1} | ({"row": max(tensor.strides)} if has_rows else {})
    masked = {"file": site.file, "line": guard[0], "expression": guard[1]} if guard else None
    for what, step in steps.items():
        text = f"room for one {what} more behind {name}"
        yield ReplayCause(
            Cause.OFF_BY_ONE,
            f"Let the mask end 1 earlier: `{guard[1]}` lets one {what} too many through"
            if guard
            else f"End one {what} earlier at {name}",
            (f"the access is masked, by line {guard[0]}: {guard[1]}",)
            if guard
            else (f"one {what}, and no mask",),
            ((text, _room(name, int((extent + step) * width))),),
            **(masked or place_of(site)),
            too_little=_room(name, int((extent + step - 1) * width)),
        )


def _room(name: str, num_bytes: int) -> Callable[[MakeCorrection], Mapping[str, Any]]:
    return lambda make: {name: make(num_bytes=num_bytes)}
