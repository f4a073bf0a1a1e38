"""Causes of an access outside that lie in its mask, each with the text to try instead."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from hypocenter.base.tensor import span_of
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.edits.bound_text import (
    Bound,
    bound_edits_of,
    bounds_of,
    keeps_to_axes,
    lower_bounds,
    masks_beside,
    pair_edits,
    unused_masks,
)
from hypocenter.doctor.edits.tile_text import whole_index_edits
from hypocenter.doctor.mask_text import (
    MaskedAccess,
    MaskEdit,
    accesses_at,
    bound_edits,
    exchanged_edits,
    strict_edits,
    with_condition,
)
from hypocenter.doctor.rungs.replaying.lanes import is_tail
from hypocenter.doctor.rungs.replaying.ranks import (
    ANY_BOUND,
    BESIDE,
    BOUND,
    CROSSED,
    LOWER,
    NUMBER,
    NUMBERS,
    PAIR,
    STRICT,
    TILE,
    UNUSED,
)
from hypocenter.doctor.rungs.replaying.replay_cause import (
    NOTHING,
    Allowed,
    ReplayCause,
    TextEdit,
)
from hypocenter.doctor.rungs.replaying.trials import Bench
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord, TensorRecord
from hypocenter.replay.findings import Finding, Site

#: Conditions that are tried for one access; each is a replay.
_MAX_TRIES = 6
_AXIS = Allowed(lost=True, why="what the condition leaves out lies behind the end of its axis")
_SAME_RESULTS = Allowed(
    if_same_results=True, why="what is left out reaches no result: all that is written is the same"
)


@dataclass(frozen=True)
class MaskedSite:
    """Where an access outside was found: the launch, the text, what is accessed."""

    use: LaunchMade
    source: SourceRecord
    finding: Finding
    tensor: TensorRecord
    site: Site
    #: Whether what the tensor held is on record, so that results say something.
    is_known: bool = False

    @property
    def is_kernel(self) -> bool:
        """Whether the text is the kernel's own, whose names are those of the launch."""
        return self.source.id == self.use.launch.source

    @property
    def accesses(self) -> list[MaskedAccess]:
        return accesses_at(self.source, self.site.line, self.finding.argument or "")

    @property
    def given(self) -> dict[str, object]:
        """Numbers that the launch was given, by name."""
        if not self.is_kernel:
            return {}
        launch = self.use.launch
        given = {a.name: a.value for a in launch.arguments if a.tensor is None}
        return {
            name: value
            for name, value in {**given, **launch.constants}.items()
            if type(value) is int
        }


def mask_causes(at: MaskedSite) -> Iterator[ReplayCause]:
    """Masks that may be right, by rank: made more strict, with bounds exchanged, made and not used,
    one condition more, two of them, and a number where no name has it."""
    yield from _strict_masks(at)
    yield from _exchanged_masks(at)
    yield from _tile_masks(at)
    if (at.finding.number or 0) < 0:
        yield from _lower_masks(at)
    yield from _masks_there(at)
    yield from _axis_masks(at)
    yield from _other_bounds(at)


def _strict_masks(at: MaskedSite) -> Iterator[ReplayCause]:
    """One for each `<=` in the mask where `<` may be meant."""
    for access in at.accesses:
        for edit in strict_edits(at.source, access):
            was, now = ("<=", "<") if "<=" in edit.was else (">=", ">")
            yield ReplayCause(
                Cause.OFF_BY_ONE,
                f"Compare with {now} instead of {was} in `{edit.was}`",
                (f"the access is masked, by line {edit.line}: {edit.was}",),
                (),
                at.source.file,
                edit.line,
                edit.was,
                edit=_text_edit(at.source, edit, f"`{edit.now}` in line {edit.line}"),
                is_fix=True,
                rank=STRICT,
                allowed=_losses_allowed(at, access, _strict(edit.compare)),
            )


def _exchanged_masks(at: MaskedSite) -> Iterator[ReplayCause]:
    """One for each two bounds that the mask may have given to the wrong index of two."""
    for access in at.accesses:
        for edit, mask in itertools.islice(exchanged_edits(at.source, access), _MAX_TRIES):
            yield ReplayCause(
                Cause.MISSING_MASK,
                f"Compare `{edit.now}` instead of `{edit.was}`",
                (f"the access is masked, by line {edit.line}: {edit.was}",),
                (),
                at.source.file,
                edit.line,
                edit.was,
                edit=_text_edit(at.source, edit, f"`{edit.now}` in line {edit.line}"),
                is_fix=True,
                rank=CROSSED,
                allowed=_losses_allowed(at, access, mask),
            )


def _tile_masks(at: MaskedSite) -> Iterator[ReplayCause]:
    """One for each lane whose number within its tile is compared where the whole index is meant."""
    for access in at.accesses:
        for edit, compare in itertools.islice(whole_index_edits(at.source, access), _MAX_TRIES):
            yield ReplayCause(
                Cause.MISSING_MASK,
                f"Compare `{edit.now}` instead of `{edit.was}`: the address begins at the tile's "
                "start",
                (f"the access is masked, by line {edit.line}: {edit.was}",),
                (),
                at.source.file,
                edit.line,
                edit.was,
                edit=_text_edit(at.source, edit, f"`{edit.now}` in line {edit.line}"),
                is_fix=True,
                rank=TILE,
                allowed=_losses_allowed(at, access, compare),
            )


def _lower_masks(at: MaskedSite) -> Iterator[ReplayCause]:
    """One for each index that the mask may have to keep from being negative."""
    for access in at.accesses:
        for condition in itertools.islice(lower_bounds(access), _MAX_TRIES):
            edit = with_condition(at.source, access, condition)
            yield _lacking(at, access, edit, rank=LOWER)


def _masks_there(at: MaskedSite) -> Iterator[ReplayCause]:
    """Masks that the kernel makes already, and that this access is not given."""
    for access in at.accesses:
        for masks, rank in (
            (unused_masks(at.source, access), UNUSED),
            (masks_beside(at.source, access), BESIDE),
        ):
            for edit, mask, told in masks:
                allowed = _losses_allowed(at, access, mask)
                yield _lacking(at, access, edit, rank=rank, support=(told,), allowed=allowed)


def _losses_allowed(at: MaskedSite, access: MaskedAccess, mask: ast.expr | None) -> Allowed:
    """What a mask may leave out: what is no element of its axis, or what reaches no result."""
    if mask is not None and keeps_to_axes(access, mask, at.given, at.tensor):
        return _AXIS
    return _SAME_RESULTS if at.is_known else NOTHING


def _strict(compare: ast.Compare | None) -> ast.Compare | None:
    """`i < n` of `i <= n`."""
    if compare is None:
        return None
    is_less = isinstance(compare.ops[0], ast.LtE)
    return ast.Compare(compare.left, [ast.Lt() if is_less else ast.Gt()], compare.comparators)


def _axis_masks(at: MaskedSite) -> Iterator[ReplayCause]:
    """One for each index whose axis the strides of the tensor tell, then for pairs of them."""
    for access in at.accesses:
        bounds = list(bounds_of(access, at.given, at.tensor))
        named = [bound for bound in bounds if not bound.is_number]
        yield from _bound_causes(at, access, bound_edits_of(at.source, access, named), BOUND)
        yield from _bound_causes(at, access, pair_edits(at.source, access, named), PAIR)
        numbers = (
            *_bound_causes(at, access, bound_edits_of(at.source, access, bounds), NUMBER),
            *_bound_causes(at, access, pair_edits(at.source, access, bounds), NUMBERS),
        )
        for cause in numbers:
            yield replace(cause, resolve=partial(_if_tail, cause))


def _if_tail(cause: ReplayCause, bench: Bench, finding: Finding) -> Iterator[ReplayCause]:
    """A number says nothing of what is meant where whole programs lie outside."""
    if is_tail(bench.before, finding):
        yield cause


def _bound_causes(
    at: MaskedSite,
    access: MaskedAccess,
    edits: Iterator[tuple[MaskEdit, tuple[Bound, ...]]],
    rank: int,
) -> Iterator[ReplayCause]:
    for edit, used in itertools.islice(edits, _MAX_TRIES):
        support = tuple(text for bound in used for text in bound.evidence)
        size = next((bound.condition for bound in used if bound.is_number), "")
        told = f"no number that the kernel is given has the value of `{size}`" if size else ""
        yield _lacking(at, access, edit, rank=rank, support=support, allowed=_AXIS, told=told)


def _other_bounds(at: MaskedSite) -> Iterator[ReplayCause]:
    """Conditions with numbers whose axis is not known: ends of loops, and what was passed.

    They may lose nothing at all.
    """
    scalars = _scalars(at.use, at.tensor) if at.is_kernel else []
    for access in at.accesses:
        for edit in itertools.islice(bound_edits(at.source, access, scalars), _MAX_TRIES):
            yield _lacking(at, access, edit, rank=ANY_BOUND)


def _lacking(
    at: MaskedSite,
    access: MaskedAccess,
    edit: MaskEdit,
    *,
    rank: int,
    support: tuple[str, ...] = (),
    allowed: Allowed = NOTHING,
    told: str = "",
) -> ReplayCause:
    """A mask that lacks the condition of `edit`, or is another one than it should be."""
    where = f"in the mask of line {edit.line}" if access.mask else "as the mask"
    if edit.was:
        fix, said = f"Mask the access with `{edit.now}` instead of `{edit.was}`", edit.now
        evidence = f"the access is masked with `{edit.was}`"
    else:
        fix = f"Mask the access with `{edit.now}`{' as well' if access.mask else ''}"
        said = edit.now
        evidence = f"nothing in the mask holds `{edit.now}`" if access.mask else ""
    return ReplayCause(
        Cause.MISSING_MASK,
        fix,
        tuple(filter(None, (evidence, told))),
        (),
        at.site.file,
        at.site.line,
        at.site.expression,
        edit=_text_edit(at.source, edit, f"`{said}` {where}"),
        is_fix=True,
        rank=rank,
        support=support,
        allowed=allowed,
    )


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
    return TextEdit(text, with_edit(source, edit))


def with_edit(source: SourceRecord, edit: MaskEdit) -> SourceRecord:
    """The function with the text of an edit."""
    return msgspec.structs.replace(source, text=edit.text)
