"""Rung: whether each token is drawn for the position that it will have.

Its random number depends on that alone, on the host and on a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, proven
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.engine_events import Drawn
from hypocenter.record.events import RequestRecord, Stepped

NAME = "draws"


@dataclass(frozen=True, slots=True)
class _Row:
    """A token that is chosen: at which row, for which position, and for which it should be."""

    event: Drawn
    row: int
    request: int
    position: int
    right: int


def draws(case: Case) -> list[Claim]:
    """The first token that is drawn for another position than its own."""
    rows = list(_rows(case))
    wrong = next((row for row in rows if row.position != row.right), None)
    return [_claim(case, wrong, rows)] if wrong is not None else []


def _rows(case: Case) -> Iterator[_Row]:
    requests: dict[int, RequestRecord] = {}
    step = 0
    for event in case.bundle.events:
        if isinstance(event, Stepped) and event.requests:
            requests, step = {request.id: request for request in event.requests}, event.step
        if not isinstance(event, Drawn) or event.step != step:
            continue
        num_before: Counter[int] = Counter()  # tokens of each request, of which drafts have several
        for row, (number, position) in enumerate(
            zip(event.requests, event.positions, strict=False)
        ):
            request = requests.get(number)
            if request is not None and request.samples:
                right = request.first_drawn + num_before[number]
                num_before[number] += 1
                yield _Row(event, row, number, position, right)


def _claim(case: Case, wrong: _Row, rows: list[_Row]) -> Claim:
    use = _sampler(case, wrong.event)
    text = (
        f"row {wrong.row} draws a token of request {wrong.request} with the random number of "
        f"position {wrong.position}, but it will have position {wrong.right}"
    )
    num_wrong = sum(row.position != row.right for row in rows)
    tensor = case.tensor_of(use.launch, "settings") if use is not None else None
    kernel = use.launch.kernel if use is not None else None
    root = RootCause(
        cause=Cause.WRONG_INPUT,
        sentence=f"{kernel}: {text}" if kernel else text,
        fix="Draw each token for the position behind the last one that its request runs",
        proof=Proof(
            f"step {wrong.event.step}: {text}",
            f"position {wrong.right}, and the like for {num_wrong - 1} more",
            f"then all of {count_text(len(rows), 'token')} are drawn for their own positions",
        ),
        kernel=kernel,
        argument="settings",
        tensor=tensor.name if tensor else None,
        place=use.place if use is not None else None,
    )
    seq = use.seq if use is not None else wrong.event.seq
    tensors = (tensor.id,) if tensor else ()
    return proven(root, NAME, (), "the scheduler's record of that position", seq, tensors)


def _sampler(case: Case, event: Drawn) -> LaunchMade | None:
    """The launch that chooses the tokens, where it is on record."""
    later = (use for use in case.launches if use.seq > event.seq and use.step == event.step)
    return next(later, None)
