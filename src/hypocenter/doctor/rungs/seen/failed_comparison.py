"""Rung: what the program itself found unequal before an assertion ended it, and who stored that.

A place to look at: which of the two tensors is right is the program's to say, so it is no cause;
but where whole numbers differ as a product of 32 bits makes them differ (`wrapped_result.py`), a
number of float16 became infinite on the way (`half_overflow.py`), two strides came the other way
round (`exchanged_strides.py`), or no program reaches what is wrong (`short_grid.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hypocenter.base.errors import HypoError
from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import Claim, ComparedElement, FailedComparison, LastWriter
from hypocenter.doctor.judging.origin import last_writer, writers_of
from hypocenter.doctor.kernel_text import accesses, follows_what_it_loads
from hypocenter.doctor.rungs.seen.exchanged_strides import claim_of_exchanged
from hypocenter.doctor.rungs.seen.half_overflow import claim_of_half
from hypocenter.doctor.rungs.seen.short_grid import claim_of_grid
from hypocenter.doctor.rungs.seen.wrapped_result import claim_of_wrapped
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.compared import ComparedSide, ComparedUnequal
from hypocenter.record.events import Place
from hypocenter.record.gap import Gap
from hypocenter.replay.terms import KernelText, ReadOperands

if TYPE_CHECKING:
    from hypocenter.replay.stored import LastStore

NAME = "failed comparison"
#: Launches that are replayed for one side, the last ones before the end.
MAX_LAUNCHES = 8
#: Each replays the launch with one thing put right, and takes the program's comparison for a judge.
_EXPLANATIONS = (claim_of_wrapped, claim_of_half, claim_of_exchanged, claim_of_grid)
#: By type how far the replay of a launch may be from what a GPU stored, which sums in another
#: order. Of whole numbers nothing.
_ROUNDING = {"F16": 1e-2, "BF16": 6e-2, "F32": 1e-4, "F64": 1e-8}


def failed_comparison(case: Case) -> list[Claim]:
    """Leaves the comparison with the case; a claim where one change of the kernel takes it away."""
    events = case.index.events_of(ComparedUnequal)
    if not events or case.bundle.fault.kind != "error":
        _tell_of_assertion(case)
        return []
    event = events[-1]
    one, other = (_element(case, event, side) for side in event.sides)
    claim: Claim | None = None
    if not any(claim.root is not None for claim in case.claims):
        writers = one.writer, other.writer
        tried = (of(case, event, writers) for of in _EXPLANATIONS)
        claim = next(filter(None, tried), None)
    case.compared = FailedComparison(
        site=event.site,
        compared_at=event.compared_at,
        sides=(one, other),
        index=event.index,
        num_different=event.num_different,
        num_elements=event.num_elements,
        is_first=event.is_first,
    )
    return [claim] if claim is not None else []


def _tell_of_assertion(case: Case) -> None:
    """That an assertion ended the program, and that it compares no launch's results."""
    fault = case.bundle.fault
    is_assertion = fault.is_statement and fault.call.startswith("`assert ")
    is_proven = any(claim.root is not None for claim in case.claims)
    if case.is_foreign and is_assertion and not is_proven:
        why = (
            "its text compares nothing that a recorded launch stored as it stands, so the program "
            "alone says that it is wrong"
        )
        at = f" at {fault.site}" if fault.site else ""
        case.leave_unseen(Gap.not_examined(f"what {fault.call}{at} tests", why))


def _element(case: Case, event: ComparedUnequal, side: ComparedSide) -> ComparedElement:
    writer = _writer(case, event, side) if side.allocation else None
    return ComparedElement(name=side.name, value=side.value, writer=writer)


def _writer(case: Case, event: ComparedUnequal, side: ComparedSide) -> LastWriter | None:
    """The last launch before the comparison whose replay stores to the element; None, and a gap,
    where one of which that is not known comes before any that does."""
    before = [made for made in case.launches if made.seq < event.seq]
    for made in writers_of(case, before, side.allocation)[:MAX_LAUNCHES]:
        why = ""
        if unknown := _unknown_addresses(case, made):
            why = f"it works out addresses or masks from {unknown}, whose contents nobody recorded"
        try:
            found = None if why else _stored_by(case, made, side)
        except (HypoError, ImportError) as error:
            why, found = str(error), None
        if why:
            what = f"whether {made.where} ({made.launch.kernel}) stored {side.name}"
            case.leave_unseen(Gap.not_examined(what, why))
            return None
        if found is not None:
            return found
    return None


def _unknown_addresses(case: Case, made: LaunchMade) -> str:
    """Tensors that decide where a kernel stores, and what they held is not known."""
    source, known = case.sources.get(made.launch.source), _whole_tensors(case, made)
    return ", ".join(
        name
        for name, parameter in _read(case, made)
        if case.tensors_of(made.launch)[name].id not in known
        and (source is None or follows_what_it_loads(source, parameter))
    )


def _whole_tensors(case: Case, made: LaunchMade) -> set[int]:
    """Tensors of a launch whose whole contents before it were recorded.

    Of floats a snapshot may have what nobody wrote alone, and zeros for the rest.
    """
    held = case.index.values(made.place) if made.place is not None else {}
    whole = {number for number, values in held.items() if values.dtype.upper() not in _ROUNDING}
    for outcome in case.bundle.outcomes:
        if outcome.launch == made.seq:
            whole |= {values.tensor for values in outcome.given}
    return whole


def _stored_by(case: Case, made: LaunchMade, side: ComparedSide) -> LastWriter | None:
    from hypocenter.replay.operands import CutToTF32

    if made.place is None:
        return None
    store = _last_store(case, made, made.place, side)
    if store is None:
        return None
    gives_it, gives_it_cut = _gives_it(case, made, side, store.value), False
    if gives_it is False and made.launch.device.startswith("cuda"):
        cut = CutToTF32()
        again = _last_store(case, made, made.place, side, cut)
        if again is not None and cut.sites:
            gives_it_cut = _gives_it(case, made, side, again.value) is True
    return LastWriter(
        kernel=made.launch.kernel,
        parameter=store.parameter,
        place=made.place,
        launched_at=made.launch.site,
        program=store.program,
        file=store.site.file,
        line=store.site.line,
        expression=store.site.expression,
        value=store.value,
        gives_it=gives_it,
        gives_it_cut=gives_it_cut,
        fed_by=tuple(_fed_by(case, made, store.parameter)),
    )


def _last_store(
    case: Case,
    made: LaunchMade,
    place: Place,
    side: ComparedSide,
    operands: ReadOperands | None = None,
) -> LastStore | None:
    """The store to the compared element by the replay of a launch."""
    from hypocenter.replay.stored import last_store

    parameters = [
        argument.name
        for argument in made.launch.arguments
        if argument.tensor in case.tensors
        and case.tensors[argument.tensor].allocation == side.allocation
    ]
    text = KernelText(case.allow_source)
    return last_store(case.index, place, parameters, side.address, text=text, operands=operands)


def _gives_it(
    case: Case, made: LaunchMade, side: ComparedSide, value: int | float | None
) -> bool | None:
    """Whether the replay stored what the program found; None where it could not be known."""
    known, tensors = _whole_tensors(case, made), case.tensors_of(made.launch)
    if value is None or any(tensors[name].id not in known for name, _ in _read(case, made)):
        return None
    if isinstance(side.value, int) or isinstance(value, int):
        return side.value == value
    if math.isnan(value) or math.isnan(side.value):
        return math.isnan(value) and math.isnan(side.value)
    return math.isclose(value, side.value, rel_tol=_ROUNDING.get(side.dtype, 0.0), abs_tol=1e-6)


def _read(case: Case, made: LaunchMade) -> Iterator[tuple[str, str]]:
    """The tensors that a kernel loads from: the case's name of each, and the parameter."""
    source = case.sources.get(made.launch.source)
    for name in case.tensors_of(made.launch):
        parameter = case.parameter_of(made.launch, name)
        if source is None or any(
            access.operation != "store" for access in accesses(source, parameter, {})
        ):
            yield name, parameter


def _fed_by(case: Case, made: LaunchMade, stored: str) -> Iterator[tuple[str, str]]:
    """What the launch read that launches before it wrote, and which did so last."""
    for name, parameter in _read(case, made):
        tensor = case.tensors_of(made.launch)[name]
        writer = last_writer(case, made, tensor)
        if writer is not None and parameter != stored:
            yield parameter, f"{writer.where} ({writer.launch.kernel})"
