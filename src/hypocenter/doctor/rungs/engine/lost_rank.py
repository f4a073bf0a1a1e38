"""Rung: a process that held a part of the model, and that ended while the others needed it."""

from __future__ import annotations

from hypocenter.base.wording import count_text
from hypocenter.contracts.collectives import ALL_GATHER, ALL_REDUCE, BROADCAST
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, proven
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import Called

NAME = "lost rank"


def lost_rank(case: Case) -> list[Claim]:
    """The rank that is gone, and the collective that waited for it."""
    for event in case.index.events_of(Called):
        if event.lost is not None:
            return [_claim(case, event)]
    return []


def _claim(case: Case, event: Called) -> Claim:
    lost = event.lost
    assert lost is not None
    collectives = [contract.kernel for contract in (ALL_REDUCE, ALL_GATHER, BROADCAST)]
    waiting = (made for made in case.index.under_way if made.launch.kernel in collectives)
    use = next(waiting, None)
    waits = _waiting(event, use)
    who = f"rank {lost.rank} of {lost.num_ranks}, process {lost.process},"
    num_before = sum(bool(step.requests) and step.step < event.step for step in case.steps)
    root = RootCause(
        cause=Cause.LOST_RANK,
        sentence=f"step {event.step}: {who} {lost.how}; {waits}",
        fix="Look at what that process said last, on stderr; where nothing is, `dmesg` tells (as "
        "root) whether the system ended it for want of memory",
        proof=Proof(
            f"process {lost.process} {lost.how}",
            "all ranks alive at the end of the step",
            f"{count_text(num_before, 'step')} before ended with all of them, and this one did not",
        ),
        kernel=use.launch.kernel if use else None,
    )
    return proven(root, NAME, (waits,), "the rank alive after the step", event.seq)


def _waiting(event: Called, use: LaunchMade | None) -> str:
    if use is not None:
        return f"the first collective that had not ended was {use.where}: {use.launch.kernel}"
    return f"{event.call or 'the step'} needed it"
