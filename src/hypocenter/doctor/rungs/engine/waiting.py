"""Rung: requests that others passed over, and requests that wait much longer than in the good run.

Requests enter in the order in which they came, but that short prompts do not wait for all of a long
one (`engine/scheduler.py`). That is read from the steps, and from no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hypocenter.base.wording import count_text
from hypocenter.doctor.beside.answers import was_asked_alike
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.culprit import changed_line
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.engine_events import BlocksNamed, Entered
from hypocenter.record.events import Stepped
from hypocenter.record.prefixes import ROTATION

NAME = "waiting"
#: So many steps more than in the good run are a wait of another kind, where they are twice as many.
_MORE_STEPS = 3
#: Long and short texts run by turns, so that one may begin a step after a later one.
_TURNS = 2


@dataclass(frozen=True, slots=True)
class _Waited:
    """A request: the step before which it came, its first one, and the most without it since.

    `came` is its place in the order of arrival, `num_read` how many tokens it read until it drew
    one, of which it found `num_found` in the cache.
    """

    request: int
    came: int
    entered: int
    first: int
    longest: int
    num_read: int | None
    num_found: int

    @property
    def before(self) -> int:
        """Steps that others made before its first."""
        return self.first - self.entered - 1

    @property
    def most(self) -> int:
        return max(self.before, self.longest)


def waiting(case: Case) -> list[Claim]:
    """The first request that a later one passed, or that waits longer than in the good run."""
    waited = list(_waits(case.index))
    if len(waited) < 2:
        return []
    turns = _TURNS if _has_turns(case.index) else 0
    for first in waited:
        others = [other for other in waited if _has_passed(other, first, turns)]
        if others:
            return [_claim_of_passing(first, others)]
    return list(_longer(case, waited))


def _has_passed(other: _Waited, sooner: _Waited, turns: int) -> bool:
    """Whether a request that came later, and has no less to read, began before."""
    if other.came < sooner.came or other.first + turns >= sooner.first:
        return False
    if sooner.num_read is None or other.num_read is None:
        return False
    return other.num_read - other.num_found >= sooner.num_read


def _has_turns(index: BundleIndex) -> bool:
    return any(ROTATION in event.made_with for event in index.events_of(BlocksNamed))


def _waits(index: BundleIndex) -> Iterator[_Waited]:
    """Each request that ran, in the order in which they came.

    Nothing of runs with several engines, whose requests share numbers.
    """
    entered: dict[int, tuple[int, int]] = {}
    took: dict[int, list[int]] = {}
    read: dict[int, int] = {}
    found: dict[int, int] = {}
    for event in index.events:
        if isinstance(event, Entered):
            if event.request in entered:
                return
            entered[event.request] = len(entered), event.step or _last(took)
        elif isinstance(event, Stepped):
            for request in event.requests:
                steps = took.setdefault(request.id, [])
                found.setdefault(request.id, request.first_position)
                if request.samples:
                    read.setdefault(request.id, request.first_drawn)
                if not steps or steps[-1] != event.step:
                    steps.append(event.step)
    for number, (came, step) in entered.items():
        if own := took.get(number):
            gaps = [later - sooner - 1 for sooner, later in itertools.pairwise(own)]
            most, size = max(gaps, default=0), read.get(number)
            yield _Waited(number, came, step, own[0], most, size, found[number])


def _last(took: dict[int, list[int]]) -> int:
    """The last step so far."""
    return max((steps[-1] for steps in took.values()), default=0)


def _claim_of_passing(waiter: _Waited, others: list[_Waited]) -> Claim:
    passer = min(others, key=lambda other: other.first)
    text = (
        f"request {waiter.request} came before request {passer.request}, and runs from step "
        f"{waiter.first} on; that one runs from step {passer.first} on"
    )
    more = count_text(len(others), "later request")
    root = RootCause(
        cause=Cause.PASSED_OVER,
        sentence=f"{text}; {more} passed it in all",
        fix="Let requests enter in the order in which they came, and wait for the first one's room",
        proof=Proof(
            text,
            f"request {waiter.request} in a step no later than {passer.first}",
            "all that came before it ran before it",
        ),
    )
    return proven(root, NAME, (), "requests that begin in the order of their arrival", 0)


def _longer(case: Case, waited: list[_Waited]) -> Iterator[Claim]:
    """A request that waits longer than in the good run, which was asked the same."""
    if case.good is None:
        return
    good = BundleIndex(case.good)
    there = {waiter.request: waiter for waiter in _waits(good)}
    if there.keys() != {waiter.request for waiter in waited} or not _is_alike(good, case.index):
        return
    for waiter in waited:
        was = there[waiter.request]
        if waiter.most < was.most + _MORE_STEPS or waiter.most < 2 * was.most:
            continue
        text = (
            f"request {waiter.request} waits {count_text(waiter.most, 'step')} while others run, "
            f"and {count_text(was.most, 'step')} in the good run"
        )
        change = changed_line(case)
        if change is None:
            yield row(
                Cause.PASSED_OVER,
                Verdict.INCONCLUSIVE,
                NAME,
                text,
                "nothing tells which difference between the runs makes it wait",
                would_refute="as few steps as in the good run",
            )
            return
        root = RootCause(
            cause=Cause.PASSED_OVER,
            sentence=text,
            fix="Look at how a step's tokens are shared: one line of that is not the good run's",
            proof=Proof(
                text,
                "the good run's text of that line",
                f"with it request {waiter.request} waits {count_text(was.most, 'step')}",
            ),
        )
        yield proven(root, NAME, (), "as few steps as in the good run", 0)
        return


def _is_alike(good: BundleIndex, bad: BundleIndex) -> bool:
    """Whether the same requests came: by what was asked, or by the lengths of their prompts."""
    sides = [
        [(event.request, event.num_prompt_tokens) for event in index.events_of(Entered)]
        for index in (good, bad)
    ]
    return was_asked_alike(good, bad) or sides[0] == sides[1]
