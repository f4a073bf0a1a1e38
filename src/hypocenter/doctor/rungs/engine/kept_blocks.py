"""Rung: blocks that the cache keeps for later requests, and that were written all the same.

A traced run reads such blocks back after each step, so it knows the step. Whoever adopts one
answers with what another request, or nobody, meant.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Culprit, Proof, RootCause, Verdict, proven, row
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.engine_events import BlockChanged
from hypocenter.record.events import (
    Copied,
    Stepped,
    TensorRecord,
)

NAME = "kept blocks"


@dataclass(frozen=True, slots=True)
class _Writer:
    """What wrote the pages in the step in which a block changed: a copy, else a launch."""

    text: str
    use: LaunchMade | None = None
    argument: str | None = None
    copy: Copied | None = None


def kept_blocks(case: Case) -> list[Claim]:
    """The first block that changed while it was kept; what changed after it may follow from it."""
    changed = case.index.events_of(BlockChanged)
    if changed:
        page = case.tensors.get(changed[0].tensor)
        return [_claim(case, changed[0], page)] if page is not None else []
    num_steps = len({statistics.place.step for statistics in case.bundle.statistics})
    adopted = {
        block
        for event in case.steps
        for request in event.requests
        for block in request.blocks[: request.num_adopted]
    }
    if not num_steps or not adopted:
        return []
    return [
        row(
            Cause.KEPT_BLOCK_CHANGED,
            Verdict.REFUTED,
            NAME,
            f"the blocks that requests adopted ({len(adopted)}) were as they had been kept, after "
            f"each of {num_steps} steps",
            would_refute="a block with other contents than when it was kept",
        )
    ]


def _claim(case: Case, event: BlockChanged, page: TensorRecord) -> Claim:
    writer = _writer(case, event, page)
    what = f"block {event.block} of {page.name}"
    since = f"since step {event.kept_in}, when request {event.request} had filled it"
    text = (
        f"{what} was kept {since}, and was changed in step {event.step} {writer.text}"
        f"{_readers(case, event)}"
    )
    launch = writer.use.launch if writer.use else None
    access = case.access(launch, writer.argument or "", "store") if launch else None
    last = event.step - 1
    root = RootCause(
        cause=Cause.KEPT_BLOCK_CHANGED,
        sentence=f"{launch.kernel}: {text}" if launch else text,
        fix="Write a block only for the one request that owns it: what the cache keeps is for "
        "reading until it is given out anew",
        proof=Proof(
            f"read back after step {event.step}, {what} is not what it was when it was kept",
            f"step {event.step} left out",
            f"read back after step {max(last, event.kept_in)}, it still was",
        ),
        kernel=launch.kernel if launch else None,
        argument=writer.argument,
        tensor=page.name,
        place=writer.use.place if writer.use else None,
        culprit=(
            Culprit(writer.copy.site, f"copies into {page.name}")
            if writer.copy and writer.copy.site
            else None
        ),
    ).at(access)
    seq = writer.use.seq if writer.use else event.seq
    return proven(root, NAME, (text,), "the block being as it was kept", seq, (page.id,))


def _writer(case: Case, event: BlockChanged, page: TensorRecord) -> _Writer:
    for copy in case.index.events_of(Copied):
        tensor = case.tensors.get(copy.tensor) if copy.tensor is not None else None
        is_there = tensor is not None and tensor.allocation == page.allocation
        # A copy between two steps has the number of the one before it.
        if is_there and copy.direction == "in" and copy.step in (event.step - 1, event.step):
            at = f" at {copy.site}" if copy.site else ""
            return _Writer(f"by a copy from the host{at}", copy=copy)
    for step in case.steps:
        if step.step != event.step:
            continue
        for use in case.index.launches_of(step):
            written = case.written_by(use.launch)
            for name, tensor in case.tensors_of(use.launch).items():
                if tensor.allocation == page.allocation and name in written:
                    return _Writer(
                        f"by launch {_number(use)}{_whose(case, step, event)}", use, name
                    )
    return _Writer("by what this record does not show")


def _number(use: LaunchMade) -> str:
    return str(use.place.launch) if use.place is not None else "outside the plan"


def _whose(case: Case, step: Stepped, event: BlockChanged) -> str:
    """The request whose token has a slot in the block, if the host's slots say so."""
    slots, page = case.input_of(step, "slots"), case.tensors[event.tensor]
    size = page.shape[-1] if page.name.startswith("k") else page.shape[-2]
    start = 0
    for request in step.requests:
        for token in range(start, start + request.num_tokens):
            if slots is not None and token < len(slots) and slots[token] // size == event.block:
                return f", at slot {int(slots[token])} of request {request.id}"
        start += request.num_tokens
    return ", though no slot of that step lies in it"


def _readers(case: Case, event: BlockChanged) -> str:
    """The first request that read the block from then on without having filled it."""
    for step in case.steps:
        if step.step < event.step:
            continue
        for request in step.requests:
            if event.block in request.blocks[: request.num_adopted]:
                return f"; request {request.id} reads it in step {step.step}"
    return ""
