"""Rung: the first operation of a program that made NaN or infinity, by what a `--nan` run saw.

The run made that operation again itself, as it was and with one fact changed. Infinities that are
meant, as in a mask, count only where they became NaN.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from hypocenter.base.errors import ErrorKind
from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import (
    Claim,
    Culprit,
    Proof,
    RootCause,
    Verdict,
    proven,
    row,
)
from hypocenter.doctor.rungs.nonfinite.kernel import claim_of_kernel
from hypocenter.doctor.rungs.nonfinite.padding import claim_of_padding
from hypocenter.doctor.rungs.nonfinite.text import (
    change_text,
    fix_text,
    link_text,
    operation_text,
    reached_text,
    sentence_of,
    value_text,
)
from hypocenter.record.gap import Gap
from hypocenter.record.nonfinite import (
    ChangedFact,
    NonFinite,
    NonFiniteReached,
    NumberEnd,
    NumberKind,
    NumbersWatched,
)

NAME = "first of the numbers"
_ASK = (
    "`hypo doctor --nan -- COMMAND` finds the first operation that made it, and "
    "`hypo doctor --again -- COMMAND` makes that run by itself"
)


def nonfinite(case: Case) -> list[Claim]:
    """The first operation whose NaN, or infinity, came out."""
    watched = case.index.events_of(NumbersWatched)
    if not watched:
        if case.bundle.fault.error_kind is not ErrorKind.NOT_A_NUMBER:
            return []
        told = f"the program found NaN or infinity itself, and ended there; {_ASK}"
        return [row(Cause.NONFINITE_VALUE, Verdict.INCONCLUSIVE, NAME, told)]
    for event in watched:
        _leave_unseen(case, event)
    made = {event.id: event for event in case.index.events_of(NonFinite)}
    ends = [e for e in case.index.events_of(NonFiniteReached) if e.of in made]
    first = next((e for e in ends if e.how is NumberEnd.ENDED), next(iter(ends), None))
    if first is None:
        return [_nothing_reached(made.values(), watched)]
    chain = _chain(first.of, made)
    if _is_read_by_one_launch(made.values(), watched):
        padding = claim_of_padding(case, chain[0])
        if isinstance(padding, RootCause):
            reached = (reached_text(first),)
            return [proven(padding, NAME, reached, "results that hang on them", chain[0].launched)]
    return [_claim(case, first, chain, made=made.values(), watched=watched)]


def _leave_unseen(case: Case, watched: NumbersWatched) -> None:
    if watched.is_eager:
        case.leave_unseen(
            Gap.not_examined(
                "code of torch.compile",
                "--nan ran the program without it; a number that only compiled code makes is not "
                "seen",
            )
        )
    if watched.num_lost:
        case.leave_unseen(
            Gap.not_examined(
                count_text(watched.num_lost, "result"),
                "overwritten or too large to be kept until it could be looked at",
            )
        )
    if watched.num_in_graphs:
        case.leave_unseen(
            Gap.not_examined("operations of graphs", "what a graph replays is not looked at")
        )
    if watched.num_hidden:
        case.leave_unseen(
            Gap.not_examined(
                count_text(watched.num_hidden, "operation"),
                "on sparse or complex numbers, on tensors of the program's own classes, or while "
                "torch.jit traced them: their results are not looked at",
            )
        )
    if watched.num_threads:
        case.leave_unseen(
            Gap.not_examined(
                f"operations of {count_text(watched.num_threads, 'thread')}",
                "those of the program's first thread, and of backward passes, are seen",
            )
        )
    if watched.problem:
        case.leave_unseen(Gap.not_examined("some operations", watched.problem))


def _nothing_reached(
    made: Sequence[NonFinite] | object, watched: Sequence[NumbersWatched]
) -> Claim:
    """Masks of -infinity, and NaN that nobody used, are no cause."""
    num = sum(event.num_operations + event.num_launches for event in watched)
    is_whole = _is_whole(watched)
    looked_at = "" if is_whole else " that were looked at"
    return row(
        Cause.NONFINITE_VALUE,
        Verdict.REFUTED if is_whole else Verdict.INCONCLUSIVE,
        NAME,
        f"of {count_text(num, 'operation')}{looked_at} none gave NaN, or an infinity that was not "
        "meant, that the host read, that reached a parameter, or that ended the program",
        would_refute="such a number",
    )


def _chain(last: int, made: dict[int, NonFinite]) -> list[NonFinite]:
    """From what made the first number to what made the one that came out."""
    chain = [made[last]]
    while chain[0].comes_from and len(chain) <= len(made):
        before = [made[number] for number in chain[0].comes_from if number in made]
        if not before:
            break
        chain.insert(0, min(before, key=_is_meant))
    return chain


def _is_read_by_one_launch(made: Collection[NonFinite], watched: Sequence[NumbersWatched]) -> bool:
    """Whether all that was seen came in with the data of one launch: no other can have made it."""
    if not _is_whole(watched):
        return False
    launches = {event.launched for event in made if event.kind is NumberKind.GIVEN}
    return (
        len(launches) == 1
        and 0 not in launches
        and all(event.kind is NumberKind.GIVEN for event in made)
    )


def _is_whole(watched: Sequence[NumbersWatched]) -> bool:
    """Whether all operations were looked at, so that none that was not can have made a number."""
    return not any(
        event.num_lost
        or event.num_in_graphs
        or event.num_hidden
        or event.num_threads
        or event.problem
        for event in watched
    )


def _why_unsure(
    root: NonFinite, made: Collection[NonFinite], watched: Sequence[NumbersWatched]
) -> str:
    """Why another can have made what was there before its first reader; "" where none can."""
    if not _is_whole(watched):
        return "some were not looked at"
    before = (event for event in made if event.number < root.number)
    if any(event.kind is not NumberKind.GIVEN for event in before):
        return "what was made before can have been copied past torch's operations"
    return ""


def _is_meant(event: NonFinite) -> bool:
    """An infinity that stands in the source or the data, as in a mask."""
    return event.kind is NumberKind.GIVEN and math.isinf(event.result.value)


def _claim(
    case: Case,
    reached: NonFiniteReached,
    chain: list[NonFinite],
    *,
    made: Collection[NonFinite],
    watched: Sequence[NumbersWatched],
) -> Claim:
    rest = [event for event in chain if not _is_meant(event)]
    root = rest[0] if rest else chain[-1]
    evidence = tuple(link_text(event) for event in chain if event is not root)
    evidence = (*evidence, reached_text(reached))
    unsure = _why_unsure(root, made, watched) if root.kind is NumberKind.GIVEN else ""
    is_sure = reached.is_sure and all(event.is_sure for event in chain)
    is_sure = is_sure and not unsure
    cause = Cause.UNINITIALISED_READ if root.kind is NumberKind.UNDEFINED else Cause.NONFINITE_VALUE
    sentence = sentence_of(root, unsure)
    if root.kind is NumberKind.IN_KERNEL:
        inside = claim_of_kernel(case, root)
        if is_sure and isinstance(inside, RootCause):
            return proven(inside, NAME, evidence, "finite results of a replay", root.launched)
        told = inside if isinstance(inside, str) else inside.sentence
        evidence = (*evidence, told)
    changed = root.changed
    is_tried = changed is not None and math.isfinite(changed) and root.is_reproduced
    if not (is_sure and is_tried and root.change is not ChangedFact.NONE):
        verdict = Verdict.CONFIRMED if is_sure and root.kind in _CERTAIN else Verdict.INCONCLUSIVE
        return row(
            cause,
            verdict,
            NAME,
            sentence,
            *evidence,
            would_refute="an earlier operation that gave such a number",
            kernel=operation_text(root),
        )
    assert changed is not None
    place, _, line = root.site.rpartition(":")
    claimed = RootCause(
        cause=cause,
        sentence=sentence,
        fix=fix_text(root),
        proof=Proof(
            f"made again with the same inputs, {operation_text(root)} gives "
            f"{value_text(root.result.value)} at {list(root.result.index)}",
            change_text(root),
            f"the same operation gives {value_text(changed)} there",
        ),
        kernel=operation_text(root),
        file=place or None,
        line=int(line) if place and line.isdigit() else None,
        expression=root.statement,
        culprit=_culprit(root),
    )
    return proven(
        claimed,
        NAME,
        evidence,
        "an earlier operation that gave such a number",
        root.seq,
    )


#: Seen as it is, without an operation that could be made again.
_CERTAIN = frozenset(
    {NumberKind.GIVEN, NumberKind.UNDEFINED, NumberKind.NO_ELEMENTS, NumberKind.TOO_FEW}
    | {NumberKind.ALL_IGNORED}
)


def _culprit(root: NonFinite) -> Culprit | None:
    if root.forward_site and root.forward_site != root.site:
        return Culprit(root.forward_site, f"makes what {root.node} differentiates")
    return None
