"""What is claimed of a difference from the good run that is proven: a line of a kernel, or a fact.

No rung of its own: `good_run.py` says which difference it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, proven
from hypocenter.doctor.difference import Difference
from hypocenter.doctor.installed_text import Change
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import LaunchRecord

ARGUMENTS, RESULTS = "good arguments", "good results"
#: Of differences that are evidence so many are told.
MAX_TOLD = 6


def of_line(
    case: Case,
    use: LaunchMade,
    wrong: Difference,
    lines: Sequence[Change],
    red: str,
    test: str,
    harmless: tuple[str, ...],
) -> Claim:
    launch, line = use.launch, lines[0]
    argument = _argument(case, launch, wrong)
    more = [f"also changed: {line.file}:{line.line}: {line.text}" for line in lines[1:MAX_TOLD]]
    root = RootCause(
        cause=Cause.WRONG_ANSWER,
        blames=Blame.KERNEL,
        sentence=f"{launch.kernel}: its source differs from that of the good run, and so does what "
        f"it writes to {argument}: {line.text!r} here, {line.was!r} there",
        fix=f"Put the line back: {line.was}"
        if not more
        else f"Put {len(lines)} lines back; the first: {line.was}",
        proof=Proof(red, f"the good run's line: {line.was}", test),
        kernel=launch.kernel,
        argument=argument,
        tensor=_tensor(case, launch, argument),
        file=line.file,
        line=line.line,
        expression=line.text,
        place=use.place,
    )
    return proven(root, RESULTS, (*more, *harmless), "a wrong result before it", use.seq)


def of_fact(
    case: Case,
    use: LaunchMade,
    fact: Difference,
    red: str,
    test: str,
    evidence: tuple[str, ...],
    rung: str = ARGUMENTS,
) -> Claim:
    is_launch = fact.what == "launch" and bool(fact.kernel)
    own = next((made for made in case.launches if made.place == fact.place), None)
    made = own if is_launch and own is not None else use
    kernel = (fact.kernel if is_launch else None) or made.launch.kernel
    argument = fact.tensor or fact.subject or ("" if is_launch else "grid")
    blames = Blame.UNKNOWN if fact.what == "input" else Blame.LAUNCH
    if is_launch and fact.bad == "absent":
        sentence, corrected = f"{kernel}: a launch of it is missing", f"a launch of {kernel}"
        fix = f"Launch {kernel} there, as the good run does"
    elif is_launch and fact.good == "absent":
        sentence = f"{kernel}: {made.where} is one that the good run has not"
        corrected, fix = f"{kernel} not launched there", f"Do not launch {kernel} there"
    elif fact.what == "contents":
        argument, blames = fact.subject, Blame.MAKER
        sentence = (
            f"{kernel}: {argument} ({fact.tensor}) holds other numbers than in the good run: "
            f"{fact.bad}, and there {fact.good}"
        )
        corrected = f"{argument} as it was"
        fix = f"Look at what reads {fact.tensor} from the file, or works it out, and packs it"
    else:
        sentence = f"{kernel}: {fact.subject or 'grid'} is {fact.bad}, in the good run {fact.good}"
        corrected = f"{fact.subject or 'grid'} = {fact.good}"
        fix = f"Pass {corrected} to {kernel}, as the good run does"
    root = RootCause(
        cause=Cause.WRONG_ANSWER,
        blames=blames,
        sentence=sentence,
        fix=fix,
        proof=Proof(f"{fact.text}; {red}", corrected, test),
        kernel=kernel,
        argument=argument or None,
        tensor=_tensor(case, made.launch, argument),
        place=made.place,
    )
    held = case.tensor_of(made.launch, argument) if fact.what == "contents" else None
    tensors = (held.id,) if held is not None else ()
    return proven(root, rung, evidence, "an equal result with that fact", made.seq, tensors)


def _argument(case: Case, launch: LaunchRecord, wrong: Difference) -> str:
    """The contract's or kernel's name of the argument that a result was."""
    for name, tensor in case.tensors_of(launch).items():
        if tensor.name == wrong.subject and name in case.written_by(launch):
            return name
    return wrong.subject


def _tensor(case: Case, launch: LaunchRecord, argument: str) -> str | None:
    tensor = case.tensor_of(launch, argument)
    return tensor.name if tensor else None
