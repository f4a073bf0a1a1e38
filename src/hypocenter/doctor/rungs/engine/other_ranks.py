"""Rung: what the processes of the other ranks launched, where a model is held in several parts.

What one of them computes wrongly shows in the first one only behind their next common sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import Claim
from hypocenter.doctor.rungs.contracts import contracts
from hypocenter.doctor.rungs.good_run import good_arguments, good_results
from hypocenter.doctor.rungs.values import values
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Place

_RUNGS = (contracts, values, good_arguments, good_results)


def other_ranks(case: Case) -> list[Claim]:
    """What is proven of another rank, at the step and launch of this one that are the same."""
    claims: list[Claim] = []
    for number, other in enumerate(case.bundle.others, 1):
        good = _counterpart(case, number, other)
        # It ended as all of them did.
        other = msgspec.structs.replace(other, fault=case.bundle.fault)
        theirs = Case(other, good, allow_source=case.allow_source)
        for rung in _RUNGS:
            theirs.claims += rung(theirs)
        claims += _claims_of(case, number, theirs)
    return claims


def _counterpart(case: Case, number: int, other: Bundle) -> Bundle | None:
    """The good run's process of the same rank, if there is one."""
    others = case.good.others if case.good is not None else ()
    if len(others) != len(case.bundle.others) or others[number - 1].device != other.device:
        return None
    return others[number - 1]


def _claims_of(case: Case, number: int, theirs: Case) -> Iterator[Claim]:
    for claim in theirs.claims:
        root = claim.root
        if root is None:
            continue
        said = f"rank {number} ({theirs.bundle.device or 'no device'}): {root.sentence}"
        # Numbers of tensors and events are their own; steps and launches run side by side.
        yield replace(
            claim,
            root=msgspec.structs.replace(root, sentence=said),
            seq=_seq_of(case, root.place),
            tensors=(),
        )


def _seq_of(case: Case, place: Place | None) -> int:
    """The number of the first rank's event of that step."""
    seqs = (event.seq for event in case.steps if place is not None and event.step == place.step)
    return next(seqs, 1 << 61)
