"""Rung: whether the blocks that requests adopt hold the keys of their own first tokens.

The prefix cache finds a block by a digest; what it was filled with is recorded apart from that: a
digest of the tokens, and on what its keys and values depend beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.engine_events import BlocksNamed, Entered
from hypocenter.record.events import Stepped
from hypocenter.record.prefixes import NOBODY, split_prefixes

NAME = "adopted blocks"


@dataclass(frozen=True, slots=True)
class _Filled:
    """Who filled a block, and the digest of all tokens up to its end; empty where nobody knows.

    `made_with` is as in BlocksNamed.
    """

    request: int
    prefix: bytes
    made_with: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Met:
    """A block that a request reads, and who had filled it: `at` is its number among the blocks.

    `other` is what it was made with that its reader has not: name, there, and here.
    """

    event: BlocksNamed
    block: int
    at: int
    by: int
    is_own_text: bool
    other: tuple[str, str, str] | None = None

    @property
    def is_right(self) -> bool:
        return self.is_own_text and self.other is None


def adopted_blocks(case: Case) -> list[Claim]:
    """The first block that was filled behind other tokens than its reader's."""
    met = list(_walk(case))
    wrong = next((meeting for meeting in met if not meeting.is_right), None)
    if wrong is not None:
        return [_claim(case, wrong, sum(meeting.is_right for meeting in met))]
    if not met:
        return []
    return [
        row(
            Cause.FOREIGN_BLOCK,
            Verdict.REFUTED,
            NAME,
            f"{count_text(len(met), 'block')} that requests adopted had been filled behind just "
            "their tokens",
            would_refute="a block that was filled behind others",
        )
    ]


def _walk(case: Case) -> Iterator[_Met]:
    """Each time that a request is given a block which another one had filled."""
    filled: dict[int, _Filled] = {}
    entered: set[int] = set()
    for event in case.bundle.events:
        match event:
            case Entered():
                if event.request in entered:  # of another engine, whose numbers begin anew
                    filled, entered = {}, set()
                entered.add(event.request)
            case Stepped():
                for block in _taken_anew(event, filled):
                    del filled[block]
            case BlocksNamed(prefixes=b""):
                for block in event.blocks:
                    filled[block] = _Filled(event.request, b"", event.made_with)
            case BlocksNamed():
                pairs = zip(event.blocks, split_prefixes(event.prefixes), strict=False)
                for at, (block, prefix) in enumerate(pairs, event.first):
                    own = _Filled(event.request, prefix, event.made_with)
                    was = filled.setdefault(block, own)
                    if was.request == event.request or not (was.prefix or was.made_with):
                        continue
                    is_own_text = not was.prefix or was.prefix == prefix
                    other = _other_setting(was.made_with, event.made_with)
                    yield _Met(event, block, at, was.request, is_own_text, other)


def _other_setting(
    there: Mapping[str, str], here: Mapping[str, str]
) -> tuple[str, str, str] | None:
    """What a block was made with and its reader has not, of what both say."""
    names = (name for name in there if name in here and there[name] != here[name])
    return next(((name, there[name], here[name]) for name in names), None)


def _taken_anew(event: Stepped, filled: dict[int, _Filled]) -> set[int]:
    """Blocks that are others' own by now than who had filled them."""
    return {
        block
        for request in event.requests
        for block in request.blocks[request.num_adopted :]
        if block in filled and filled[block].request != request.id
    }


def _claim(case: Case, wrong: _Met, num_right: int) -> Claim:
    event, use = wrong.event, _reader(case, wrong)
    text, fix, red, corrected = _words_of(wrong)
    tensor = case.tensor_of(use.launch, "block_tables") if use is not None else None
    access = case.access(use.launch, "block_tables") if use is not None else None
    kernel = use.launch.kernel if use is not None else None
    root = RootCause(
        cause=Cause.FOREIGN_BLOCK,
        sentence=f"{kernel}: {text}" if kernel else text,
        fix=fix,
        proof=Proof(
            red,
            corrected,
            f"{count_text(num_right, 'other block')} that requests adopted had been filled behind "
            "just their tokens",
        ),
        kernel=kernel,
        argument="block_tables",
        tensor=tensor.name if tensor else None,
        place=use.place if use is not None else None,
    ).at(access)
    seq = use.seq if use is not None else event.seq
    return proven(root, NAME, (text,), "equal digests of both", seq, (tensor.id,) if tensor else ())


def _words_of(wrong: _Met) -> tuple[str, str, str, str]:
    """What happened, what to do, what was seen, and what would be right."""
    event, by = wrong.event, _who(wrong.by)
    reads = f"request {event.request} reads it as its block {wrong.at} from then on"
    if not wrong.is_own_text:
        return (
            f"block {wrong.block} was filled by {by} behind other tokens than the first of request "
            f"{event.request}, which reads it as its block {wrong.at} from then on",
            "Find a kept block by a digest of all tokens up to its end, and of nothing less",
            f"the tokens up to the end of block {wrong.block} have one digest for {by}, which "
            f"filled it, and another for request {event.request}",
            f"a block that was filled behind the tokens of request {event.request}",
        )
    assert wrong.other is not None
    name, there, here = wrong.other
    return (
        f"block {wrong.block} was filled by {by} with another {name}, and {reads}",
        f"Have the digest by which a kept block is found cover the {name}, too",
        f"{name}: {there} when {by} filled block {wrong.block}, {here} for request {event.request}",
        f"a block that was filled with the {name} of request {event.request}",
    )


def _who(request: int) -> str:
    return "a process before" if request == NOBODY else f"request {request}"


def _reader(case: Case, wrong: _Met) -> LaunchMade | None:
    """The first launch that goes through the block for the request that adopted it."""
    for step in case.steps:
        if step.seq < wrong.event.seq:
            continue
        if not any(
            request.id == wrong.event.request and wrong.block in request.blocks
            for request in step.requests
        ):
            continue
        for use in case.index.launches_of(step):
            if any(fact.name == "block_tables" for fact in use.launch.facts):
                return use
    return None
