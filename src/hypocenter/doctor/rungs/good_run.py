"""Rung: the good run beside this one: which of the facts that differ makes the answer another one.

A fact that differs is no cause. It is one where its launch gave another result, everything before
was equal, and it alone differs there: the good run is then the test, a run with the good fact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hypocenter.base.wording import count_text
from hypocenter.doctor.alignment import DRAWN_BY
from hypocenter.doctor.beside.good_run_claims import (
    ARGUMENTS,
    MAX_TOLD,
    RESULTS,
    of_fact,
    of_line,
)
from hypocenter.doctor.beside.host_lines import (
    failed_behind,
    of_changed_line,
    open_changes,
    other_prompt,
    other_text,
)
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Verdict, row
from hypocenter.doctor.diff import differing_pairs, rundiff
from hypocenter.doctor.difference import Answers, Compared, Difference, Pair, RunDiff
from hypocenter.doctor.installed_text import Change, changes, texts_of
from hypocenter.doctor.rungs.values import first_spoilt
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import LaunchRecord, Place, TensorRecord
from hypocenter.record.gap import Gap
from hypocenter.record.trace_log import MAX_TENSOR_BYTES


def good_arguments(case: Case) -> list[Claim]:
    """What a launch was asked for, and not in the good run, if that makes the answer wrong."""
    if case.good is None:
        if case.bundle.fault.kind == "differs":
            case.leave_unseen(
                Gap.not_recorded("a run that is right", "give its bundle with --good BUNDLE")
            )
        return []
    return _of_rung(case, ARGUMENTS)


def good_results(case: Case) -> list[Claim]:
    """The first wrong result of a launch that was asked for the same, and the line that differs."""
    if case.good is None:
        return []
    case.unseen |= dict.fromkeys(_compare(case, case.good).unseen)
    case.unseen |= dict.fromkeys(_weights_not_read(case))
    claims = _of_rung(case, RESULTS)
    if case.kind in _OF_ENDS and not any(c.root for c in (*case.claims, *claims)):
        claims += filter(None, [_of_end(case)])
    return claims


#: Ends of a run that a wrong answer does not explain.
_OF_ENDS = ("crash", "error", "hang", "nonfinite")


def _of_end(case: Case) -> Claim | None:
    """Where nothing else says why a run broke, the line that alone is not as in the good run."""
    found = _compare(case, case.good) if case.good is not None else None
    if found is None or (found.first is not None and found.first.is_of_prompts):
        return None
    red = f"the run ends as the good one does not ({case.kind})"
    return of_changed_line(case, RESULTS, red, "the good run ended by itself", None, None)


def _weights_not_read(case: Case) -> Iterator[Gap]:
    """Weights that a traced run has no figures of, for they are too large."""
    seen = {case.tensors[s.tensor].name for s in case.bundle.statistics if s.tensor in case.tensors}
    left: dict[str, int] = {}
    for use in case.launches if seen else ():
        for tensor in case.tensors_of(use.launch).values():
            if tensor.owner == "model" and not tensor.part and tensor.name not in seen:
                left.setdefault(tensor.name, tensor.extent_bytes)
    told = [f"{name} ({num_bytes >> 20} MiB)" for name, num_bytes in list(left.items())[:MAX_TOLD]]
    if len(left) > MAX_TOLD:
        told.append(f"{len(left) - MAX_TOLD} more")
    if told:
        limit = MAX_TENSOR_BYTES >> 20
        why = f"a traced run reads no weight of more than {limit} MiB, so nobody compared them"
        yield Gap.not_examined(f"what these hold: {', '.join(told)}", why)


def _compare(case: Case, good: Bundle) -> RunDiff:
    if case.good_diff is None:
        case.good_diff = rundiff(good, case.bundle)
    return case.good_diff


def _of_rung(case: Case, rung: str) -> list[Claim]:
    assert case.good is not None
    claim = _judge(case, case.good, _compare(case, case.good))
    return [claim] if claim.hypothesis.diagnostic == rung else []


def _open(
    rung: str, *evidence: str, kernel: str | None = None, at: LaunchMade | None = None
) -> Claim:
    found = row(
        Cause.WRONG_ANSWER,
        Verdict.INCONCLUSIVE,
        rung,
        *evidence,
        would_refute="equal results for the same prompt",
        kernel=kernel,
    )
    return found if at is None else replace(found, seq=at.seq, place=at.place)


# -- which difference it is -----------------------------------------------------------------------


def _judge(case: Case, good: Bundle, found: RunDiff) -> Claim:
    first = found.first
    if first is None and found.texts is not Answers.DIFFERENT:
        text = (
            f"{found.compared.num_launches} launches, {found.compared.num_arguments} arguments and "
            f"{found.compared.num_statistics} results are those of the good run"
        )
        return _refute(text)
    if first is not None and first.is_of_prompts:
        if found.was_asked_alike:
            return other_prompt(case, ARGUMENTS, first.text)
        why = "the two runs were asked for different things; run the same command for both"
        case.leave_unseen(Gap.not_examined("what the runs computed", why))
        return _open(ARGUMENTS, first.text)
    pairs, compared = differing_pairs(good, case.bundle)
    if found.answers is Answers.SAME and found.texts is Answers.DIFFERENT:
        return other_text(case, RESULTS)
    if first is None:  # equal steps give equal tokens
        return failed_behind(case, RESULTS)
    if found.answers is Answers.SAME:
        told = dict.fromkeys(fact.text for pair in pairs for fact in pair.differences)
        return _refute("both runs gave every request the same tokens", *_few(told, "differs"))
    guilty = pairs[-1] if pairs and pairs[-1].wrong is not None else None
    if case.kind not in ("none", "differs") and not _was_wrong_before(case, guilty):
        why = "a wrong answer explains no end of the run"
        return _open(ARGUMENTS, f"the first difference: {first.text}; {why}", *found.around)
    is_wrong = found.answers is Answers.DIFFERENT or case.kind == "differs"
    if guilty is None:
        return _without_results(case, good, found, pairs, compared, is_wrong=is_wrong)
    return _of_launch(case, good, found, guilty, pairs, compared)


def _was_wrong_before(case: Case, guilty: Pair | None) -> bool:
    """Whether numbers of a run that ended by one that is none were wrong before the first such."""
    use = _use(case, guilty) if guilty is not None and case.kind == "nonfinite" else None
    spoilt = first_spoilt(case) if use is not None else None
    if use is None or spoilt is None or use.place is None or spoilt.use.place is None:
        return False
    return _order(use.place) < _order(spoilt.use.place)


def _order(place: Place) -> tuple[int, int, int]:
    return place.step, place.plan, place.launch


def _refute(*evidence: str) -> Claim:
    return row(
        Cause.WRONG_ANSWER,
        Verdict.REFUTED,
        RESULTS,
        *evidence,
        would_refute="an answer that differs",
    )


def _few(texts: Sequence[str] | dict[str, None], what: str) -> Iterator[str]:
    told = list(texts)
    for text in told[:MAX_TOLD]:
        yield f"{what} without effect: {text}"
    if len(told) > MAX_TOLD:
        yield f"and {len(told) - MAX_TOLD} more that are without effect"


@dataclass(frozen=True, slots=True)
class _Suspects:
    """What may be why a launch gave another result: facts, or lines of its source."""

    facts: tuple[Difference, ...]
    lines: tuple[Change, ...]
    harmless: tuple[Difference, ...]

    @property
    def num(self) -> int:
        return len(self.facts) + bool(self.lines)


def _suspects(case: Case, good: Bundle, guilty: Pair, pairs: Sequence[Pair]) -> _Suspects:
    use = _use(case, guilty)
    read = {tensor.name for tensor in case.tensors_of(use.launch).values()} if use else set()
    harmless: dict[tuple[object, ...], Difference] = {}
    waiting: list[Difference] = []
    for pair in pairs[:-1]:
        if pair.step != guilty.step or (pair.place is not None and pair.num_results):
            # What a table holds is told when it is first read, and may matter in a later step.
            harmless |= {fact.key: fact for fact in pair.facts if fact.what != "contents"}
        else:
            waiting += pair.facts
    waiting = [fact for fact in waiting if fact.key not in harmless]
    own = [
        fact
        for fact in guilty.facts
        if fact.key not in harmless and not (fact.is_renamed and _is_computed(case, use, fact))
    ]
    own += [
        fact
        for pair in pairs[:-1]
        for fact in pair.facts
        if fact.what == "contents" and fact.tensor in read
    ]
    exchanged = {fact.subject for fact in own if fact.what == "argument"}
    own = _one_of_each_maker(case, use, _without_repetition(own), exchanged)
    lines = changes(use.launch, case.sources, texts_of(good.sources)) if use else []
    launches = [fact for fact in waiting if fact.what == "launch" and fact.kernel]
    # An input of a draw is told once by its digest, and once by its elements.
    inputs = list({fact.tensor: fact for fact in waiting if fact.what == "input"}.values())
    facts = [
        *own,
        *(fact for fact in launches if not _is_without_effect(case, fact, use)),
        *(fact for fact in inputs if fact.tensor in read),
    ]
    if not facts and not lines:
        facts = [fact for fact in inputs if fact.tensor not in DRAWN_BY]
    return _Suspects(tuple(facts), tuple(lines), tuple(harmless.values()))


def _without_repetition(facts: list[Difference]) -> list[Difference]:
    """One of what contract and kernel call by two names, and of tensors that are exchanged."""
    kept = list({(f.what, f.good, f.bad): f for f in reversed(facts)}.values())[::-1]
    tensors = [fact for fact in kept if fact.is_name]
    if sorted(fact.good for fact in tensors) == sorted(fact.bad for fact in tensors):
        return [fact for fact in kept if fact not in tensors[1:]]
    return kept


def _one_of_each_maker(
    case: Case, use: LaunchMade | None, facts: list[Difference], exchanged: set[str]
) -> list[Difference]:
    """Of weights and tables that hold other numbers one for each line that makes them.

    An argument that is another tensor (`exchanged`) holds other numbers anyhow.
    """
    kept: dict[object, Difference] = {}
    for fact in facts:
        if fact.what != "contents":
            kept[fact.key] = fact
        elif fact.subject not in exchanged:
            tensor = case.tensor_of(use.launch, fact.subject) if use else None
            memory = case.allocations.get(tensor.allocation) if tensor else None
            kept.setdefault((memory.site or fact.key) if memory else fact.key, fact)
    return list(kept.values())


def _is_computed(case: Case, use: LaunchMade | None, fact: Difference) -> bool:
    """Whether launches of this run wrote the tensor: they were compared, whatever its name."""
    tensor = case.tensor_of(use.launch, fact.subject) if use else None
    return tensor is not None and tensor.id in case.computed


def _is_without_effect(case: Case, fact: Difference, until: LaunchMade | None) -> bool:
    """Whether a launch too many cannot be why `until` gave another result.

    That does not read what it wrote, or another one did before, with an equal result.
    """
    begun = next((use for use in case.launches if use.place == fact.place), None)
    if begun is None or until is None or begun.place is None or until.place is None:
        return False
    written = {case.tensor_of(begun.launch, name) for name in case.written_by(begun.launch)}
    if not written & _tensors_read(case, until.launch):
        return True
    for use in case.launches:
        place = use.place
        if place is None or (place.step, place.plan) != (until.place.step, until.place.plan):
            continue
        is_between = begun.place.launch < place.launch < until.place.launch
        if is_between and written & _tensors_read(case, use.launch):
            return True
    return False


def _tensors_read(case: Case, launch: LaunchRecord) -> set[TensorRecord | None]:
    """The tensors that a launch may read: all but those that it only writes."""
    adds = launch.constants.get("ACCUMULATE") is not False
    declaration = case.bundle.declaration(launch)
    found: set[TensorRecord | None] = set()
    for name, tensor in case.tensors_of(launch).items():
        argument = declaration.argument(name) if declaration else None
        if argument is None or argument.access == "read" or (argument.access == "both" and adds):
            found.add(tensor)
    return found


def _of_launch(
    case: Case,
    good: Bundle,
    found: RunDiff,
    guilty: Pair,
    pairs: Sequence[Pair],
    compared: Compared,
) -> Claim:
    """The launch that gave the first wrong result."""
    wrong, use = guilty.wrong, _use(case, guilty)
    assert wrong is not None
    suspects = _suspects(case, good, guilty, pairs)
    kernel = use.launch.kernel if use else None
    harmless = tuple(_few(dict.fromkeys(f.text for f in suspects.harmless), "differs"))
    rung = ARGUMENTS if suspects.facts else RESULTS
    before = compared.num_statistics - guilty.num_results
    if suspects.num != 1 and not suspects.lines:
        green = f"{count_text(before, 'result')} before as in the good run, and its answer right"
        host = of_changed_line(
            case, rung, f"the first wrong result: {wrong.text}", green, use, _only(suspects)
        )
        if host is not None:
            return host
    if use is None or not suspects.num:
        return _open(
            RESULTS,
            f"the first wrong result: {wrong.text}; the same kernel text and the same arguments "
            "gave another result",
            *open_changes(case),
            *found.around,
            *harmless,
            kernel=kernel,
            at=use,
        )
    if suspects.num > 1:
        told = [fact.text for fact in suspects.facts]
        told += [f"{line.file}:{line.line}: {line.text}" for line in suspects.lines[:1]]
        return _open(
            rung,
            f"the first wrong result: {wrong.text}",
            f"{suspects.num} facts differ there, and no test tells which of them it is: "
            f"{'; '.join(told[:MAX_TOLD])}",
            *open_changes(case),
            *harmless,
            kernel=kernel,
            at=use,
        )
    test = (
        f"the good run is a run with it: {count_text(before, 'result')} before "
        f"{'is' if before == 1 else 'are'} equal, nothing else differs there, and "
        f"{wrong.subject} is {wrong.good}"
    )
    red = f"{guilty_text(use)}: {wrong.subject} is {wrong.bad}, in the good run {wrong.good}"
    if suspects.lines:
        return of_line(case, use, wrong, suspects.lines, red, test, harmless)
    return of_fact(case, use, suspects.facts[0], red, test, (*harmless, *found.around), rung)


def _only(suspects: _Suspects) -> str | None:
    """The tensor or argument of the first fact, if there is one."""
    fact = next(iter(suspects.facts), None)
    return (fact.tensor or fact.subject) if fact is not None else None


def guilty_text(use: LaunchMade) -> str:
    return f"{use.where} ({use.launch.kernel})"


def _without_results(
    case: Case,
    good: Bundle,
    found: RunDiff,
    pairs: Sequence[Pair],
    compared: Compared,
    *,
    is_wrong: bool,
) -> Claim:
    """No result that was compared is wrong: the runs were not traced, or rounding is all."""
    rounded = next((r for pair in pairs for r in pair.results), None)
    facts = {fact.key: fact for pair in pairs for fact in pair.facts if fact.what in _OF_LAUNCHES}
    if rounded is None and is_wrong and not facts and (claim := _of_draw(case, pairs, compared)):
        return claim
    if is_wrong and (rounded is None or len(facts) != 1):
        green = f"{count_text(compared.num_launches, 'launch', 'launches')} as in the good run"
        first = found.first
        assert first is not None
        red = f"the answers differ, and the first difference is: {first.text}"
        at = next((use for use in case.launches if use.place == first.place), None)
        if host := of_changed_line(case, ARGUMENTS, red, green, at, first.tensor or None):
            return host
    if rounded is not None or compared.num_statistics or not is_wrong or len(facts) != 1:
        first = found.first
        assert first is not None
        return _open(
            ARGUMENTS,
            f"the first difference: {first.text}",
            *(
                [f"no result differs by more than rounding, the first by that: {rounded.text}"]
                if rounded
                else []
            ),
            *open_changes(case),
            *([f"{len(facts)} facts of launches differ"] if len(facts) > 1 else []),
            *found.around,
        )
    fact = next(iter(facts.values()))
    use = next((use for use in case.launches if use.place == fact.place), None)
    if use is None or changes(use.launch, case.sources, texts_of(good.sources)):
        return _open(ARGUMENTS, f"the first difference: {fact.text}", *found.around)
    test = (
        "the good run is a run with it: nothing else differs of "
        f"{count_text(compared.num_launches, 'launch', 'launches')} with "
        f"{count_text(compared.num_arguments, 'argument')}, and its answer is right"
    )
    return of_fact(case, use, fact, f"{fact.text}; the answers differ", test, found.around)


def _of_draw(case: Case, pairs: Sequence[Pair], compared: Compared) -> Claim | None:
    """All numbers are the good run's, and what a token was drawn by on the host is not."""
    found = [fact for pair in pairs for fact in pair.facts if fact.tensor in DRAWN_BY]
    found = [fact for fact in found if fact.step == found[0].step]
    others = [
        fact
        for pair in pairs
        for fact in pair.facts
        if found and fact.step <= found[0].step and fact not in found
    ]
    uses = [use for use in case.launches if found and use.step == found[0].step]
    if len(found) != 1 or not uses or others:
        return None
    test = (
        f"the good run is a run with it: {count_text(compared.num_statistics, 'result')} before "
        "the first other token are equal, and nothing else differs until there"
    )
    return of_fact(case, uses[-1], found[0], f"{found[0].text}; the answers differ", test, ())


#: What a launch is asked for.
_OF_LAUNCHES = ("argument", "option", "grid", "launch")


def _use(case: Case, pair: Pair) -> LaunchMade | None:
    return next((use for use in case.launches if use.place == pair.place), None)
