"""Infinity that a kernel made in float16 and that its result hides, and the load to be float32.

A scale of 1 / sqrt(infinity) is 0, so what is stored is finite and wrong. Proven where the replay
stores what was found, makes infinity of finite numbers, and with one load in float32 makes none and
satisfies the program's own comparison in every element. With repairs in the place of the infinity
each wrong element has to change, since float32 mends what was merely rounded as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from hypocenter.base.errors import HypoError
from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, LastWriter, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.edits.width_text import float_edits
from hypocenter.doctor.mask_text import MaskEdit
from hypocenter.doctor.rungs.replaying.trials import edits_of
from hypocenter.doctor.rungs.seen.compared_numbers import StoredSide, stored_side
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.compared import ComparedUnequal
from hypocenter.record.events import SourceRecord
from hypocenter.record.gap import Gap
from hypocenter.replay.terms import KernelText

if TYPE_CHECKING:
    from hypocenter.replay.numbers import NumbersMade, NumberStep

NAME = "failed comparison"
#: Texts that are tried, each by a replay, and seconds for all of them.
MAX_TRIES, SECONDS = 8, 10.0


def claim_of_half(
    case: Case, event: ComparedUnequal, writers: tuple[LastWriter | None, LastWriter | None]
) -> Claim | None:
    """The load, where it is the only one that takes infinity and all wrong elements away."""
    for at, writer in enumerate(writers):
        side = stored_side(case, event, at, writer)
        if side is None or side.dtype != "F16":
            continue
        try:
            return _by_replay(case, event, side)
        except (HypoError, ImportError) as error:
            what = f"loads of {side.use.launch.kernel} in float32"
            case.leave_unseen(Gap.not_examined(what, str(error)))
    return None


def _by_replay(case: Case, event: ComparedUnequal, side: StoredSide) -> Claim | None:
    from hypocenter.replay.numbers import numbers_made

    source, place = case.sources.get(side.use.launch.source), side.use.place
    if source is None or place is None:
        return None

    def replay_of(edited: SourceRecord | None) -> NumbersMade | None:
        return numbers_made(case.index, place, text=KernelText(case.allow_source, edited=edited))

    before = replay_of(None)
    if before is None or not before.steps or not side.is_found_by(before):
        return None
    stop = case.limit.until(SECONDS)
    repaired = before
    repairs: list[NumberStep] = []
    while repaired.steps:  # ones for one operation may leave a sum behind it that is too large
        if len(repairs) >= MAX_TRIES or time.monotonic() > stop:
            return None
        repairs.append(repaired.steps[0])
        text = KernelText(case.allow_source)
        made = numbers_made(case.index, place, text=text, without=repairs)
        if made is None:
            return None
        repaired = made
    fitting: list[tuple[str, MaskEdit]] = []
    for number, (parameter, edit) in enumerate(_edits(case, side.use, source)):
        if number >= MAX_TRIES or time.monotonic() > stop:
            return None
        after = replay_of(msgspec.structs.replace(source, text=edit.text))
        if after is not None and not after.steps and side.is_right_in(before, after):
            fitting.append((parameter, edit))
    if len(fitting) != 1:
        return None
    if not side.wrong_ones_change(before, repaired):
        return _unproven(event, side, before.steps[0], *fitting[0])
    return _claim(case, event, side, before.steps[0], *fitting[0])


def _edits(case: Case, use: LaunchMade, source: SourceRecord) -> Iterator[tuple[str, MaskEdit]]:
    """Each load of float16 of the kernel's own text in float32, with the parameter."""
    for name, tensor in case.tensors_of(use.launch).items():
        if tensor.dtype == "F16":
            parameter = case.parameter_of(use.launch, name)
            for edit in float_edits(source, parameter):
                yield parameter, edit


def _found_text(event: ComparedUnequal, side: StoredSide, step: NumberStep) -> str:
    one, other = event.sides
    at = f"[{', '.join(map(str, event.index))}]" if event.index else ""
    return (
        f"{event.compared_at}: {one.name}{at} is {one.value:.6g} and {other.name}{at} "
        f"{other.value:.6g}; the replay of {side.use.where} stores what was found in every "
        f"element, and {_place_text(step)} gives {step.value} in program {step.program}"
    )


def _place_text(step: NumberStep) -> str:
    site = step.sites[-1]
    return f"`{site.expression}` at {site.file}:{site.line}"


def _unproven(
    event: ComparedUnequal, side: StoredSide, step: NumberStep, parameter: str, edit: MaskEdit
) -> Claim:
    """The infinity is there, and leads to none of the wrong elements, or not to all of them."""
    return row(
        Cause.NONFINITE_VALUE,
        Verdict.INCONCLUSIVE,
        NAME,
        _found_text(event, side, step),
        f"with `{edit.now}` in line {edit.line} nothing becomes infinite, and each element "
        "satisfies the comparison; but some wrong elements do not hang on the infinity, so "
        "rounding may be what is wrong with them",
        would_refute="a wrong element that stays wrong with that load in float32",
        kernel=side.use.launch.kernel,
        argument=parameter,
    )


def _claim(
    case: Case,
    event: ComparedUnequal,
    side: StoredSide,
    step: NumberStep,
    parameter: str,
    edit: MaskEdit,
) -> Claim:
    use, where = side.use, _place_text(step)
    source = case.sources[use.launch.source]
    root = RootCause(
        cause=Cause.NONFINITE_VALUE,
        sentence=f"{use.launch.kernel}: {where} gives {step.value} of finite numbers, since "
        f"{parameter} is loaded as float16, which ends at 65504; "
        f"{event.num_different} of {event.num_elements} elements of {side.parameter} are wrong "
        "for it",
        fix=f"Compute in float32: `{edit.now}`",
        proof=Proof(
            f"{_found_text(event, side, step)}; with 1 for what is not finite it stores another "
            "number in each wrong element",
            f"`{edit.now}` in line {edit.line}",
            f"the same replay makes nothing infinite, and each of "
            f"{count_text(event.num_elements, 'element')} satisfies the comparison",
        ),
        kernel=use.launch.kernel,
        argument=parameter,
        file=source.file,
        line=edit.line,
        expression=edit.was,
        place=use.place,
        launched_at=use.launch.site,
        edits=edits_of(source, msgspec.structs.replace(source, text=edit.text)),
    )
    refutes = "an element that fails the comparison with that load in float32"
    return proven(root, NAME, (), refutes, use.seq)
