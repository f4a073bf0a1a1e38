"""Rung: a comparison that failed for float32 operands which the GPU cut to TF32.

`tl.dot` does so on NVIDIA unless it is told otherwise, and an interpreter never does. Proven where
the launch, replayed with whole operands, satisfies the program's own comparison in every element,
and replayed with cut ones gives what the GPU gave.
"""

from __future__ import annotations

import re

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Edit, Proof, RootCause, proven
from hypocenter.doctor.rungs.seen.compared_numbers import ComparedNumbers, compared_numbers
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.compared import ComparedUnequal
from hypocenter.record.contents import LaunchOutcome
from hypocenter.record.events import Values
from hypocenter.replay.findings import Site
from hypocenter.replay.terms import ReadOperands

NAME = "short operands"
#: Seconds of one replay.
REPLAY_SECONDS = 4.0
#: So much nearer to the GPU's numbers the replay with cut operands has to be: sums in another order
#: leave a millionth of what TF32 leaves out.
MIN_RATIO = 50.0
_DOT = re.compile(r"\bdot\(")


def short_operands(case: Case) -> list[Claim]:
    """The launch that left what was compared, where nothing but short operands is wrong with it."""
    events = case.index.events_of(ComparedUnequal)
    if not events or any(claim.root is not None for claim in case.claims):
        return []
    event = events[-1]
    for at, side in enumerate(event.sides):
        compared = compared_numbers(event, at, "F32")
        if compared is None:
            continue
        for outcome in reversed(case.bundle.outcomes):
            for values in outcome.gave:
                is_there = case.tensors[values.tensor].allocation == side.allocation
                if is_there and values.dtype == "F32" and values.data == side.data:
                    return _claims(case, outcome, values, event, compared)
    return []


def _claims(
    case: Case,
    outcome: LaunchOutcome,
    left: Values,
    event: ComparedUnequal,
    compared: ComparedNumbers,
) -> list[Claim]:
    use = next((made for made in case.launches if made.seq == outcome.launch), None)
    source = case.sources.get(use.launch.source) if use is not None else None
    if use is None or source is None or outcome.num_other or use.launch.device == "interpreter":
        return []
    try:
        from hypocenter.replay.operands import CutToTF32

        cut = CutToTF32()
        whole = _replay_result(case, outcome, use, left, None)
        short = _replay_result(case, outcome, use, left, cut)
    except (HypoError, ImportError):  # the rung of replays has told why
        return []
    if whole is None or short is None or not cut.sites:
        return []
    off, near = (float(np.abs(made - compared.given).max()) for made in (whole, short))
    is_reproduced = off >= MIN_RATIO * near and compared.num_wrong(short) > 0
    if not is_reproduced or compared.num_wrong(whole):
        return []
    return [_claim(case, use, left, event, compared, list(cut.sites.values()), (off, near))]


def _replay_result(
    case: Case, outcome: LaunchOutcome, use: LaunchMade, left: Values, operands: ReadOperands | None
) -> Array | None:
    """What a whole replay without a finding leaves in that tensor, row by row."""
    from hypocenter.replay.compare import replay_outcome

    made = replay_outcome(
        case.index,
        outcome,
        allow_source=case.allow_source,
        budget_seconds=min(REPLAY_SECONDS, case.limit.left),
        operands=operands,
    )
    if made.report.findings or not made.report.coverage.is_complete:
        return None
    names = (name for name, tensor in made.tensors.items() if tensor.id == left.tensor)
    rows = next((made.results[name] for name in names), None)
    return None if rows is None else rows.view(np.float32).astype(np.float64)


def _claim(
    case: Case,
    use: LaunchMade,
    left: Values,
    event: ComparedUnequal,
    compared: ComparedNumbers,
    sites: list[Site],
    off: tuple[float, float],
) -> Claim:
    kernel = use.launch.kernel
    name = next((a.name for a in use.launch.arguments if a.tensor == left.tensor), "")
    name = case.parameter_of(use.launch, name) or name
    num, total = compared.num_wrong(compared.given), compared.given.size
    text = (
        f"{num} of {total} elements of {name} fail the comparison at {event.compared_at}: the GPU "
        f"cut the float32 operands of `tl.dot` to TF32, 10 bits of their fraction"
    )
    root = RootCause(
        cause=Cause.SHORT_OPERANDS,
        sentence=f"{kernel}: {text}",
        fix='Pass input_precision="ieee" to tl.dot, or have the comparison allow what TF32 leaves '
        f"out: up to {off[0]:.2g} here",
        proof=Proof(
            f"the launch, replayed with operands cut to TF32, gives what the GPU gave to "
            f"{off[1]:.2g}, and fails the comparison",
            "whole float32 operands",
            f"replayed with them no element of {total} fails the comparison; the GPU was off by up "
            f"to {off[0]:.2g}",
        ),
        kernel=kernel,
        argument=name,
        file=sites[0].file,
        line=sites[0].line,
        expression=sites[0].expression,
        place=use.place,
        edits=_edits(case, use, sites),
    )
    return proven(
        root, NAME, (), "an element that fails the comparison with whole operands too", use.seq
    )


def _edits(case: Case, use: LaunchMade, sites: list[Site]) -> tuple[Edit, ...]:
    """The precision in each of these lines, where a call of `dot` ends in its own line."""
    source = case.sources[use.launch.source]
    edits = []
    for site in sites:
        at = site.line - source.first_line
        lines = source.text.splitlines()
        if site.file != source.file or not 0 <= at < len(lines):
            return ()
        old = lines[at].strip()
        new = _with_precision(old)
        if new is None:
            return ()
        edits.append(Edit(file=site.file, line=site.line, old=old, new=new))
    return tuple(edits)


def _with_precision(line: str) -> str | None:
    """The line with whole operands; None where no call of `dot` ends in it, or says its own."""
    found = _DOT.search(line)
    if found is None or len(_DOT.findall(line)) > 1 or "precision" in line or "tf32" in line:
        return None
    depth = 0
    for at in range(found.end() - 1, len(line)):
        depth += (line[at] == "(") - (line[at] == ")")
        if depth == 0:
            return f'{line[:at]}, input_precision="ieee"{line[at:]}'
    return None
