"""Rung: the good run beside this one: the first fact that differs, and the line of source."""

from __future__ import annotations

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.diff import rundiff
from hypocenter.doctor.difference import Difference, RunDiff
from hypocenter.doctor.installed_text import changes
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import LaunchRecord
from hypocenter.record.gap import Gap

ARGUMENTS, RESULTS = "good arguments", "good results"


def good_arguments(case: Case) -> list[Claim]:
    """The first launch that is asked for something else than in the good run."""
    if case.good is None:
        if case.bundle.fault.kind == "differs":
            case.leave_unseen(
                Gap.not_recorded("a run that is right", "give its bundle with --good BUNDLE")
            )
        return []
    found = _compare(case, case.good)
    if found.first is None or found.first.what not in ("argument", "option", "grid", "launch"):
        return []
    return _claims(case, case.good, found, found.first)


def good_results(case: Case) -> list[Claim]:
    """The first launch that is asked for the same as in the good run, and gives something else."""
    if case.good is None:
        return []
    found = _compare(case, case.good)
    case.unseen |= dict.fromkeys(found.unseen)
    if found.first is None:
        text = (
            f"{found.compared.num_launches} launches, {found.compared.num_arguments} arguments and "
            f"{found.compared.num_statistics} results are those of the good run"
        )
        return [
            row(
                Cause.WRONG_ANSWER,
                Verdict.REFUTED,
                RESULTS,
                text,
                would_refute="a launch or result that differs",
            )
        ]
    if found.first.what in ("argument", "option", "grid", "launch"):
        return []
    return _claims(case, case.good, found, found.first)


def _compare(case: Case, good: Bundle) -> RunDiff:
    if case.good_diff is None:
        case.good_diff = rundiff(good, case.bundle)
    return case.good_diff


def _claims(case: Case, good: Bundle, found: RunDiff, first: Difference) -> list[Claim]:
    if any(claim.root is not None for claim in case.claims):
        return [
            row(
                Cause.WRONG_ANSWER,
                Verdict.INCONCLUSIVE,
                ARGUMENTS,
                f"the first difference, which a cause above explains: {first.text}",
                would_refute="no difference from the good run",
            )
        ]
    return [_judge(case, good, found, first)]


def _judge(case: Case, good: Bundle, found: RunDiff, first: Difference) -> Claim:
    if first.what == "prompt":
        why = "the two runs were given different prompts; run the same command for both"
        case.leave_unseen(Gap.not_examined("what the runs computed", why))
        return row(
            Cause.WRONG_ANSWER,
            Verdict.INCONCLUSIVE,
            ARGUMENTS,
            first.text,
            would_refute="equal results for the same prompt",
        )
    name = RESULTS if first.what == "statistics" else ARGUMENTS
    use = _use(case, first)
    if use is None or first.what not in ("argument", "option", "grid", "statistics", "launch"):
        return row(
            Cause.WRONG_ANSWER,
            Verdict.INCONCLUSIVE,
            name,
            f"the first difference: {first.text}",
            *found.around,
            would_refute="no difference before the results",
            kernel=use.launch.kernel if use else None,
        )
    launch = use.launch
    others = {source.function: source.text for source in good.sources}
    changed = changes(launch, case.sources, others) if first.what == "statistics" else []
    line = changed[0] if changed else None
    same = f"{found.compared.num_launches - 1} launches before it are equal in every argument" + (
        f" and in {found.compared.num_statistics} results that were looked at"
        if found.compared.num_statistics
        else ""
    )
    if first.what == "statistics" and line is None:
        return row(
            Cause.WRONG_ANSWER,
            Verdict.INCONCLUSIVE,
            name,
            f"the first difference: {first.text}; the same kernel text and the same arguments gave "
            "another result",
            *found.around,
            would_refute="an equal result of that launch",
            kernel=launch.kernel,
            argument=first.subject,
        )
    argument = _argument(case, launch, first)
    if line is not None:
        sentence = (
            f"{launch.kernel}: its source differs from that of the good run, and so does what it "
            f"writes to {argument}: {line.text!r} here, {line.was!r} there"
        )
        corrected = f"the good run's line: {line.was}"
        fix = f"Put the line back: {line.was}"
    else:
        sentence = f"{launch.kernel}: {argument} is {first.bad}, in the good run it is {first.good}"
        corrected = f"{argument} = {first.good}"
        fix = f"Pass {argument} = {first.good} to {launch.kernel}, as the good run does"
    root = RootCause(
        cause=Cause.WRONG_ANSWER,
        blames=Blame.KERNEL if line else Blame.LAUNCH,
        sentence=sentence,
        fix=fix,
        proof=Proof(
            f"{first.text}: the first difference; {same}",
            corrected,
            f"with it the launch is that of the good run, whose answer is right; {same}",
        ),
        kernel=launch.kernel,
        argument=argument,
        tensor=_tensor(case, launch, argument),
        file=line.file if line else None,
        line=line.line if line else None,
        expression=line.text if line else None,
        place=use.place,
    )
    return proven(root, name, found.around, "a difference before that launch", use.seq)


def _use(case: Case, first: Difference) -> LaunchMade | None:
    return next((use for use in case.launches if use.place == first.place), None)


def _argument(case: Case, launch: LaunchRecord, first: Difference) -> str:
    """The contract's or kernel's name; of a result, that of the argument which it was."""
    if first.what != "statistics":
        return first.subject or "grid"
    for name, tensor in case.tensors_of(launch).items():
        if tensor.name == first.subject and name in case.written_by(launch):
            return name
    return first.subject


def _tensor(case: Case, launch: LaunchRecord, argument: str) -> str | None:
    tensor = case.tensor_of(launch, argument)
    return tensor.name if tensor else None
