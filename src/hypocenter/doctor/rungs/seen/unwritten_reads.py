"""Rung: what torch was seen to read of elements that nobody had written, of a foreign program.

The recorder saw it happen. Where one number or a comparison came of them it is confirmed; else
they may be padding, which is masked or cut off later, so it stays open. So it does where a launch
is proven to read such elements: NaN that it makes of them can have the bits that mark them.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Hypothesis, Verdict
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import UnwrittenRead

NAME = "unwritten reads"
_PADDING = "padding is read so too: it counts where it is not masked or cut off later"


def unwritten_reads(case: Case) -> list[Claim]:
    """A row for each tensor that was read so, but where a replay has proven why.

    It takes the place of a row which says that the cause was not tested.
    """
    found = list(_claims(case))
    seen = {claim.hypothesis.cause for claim in found}
    case.claims[:] = [
        claim
        for claim in case.claims
        if claim.hypothesis.verdict is not Verdict.NOT_TESTED or claim.hypothesis.cause not in seen
    ]
    return found


def _claims(case: Case) -> Iterator[Claim]:
    proven = {tensor for claim in case.claims if claim.root for tensor in claim.tensors}
    by_tensor: dict[int, tuple[int, UnwrittenRead]] = {}
    for seq, read in case.index.unwritten_reads.items():
        before = by_tensor.get(read.tensor)
        if before is None or (read.is_decided and not before[1].is_decided):
            by_tensor[read.tensor] = seq, read
    for seq, read in by_tensor.values():
        if read.tensor not in proven:
            use = next((made for made in case.launches if made.seq == seq), None)
            yield _claim(case, use, read)


def _claim(case: Case, use: LaunchMade | None, read: UnwrittenRead) -> Claim:
    argument = _argument(case, use, read)
    is_output = use is not None and argument in case.written_by(use.launch)
    why_open = _made_of_unwritten(case, use) if use is not None and is_output else ""
    seen = _text(case, read, may_be_made=bool(why_open))
    if not read.is_decided:
        why_open = _PADDING
    return Claim(
        Hypothesis(
            cause=Cause.OUTPUT_NOT_WRITTEN if is_output else Cause.UNINITIALISED_READ,
            verdict=Verdict.INCONCLUSIVE if why_open else Verdict.CONFIRMED,
            diagnostic=NAME,
            evidence=(seen, *((why_open,) if why_open else ())),
            would_refute="a run in which every element is written before it is read",
            kernel=use.launch.kernel if use is not None and is_output else None,
            argument=argument or None,
            is_observed=True,
        )
    )


def _made_of_unwritten(case: Case, use: LaunchMade) -> str:
    """What a launch up to this one is proven to read of such elements, and what follows of it."""
    for root in (claim.root for claim in case.claims if claim.root is not None):
        is_before = root.place is not None and root.place.launch <= use.seq
        if root.cause is Cause.UNINITIALISED_READ and is_before:
            given = f"{root.kernel} reads such elements of {root.argument}"
            return f"{given}: NaN that is made of them can have the same bits, and be written"
    return ""


def _argument(case: Case, use: LaunchMade | None, read: UnwrittenRead) -> str:
    """The parameter for which that launch was given memory of the tensor."""
    if use is None or read.tensor not in case.tensors:
        return ""
    allocation = case.tensors[read.tensor].allocation
    return next(
        (
            name
            for name, tensor in case.tensors_of(use.launch).items()
            if tensor.allocation == allocation
        ),
        "",
    )


def _text(case: Case, read: UnwrittenRead, *, may_be_made: bool) -> str:
    """`232 of 1000 elements of z, [768] to [999], were written by nobody when ...`."""
    tensor = case.tensors.get(read.tensor)
    name = tensor.name if tensor is not None else "a tensor"
    if read.num_unwritten:
        many = f"{read.num_unwritten} of {read.num_elements} elements of {name}"
        where = f", {list(read.first)} to {list(read.last)}," if read.num_unwritten > 1 else ""
        where = where or f", {list(read.first)},"
        verb = "were" if read.num_unwritten > 1 else "was"
    else:
        many, where, verb = f"elements of {name}", "", "were"
    what = "had the bits of what nobody wrote" if may_be_made else f"{verb} written by nobody"
    return f"{many}{where} {what} when {read.operation} read {name} at {read.site}"
