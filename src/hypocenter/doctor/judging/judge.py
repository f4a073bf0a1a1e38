"""The one order among proven causes: which of them is the root, and what only follows from it.

Every rung says what it proved, whatever others did. Here alone is decided what stands first:

1. What explains how the run ended stands before what does not.
2. What the good run has as well is no reason why this run differs from it, and stands last.
3. NaN and infinity only show what made them: any other cause stands before them.
4. Of what is left the earliest place is the root. A step's inputs come before its launches.
5. At one place a check of that launch tells more than that the good run had another result there.
   So does a check of the one line in which a kernel is not the good run's, whichever launch of it
   was checked, and a check of what that launch had left in memory: the good run says that it is
   that launch. A number outside its range tells less than that it is not the step's.
6. A later proof follows from the root where it hangs on what memory held, is of its tensors, or
   blames an index that the root's launch was the last to write. So does a page that changed where a
   launch that writes pages has strayed. So does what looks unwritten behind a launch that read
   freed memory. A kernel with another text than in the good run has a
   defect of its own, unless the root is the only line in which it differs.
7. Where the good run tells of a wrong result, and no test which fact made it, what hangs on memory
   that was written since is no root: it may follow from that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from hypocenter.base.errors import HypoError
from hypocenter.doctor.beside.counterpart import counterpart
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause, explains
from hypocenter.doctor.culprit import with_culprit
from hypocenter.doctor.diagnosis import Claim, RootCause
from hypocenter.doctor.installed_text import changes, texts_of
from hypocenter.doctor.judging.origin import last_writer, with_origin
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import OUTSIDE_PLANS
from hypocenter.replay.terms import KernelText

Rung = Callable[[Case], list[Claim]]
#: A launch that shows one of these may do so because of what others had written before it.
_OF_CONTENTS = frozenset(
    {
        Cause.NONFINITE_VALUE,
        Cause.NONFINITE_PADDING,
        Cause.UNINITIALISED_READ,
        Cause.OUTPUT_NOT_WRITTEN,
        Cause.PROGRAM_RACE,
        Cause.INDEX_RANGE,
        Cause.SENTINEL_CONSUMED,
        Cause.TOKEN_RANGE,
        Cause.ACCESS_OUTSIDE,
        Cause.WRONG_ANSWER,
    }
)
#: An access of a launch that shows one of these went where its tensor is not.
_STRAY = frozenset(
    {
        Cause.INDEX_RANGE,
        Cause.ACCESS_OUTSIDE,
        Cause.BUFFER_TOO_SMALL,
        Cause.BLOCK_TABLE_RANGE,
        Cause.OFFSET_OVERFLOW,
        Cause.SENTINEL_CONSUMED,
    }
)
#: A launch that read freed memory shows them: what lay there is what unwritten memory holds too.
_OF_LEFTOVERS = frozenset({Cause.OUTPUT_NOT_WRITTEN, Cause.UNINITIALISED_READ})
_OF_NUMBERS = frozenset({Cause.NONFINITE_VALUE, Cause.NONFINITE_PADDING})


@dataclass(frozen=True, slots=True)
class Judged:
    """Proven causes, the root first, and what is only another sight of one before it."""

    roots: tuple[RootCause, ...]
    consequences: tuple[str, ...]


def judge(case: Case, rungs: Mapping[str, Rung]) -> Judged:
    """Put what the rungs have proven in order; `rungs` by the names that their claims have."""
    proofs = [claim for claim in case.claims if claim.root is not None]
    differs = next((claim for claim in proofs if is_of_good_run(claim)), None)
    shared = [
        claim
        for claim in proofs
        if differs is not None and claim is not differs and _has_good_run(case, claim, rungs)
    ]

    def order(claim: Claim) -> tuple[bool, bool, bool, tuple[int, int], bool, bool]:
        root = _root(claim)
        return (
            not explain(case, root),
            claim in shared,
            root.cause in _OF_NUMBERS,
            _position(differs if differs and _tells_why(case, claim, differs) else claim),
            is_of_good_run(claim),
            root.cause is Cause.BAD_SCALAR,
        )

    roots: list[RootCause] = []
    consequences: list[str] = []
    kept: list[Claim] = []
    parted = next((claim for claim in case.claims if _is_open_end(claim)), None)
    for claim in sorted(proofs, key=order):
        if parted is not None and _hangs_on_it(case, claim, parted):
            consequences.append(_root(claim).sentence)
            continue
        if any(_follows(case, claim, before) for before in kept):
            consequences.append(_root(claim).sentence)
            continue
        kept.append(claim)
        if differs is not None and _is_of_what_it_left(claim, differs):
            claim = replace(claim, root=_where_it_was_left(claim, differs))
        root = with_culprit(case, claim, is_shared=claim in shared)
        roots.append(with_origin(case, root))
    return Judged(tuple(roots), tuple(consequences))


def by_place(case: Case) -> Judged:
    """The earliest cause that explains how the run ended before others, and nothing compared."""
    proofs = [claim for claim in case.claims if claim.root is not None]
    proofs.sort(key=lambda claim: (not explain(case, _root(claim)), _position(claim)))
    return Judged(tuple(map(_root, proofs)), ())


def is_of_good_run(claim: Claim) -> bool:
    """Whether what was proven is where this run parts from the good one."""
    return claim.hypothesis.diagnostic in ("good arguments", "good results")


def _tells_why(case: Case, claim: Claim, differs: Claim) -> bool:
    """Whether a check proves what is wrong where the runs part, though it is of another launch."""
    one, other = _root(differs), _root(claim)
    if _is_of_what_it_left(claim, differs):
        return True
    if claim is differs or (other.file, other.line) != (one.file, one.line):
        return False
    return _is_changed(case, other) and _is_its_only_change(case, one, other)


def _is_of_what_it_left(claim: Claim, differs: Claim) -> bool:
    """Whether a claim is about what the launch left in memory by which the runs part."""
    root = _root(differs)
    return root.place is not None and claim.left_by == (root.place.step, root.argument)


def _where_it_was_left(claim: Claim, differs: Claim) -> RootCause:
    """What a check says of memory, at the argument that had it left there."""
    root, at = _root(claim), _root(differs)
    return msgspec.structs.replace(
        at, cause=root.cause, sentence=f"{at.sentence}; then {root.sentence}", fix=root.fix
    )


def _is_open_end(claim: Claim) -> bool:
    """Whether the good run tells where the first wrong result is, and not why."""
    return is_of_good_run(claim) and claim.root is None and claim.place is not None


def _hangs_on_it(case: Case, claim: Claim, parted: Claim) -> bool:
    root, at = _root(claim), parted.place
    if at is None or root.cause not in _OF_CONTENTS or _is_changed(case, root):
        return False
    return (parted.seq, at.launch) < _position(claim)


def _root(claim: Claim) -> RootCause:
    assert claim.root is not None
    return claim.root


def explain(case: Case, root: RootCause) -> bool:
    """Whether a cause can be why the run ended as it did."""
    return any(explains(root.cause, kind) for kind in case.symptoms)


def _position(claim: Claim) -> tuple[int, int]:
    """The event that tells of it, and its launch there: what the host did to a step comes first."""
    place = _root(claim).place
    if place is None or place.plan == OUTSIDE_PLANS:
        return claim.seq, 0
    return claim.seq, place.launch


def _follows(case: Case, claim: Claim, root: Claim) -> bool:
    """Whether what was proven is another sight of an earlier cause.

    Of programs that are not the engine's kernels have defects of their own.
    """
    if set(root.tensors).intersection(claim.tensors):
        return True
    one, other = _root(root), _root(claim)
    if _has_written_entry(case, one, other) or _has_strayed(case, root, claim):
        return True
    if is_of_good_run(claim) and _tells_why(case, root, claim):
        return explain(case, one)
    if is_of_good_run(claim) and _position(claim) >= _position(root):
        return explain(case, one)
    if other.cause in _OF_NUMBERS:
        return explain(case, one)
    if one.cause is Cause.USE_AFTER_FREE and other.cause in _OF_LEFTOVERS:
        return one.place is not None and one.place == other.place
    if not is_of_good_run(root) or other.cause not in _OF_CONTENTS:
        return False
    if _position(root) >= _position(claim):
        return False
    return not _is_changed(case, other) or _is_its_only_change(case, one, other)


def _has_written_entry(case: Case, one: RootCause, other: RootCause) -> bool:
    """Whether the launch of one cause was the last to write the index that the other blames."""
    if other.entry is None or one.place is None:
        return False
    use = _use_of(case, other)
    if use is None:
        return False
    tensor = case.tensor_of(use.launch, other.entry.argument)
    writer = last_writer(case, use, tensor)
    return writer is not None and writer.place == one.place


def _has_strayed(case: Case, root: Claim, claim: Claim) -> bool:
    """Whether a launch that writes such pages strayed, no later than a kept page was changed."""
    if _root(root).cause not in _STRAY or _root(claim).cause is not Cause.KEPT_BLOCK_CHANGED:
        return False
    use = _use_of(case, _root(root))
    if use is None or _position(root) > _position(claim):
        return False
    tensors = case.tensors_of(use.launch)
    owners = {tensors[name].owner for name in case.written_by(use.launch) if name in tensors}
    return any(case.tensors[number].owner in owners for number in claim.tensors)


def _use_of(case: Case, root: RootCause) -> LaunchMade | None:
    return next((use for use in case.launches if use.place == root.place), None)


def _is_changed(case: Case, root: RootCause) -> bool:
    """Whether the kernel of a cause has another text than in the good run."""
    assert case.good is not None
    texts = {source.id for source in case.good.sources}
    use = _use_of(case, root)
    return use is not None and bool(use.launch.source) and use.launch.source not in texts


def _is_its_only_change(case: Case, one: RootCause, other: RootCause) -> bool:
    """Whether one cause is the only line in which the kernel of the other is not the good run's."""
    use = _use_of(case, other)
    assert use is not None
    assert case.good is not None
    lines = changes(use.launch, case.sources, texts_of(case.good.sources))
    return [(line.file, line.line) for line in lines] == [(one.file, one.line)]


# -- what the good run has as well ----------------------------------------------------------------


def _has_good_run(case: Case, claim: Claim, rungs: Mapping[str, Rung]) -> bool:
    """Whether the same test proves the same of the good run, whose answer is right."""
    root, rung = _root(claim), rungs.get(claim.hypothesis.diagnostic)
    good = case.good_case
    assert good is not None
    if root.finding is not None:
        return _is_replayed_alike(case, good, root)
    if rung is None or claim.hypothesis.diagnostic in _OF_THIS_RUN:
        return False
    return any(_is_alike(other.root, root) for other in rung(good) if other.root is not None)


#: What replays, or says how this run ended: of no use for another run.
_OF_THIS_RUN = ("replay", "compiled code", "hang", "core dump", "address", "refusals")


def _is_alike(one: RootCause, other: RootCause) -> bool:
    names = ("cause", "kernel", "argument", "line")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _is_replayed_alike(case: Case, good: Case, root: RootCause) -> bool:
    """Whether the replay of the good run's launch at that place finds the same."""
    use = _use_of(case, root)
    there = counterpart(case, good, use) if use is not None else None
    if there is None or there.place is None or root.finding is None:
        return False
    try:
        from hypocenter.replay.recorded import replay_place

        report = replay_place(good.index, there.place, text=KernelText(case.allow_source))
    except (HypoError, ImportError):  # what cannot be replayed says nothing
        return False
    names = ("kind", "argument", "line")
    return any(
        all(getattr(again, name) == getattr(root.finding, name) for name in names)
        for again in report.findings
    )
