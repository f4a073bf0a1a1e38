"""Rung: whose blocks of the KV cache the slots and block tables of each step name.

An address can be legal and still be another request's memory. What each request owns is recorded
by the scheduler; what the device was told stands in the step's inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import RequestRecord, Stepped
from hypocenter.record.gap import Gap

NAME = "ownership"


@dataclass(frozen=True, slots=True)
class _Paged:
    """A launch that goes through the cache's pages, with the step's values of its inputs."""

    use: LaunchMade
    block_size: int
    values: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class _Wrong:
    """An entry that names what is not the request's; `right` is what its place should hold."""

    cause: Cause
    argument: str
    entry: tuple[int, ...]
    value: int
    right: int
    text: str


def ownership(case: Case) -> list[Claim]:
    """Slots, table entries and sequence rows that lead to what the token's request does not own."""
    claims: list[Claim] = []
    done: set[tuple[Cause, str]] = set()
    num_tokens = 0
    taken = _taken_from_owners(case.steps)
    for event in case.steps:
        if not event.requests:
            continue
        pages = list(_pages(case, event))
        num_tokens += sum(request.num_tokens for request in event.requests)
        for paged in pages:
            wrong = [*_find_wrong(paged, event.requests)]
            if "block_tables" in paged.values:
                # One is told; a damaged record may hold a million, which would cost minutes.
                wrong += itertools.islice(_shared_blocks(event.requests, paged.block_size), 1)
                wrong += [taken[event.seq]] if event.seq in taken else []
            for entry in wrong:
                if (entry.cause, entry.argument) in done:
                    continue
                done.add((entry.cause, entry.argument))
                claims.append(_claim(case, paged, entry, event.requests))
    if not num_tokens:
        if not case.is_foreign and case.launches:
            case.leave_unseen(
                Gap.not_recorded("who owns which block", "no step recorded its requests")
            )
        return []
    confirmed = {claim.hypothesis.cause for claim in claims}
    return claims + [
        row(
            cause,
            Verdict.REFUTED,
            NAME,
            f"{what} of {num_tokens} tokens lead to blocks of the tokens' own requests",
            would_refute="an entry that names a block of somebody else",
        )
        for cause, what in (
            (Cause.STALE_SLOT, "the slots"),
            (Cause.FOREIGN_BLOCK, "tables and rows"),
        )
        if cause not in confirmed
    ]


def _pages(case: Case, event: Stepped) -> Iterator[_Paged]:
    """The first launch of the step with slots, and the first with block tables."""
    seen: set[str] = set()
    for use in case.index.launches_of(event):
        facts = {fact.name: fact.tensor for fact in use.launch.facts}
        which = next((name for name in ("slots", "block_tables") if name in facts), None)
        cache = case.tensor_of(use.launch, "k_cache") or case.tensor_of(use.launch, "cache")
        if which is None or which in seen or cache is None:
            continue
        seen.add(which)
        values = {}
        for name in ("slots", "block_tables", "sequence_rows", "positions", "counts"):
            number = facts.get(name)
            recorded = case.index.values_of(number, event.seq) if number is not None else None
            if recorded is not None and number is not None:
                values[name] = case.full_array(recorded, case.tensors[number].shape)
        # What writes the cache need not be given positions and rows, which are the step's inputs.
        for name in ("positions", "sequence_rows", "counts"):
            if name not in values and (array := case.input_of(event, name)) is not None:
                values[name] = array
        if which in values:
            yield _Paged(
                use, cache.shape[-1] if which == "slots" else _block_size(case, use), values
            )


def _block_size(case: Case, use: LaunchMade) -> int:
    keys = case.tensor_of(use.launch, "k_cache")
    if keys is not None:
        return keys.shape[-1]
    size = next((fact.value for fact in use.launch.facts if fact.name == "block_size"), None)
    return size if isinstance(size, int) else 0


def _find_wrong(paged: _Paged, requests: tuple[RequestRecord, ...]) -> Iterator[_Wrong]:
    if paged.block_size < 1:
        return
    if "slots" in paged.values:
        yield from _wrong_slots(paged, requests)
    else:
        yield from _wrong_rows(paged, requests)
        yield from _wrong_tables(paged, requests)


def _tokens(requests: tuple[RequestRecord, ...], limit: int) -> Iterator[tuple[int, Any, int]]:
    """(number of the token in the batch, its request, its position), the first `limit` of them."""
    start = 0
    for request in requests:
        for number in range(min(request.num_tokens, limit - start)):
            yield start + number, request, request.first_position + number
        start += request.num_tokens


def _wrong_slots(paged: _Paged, requests: tuple[RequestRecord, ...]) -> Iterator[_Wrong]:
    slots, size = paged.values["slots"], paged.block_size
    owners = _owners(requests)
    for token, request, position in _tokens(requests, len(slots)):
        block = position // size
        if block >= len(request.blocks):
            continue
        right = request.blocks[block] * size + position % size
        value = int(slots[token])
        if value == right:
            continue
        owner = owners.get(value // size)
        whose = (
            f"block {value // size} of request {owner.id}"
            if owner and owner.id != request.id
            else f"offset {value % size} of its own block {value // size}, where position "
            f"{request.blocks.index(value // size) * size + value % size} belongs"
            if owner
            else f"block {value // size}, which nobody owns"
        )
        yield _Wrong(
            Cause.STALE_SLOT,
            "slots",
            (token,),
            value,
            right,
            f"slots[{token}] = {value} for position {position} of request {request.id}, which is "
            f"{whose}; the request's block {request.blocks[block]} gives slot {right}",
        )


def _wrong_rows(paged: _Paged, requests: tuple[RequestRecord, ...]) -> Iterator[_Wrong]:
    rows = paged.values.get("sequence_rows")
    if rows is None:
        return
    for token, request, _ in _tokens(requests, len(rows)):
        if int(rows[token]) != request.row:
            yield _Wrong(
                Cause.FOREIGN_BLOCK,
                "sequence_rows",
                (token,),
                int(rows[token]),
                request.row,
                f"sequence_rows[{token}] = {int(rows[token])} sends a token of request "
                f"{request.id} to another row of the block tables than its own, {request.row}",
            )


def _wrong_tables(paged: _Paged, requests: tuple[RequestRecord, ...]) -> Iterator[_Wrong]:
    tables = paged.values["block_tables"]
    owners = _owners(requests)
    for request in requests:
        last = (request.first_position + request.num_tokens - 1) // paged.block_size
        used = request.blocks[: last + 1]
        if request.row >= len(tables) or not used:
            continue
        given = tables[request.row, : len(used)]
        for at in np.flatnonzero(given != np.array(used[: len(given)]))[:1]:
            value = int(given[at])
            owner = owners.get(value)
            whose = f"a block of request {owner.id}" if owner else "a block that nobody owns"
            yield _Wrong(
                Cause.FOREIGN_BLOCK,
                "block_tables",
                (request.row, int(at)),
                value,
                used[at],
                f"block_tables[{request.row}, {at}] = {value} for request {request.id}, {whose}; "
                f"the request's own is {used[at]}",
            )


def _shared_blocks(requests: tuple[RequestRecord, ...], block_size: int) -> Iterator[_Wrong]:
    """Blocks that two requests of one step have, but for those that both only read.

    Of these one request at most did not adopt the block: it filled it.
    """
    having = [
        (block, at, request, at < request.num_adopted)
        for request in requests
        for at, block in enumerate(request.blocks)
    ]
    having.sort(key=lambda one: one[3])  # what was adopted last
    first: dict[int, tuple[int, RequestRecord]] = {}
    for block, at, request, is_adopted in having:
        other_at, other = first.setdefault(block, (at, request))
        if other.id == request.id:
            continue
        is_read_only = (at + 1) * block_size <= min(request.first_position, other.first_position)
        if not (is_adopted and is_read_only and at == other_at):
            yield _Wrong(
                Cause.FOREIGN_BLOCK,
                "block_tables",
                (request.row, at),
                block,
                -1,
                f"block {block} belongs to request {other.id} and to request {request.id}",
            )


def _taken_from_owners(steps: Sequence[Stepped]) -> dict[int, _Wrong]:
    """By event, the first step in which a request goes on with a block that another was given.

    A request that begins anew, having been put back, has nothing of what it had.
    """
    owners: dict[int, tuple[int, int]] = {}  # of each block the request that got it last, and when
    before: dict[int, RequestRecord] = {}
    for event in steps:
        for request in event.requests:
            was = before.get(request.id)
            before[request.id] = request
            num_had = _num_had(was, request) if was is not None else 0
            for at in range(request.num_adopted, len(request.blocks)):
                block = request.blocks[at]
                if at >= num_had:
                    owners[block] = request.id, event.step
                    continue
                owner, given = owners.get(block, (request.id, event.step))
                if owner != request.id:
                    return {event.seq: _foreign_entry(event, request, at, owner, given)}
    return {}


def _num_had(was: RequestRecord, request: RequestRecord) -> int:
    """How many of its blocks a request has from its last step; 0 where it begins anew.

    Blocks that only drafts lay in may have been given back.
    """
    is_behind = request.first_position < was.first_drawn
    pairs = zip(was.blocks, request.blocks, strict=False)
    num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    is_lost = num_same < len(was.blocks) and not was.num_drafts
    return 0 if is_behind or is_lost else num_same


def _foreign_entry(
    event: Stepped, request: RequestRecord, at: int, owner: int, given: int
) -> _Wrong:
    block = request.blocks[at]
    use = "written for" if at == len(request.blocks) - 1 else "read by"
    return _Wrong(
        Cause.FOREIGN_BLOCK,
        "block_tables",
        (request.row, at),
        block,
        -1,
        f"block {block} was {use} request {request.id} in step {event.step}, after it had been "
        f"given to request {owner} in step {given}",
    )


def _owners(requests: tuple[RequestRecord, ...]) -> dict[int, RequestRecord]:
    """Of each block the first request that owns it."""
    return {block: request for request in reversed(requests) for block in request.blocks}


def _with_own_block(
    requests: tuple[RequestRecord, ...], found: _Wrong
) -> tuple[RequestRecord, ...]:
    """The requests, of which that at the row of `found` has another block there."""
    number = 1 + max((block for request in requests for block in request.blocks), default=0)
    at = found.entry[1]
    return tuple(
        msgspec.structs.replace(
            request, blocks=(*request.blocks[:at], number, *request.blocks[at + 1 :])
        )
        if request.row == found.entry[0]
        else request
        for request in requests
    )


# -- claims ---------------------------------------------------------------------------------------


def _claim(case: Case, paged: _Paged, found: _Wrong, requests: tuple[RequestRecord, ...]) -> Claim:
    use, place = paged.use, ", ".join(map(str, found.entry))
    if found.right < 0:
        corrected = f"{found.argument}[{place}] = a block that nobody has"
        mended_requests = _with_own_block(requests, found)
        left = list(itertools.islice(_shared_blocks(mended_requests, paged.block_size), 1))
        green = f"with {corrected}, {left[0].text if left else 'no block has two owners'}"
    else:
        values = np.array(paged.values[found.argument])
        for wrong in _find_wrong(paged, requests):
            if wrong.argument == found.argument:
                values[wrong.entry] = wrong.right
        mended = _Paged(use, paged.block_size, {**paged.values, found.argument: values})
        left = [w for w in _find_wrong(mended, requests) if w.argument == found.argument]
        corrected = f"{found.argument}[{place}] = {found.right}"
        still = f"{len(left)} entries of {found.argument}"
        green = f"with {corrected} (and the like) {still} lead elsewhere"
    access = case.access(use.launch, found.argument)
    tensor = case.tensor_of(use.launch, found.argument)
    root = RootCause(
        cause=found.cause,
        sentence=f"{use.launch.kernel}: {found.text}",
        fix=f"Make {found.argument} of each step from the blocks that the request owns in that "
        f"step ({found.argument}[{place}] = {found.right})"
        if found.right >= 0
        else "Give a block to one request at a time: free it before it is given out again",
        proof=Proof(found.text, corrected, green),
        kernel=use.launch.kernel,
        argument=found.argument,
        tensor=tensor.name if tensor else None,
        place=use.place,
    ).at(access)
    return proven(
        root,
        NAME,
        (f"{use.where}: {found.text}",),
        "the scheduler's record of the request naming that block",
        use.seq,
        (tensor.id,) if tensor else (),
    )
