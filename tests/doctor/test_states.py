"""States of sequences: who reads what another has left, told from the record of the steps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from recorded.bundles import REQUEST, Run

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import LADDER, diagnose
from hypocenter.doctor.rungs.engine.states import states
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Copied, Place, RequestRecord, Statistics
from hypocenter.record.fault_record import FaultRecord

DIFFERS = FaultRecord(kind="differs", message="the text is not that of the good run")
OTHERS = tuple(name for name in LADDER if name != "states")
INPUTS = ("state_slots", "state_sources", "checkpoint_slots", "checkpoint_stops")

#: Request 7 reads 20 tokens in slot 0, and leaves a checkpoint behind 16 of them in slot 2.
MAKER = msgspec.structs.replace(REQUEST, num_tokens=20, state_slot=0)
#: Request 9 goes on from there, in slot 0 as well, when 7 has ended.
READER = msgspec.structs.replace(
    REQUEST, id=9, first_position=16, num_tokens=2, state_slot=0, state_source=2, left_by=7
)


def run_of(*steps: tuple[RequestRecord, tuple[int, int, int, int]]) -> Diagnosis:
    """What the doctor says of `bundle_of`."""
    return diagnose(bundle_of(*steps), without=OTHERS)


def case_of(*steps: tuple[RequestRecord, tuple[int, int, int, int]]) -> Case:
    return Case(bundle_of(*steps))


def bundle_of(*steps: tuple[RequestRecord, tuple[int, int, int, int]]) -> Bundle:
    """Steps of a request each, with the host's inputs for it in the order of INPUTS."""
    run = Run()
    for name in INPUTS:
        run.tensor(name, "I32", 2)
    plan = run.plan(run.launch("short_conv", {name: name for name in INPUTS}))
    for request, values in steps:
        given: dict[str, Any] = {name: [value] for name, value in zip(INPUTS, values, strict=True)}
        run.run(plan, given, (request,))
    return run.bundle(DIFFERS)


def test_a_hand_over_as_it_was_meant_is_no_finding() -> None:
    goes_on = msgspec.structs.replace(READER, first_position=18, num_tokens=1, state_source=None)
    found = run_of((MAKER, (0, 0, 2, 16)), (READER, (0, 2, 0, 0)), (goes_on, (0, 0, 0, 0)))
    assert not found.roots
    rows = {row.cause: row for row in found.hypotheses}
    assert rows[Cause.FOREIGN_STATE].verdict is Verdict.REFUTED


def test_what_a_slot_was_left_with_is_not_what_was_meant() -> None:
    (root,) = run_of((MAKER, (0, 0, 2, 16)), (READER, (0, 0, 0, 0))).roots
    assert (root.cause, root.kernel) == (Cause.FOREIGN_STATE, "short_conv")
    assert root.argument == "state_sources"
    assert "state_sources[0] = 0 for position 16 of request 9" in root.sentence
    assert "slot 0 has what request 7 left in step 1 behind 20 tokens" in root.sentence
    assert "its own is in slot 2" in root.sentence
    corrected = "state_sources[0] = 2, which has what request 7 left in step 1 behind 16 tokens"
    assert root.proof.corrected == corrected


@pytest.mark.parametrize(
    ("stop", "owner", "text"),
    [
        (16, 8, "what request 8 left in step 2 behind 16 tokens"),
        (12, 7, "what request 7 left in step 2 behind 12 tokens"),
    ],
)
def test_a_checkpoint_that_was_written_over_is_found(stop: int, owner: int, text: str) -> None:
    other = msgspec.structs.replace(MAKER, id=owner, state_slot=1)
    found = run_of((MAKER, (0, 0, 2, 16)), (other, (1, 1, 2, stop)), (READER, (0, 2, 0, 0)))
    (root,) = found.roots
    assert (root.cause, root.argument) == (Cause.FOREIGN_STATE, "state_sources")
    assert f"slot 2 has {text}, but request 9 reads it in step 3" in root.sentence
    assert "as that of request 7 behind 16" in root.sentence


def test_a_good_run_says_whether_the_one_who_left_it_or_the_reader_is_wrong() -> None:
    """What is told of memory has the step and the argument that had it left there."""
    other = msgspec.structs.replace(MAKER, id=8, state_slot=1)
    case = case_of((MAKER, (0, 0, 2, 16)), (other, (1, 1, 2, 16)), (READER, (0, 2, 0, 0)))
    (overwritten,) = states(case)
    assert overwritten.left_by == (2, "checkpoint_slots")
    case = case_of((MAKER, (0, 0, 2, 16)), (READER, (0, 0, 0, 0)))
    (misread,) = states(case)
    assert misread.left_by is None


def test_a_state_that_is_left_elsewhere_is_found() -> None:
    (root,) = run_of((MAKER, (1, 1, 2, 16))).roots
    assert root.argument == "state_slots"
    assert "state_slots[0] = 1, but request 7 has slot 0" in root.sentence


def test_of_a_record_that_begins_later_nothing_is_claimed() -> None:
    goes_on = msgspec.structs.replace(READER, first_position=18, state_source=None)
    assert not run_of((goes_on, (0, 0, 0, 0))).roots


# -- what a slot was left with --------------------------------------------------------------------


def figures(place: Place, tensor: int, num_nan: int = 0) -> Statistics:
    return Statistics(
        place=place, tensor=tensor, digest="", low=0.0, high=1.0, mean=0.5, rms=0.5,
        num_nan=num_nan, num_inf=0, first_nonfinite=(0, 3) if num_nan else None,
    )  # fmt: skip


def weighed(*, is_copied: bool = False, was_nan: bool = False) -> Diagnosis:
    """In step 2 the result of request 9, which begins in the slot of 7, is NaN, and its state."""
    run = Run()
    for name in INPUTS:
        run.tensor(name, "I32", 2)
    others = ("sequence_starts", "sequence_rows", "positions", "counts")
    for name in others:
        run.tensor(name, "I32", 4)
    floats = ("x", "betas", "steps", "step_bias", "rates", "out")
    for name in floats:
        run.tensor(name, "F32", 4, 64)
    run.tensor("state", "F32", 4, 1, 16, 64)
    facts: dict[str, Any] = {name: name for name in (*INPUTS, *others, *floats, "state")}
    facts |= {"num_key_heads": 1, "value_dim": 64, "heads_in_turn": 1}
    plan = run.plan(run.launch("delta_rule", facts))
    run.run(plan, {name: [0] for name in INPUTS}, (MAKER,))
    if is_copied:
        state = run.tensors["state"]
        run.emit(
            Copied, direction="in", tensor=state.id, address=state.address, num_bytes=64,
            site="clean_up.py:12",
        )  # fmt: skip
    begins = msgspec.structs.replace(READER, first_position=0, state_source=None, left_by=None)
    run.run(plan, {name: [0] for name in INPUTS}, (begins,))
    at, then = (Place(step, plan, 0) for step in (2, 1))
    ids = {name: tensor.id for name, tensor in run.tensors.items()}
    statistics = (
        figures(then, ids["x"]), figures(then, ids["state"], int(was_nan)),
        figures(then, ids["out"]), figures(at, ids["x"]), figures(at, ids["state"], 5),
        figures(at, ids["out"], 2),
    )  # fmt: skip
    left_out = tuple(name for name in LADDER if name != "values")
    return diagnose(run.bundle(DIFFERS, statistics=statistics), without=left_out)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"was_nan": True}, "(launch 0 of step 1 left it so)"),
        ({"is_copied": True}, "(a copy in step 1 wrote into it (clean_up.py:12))"),
    ],
)
def test_what_the_last_request_left_is_weighed(how: dict[str, bool], text: str) -> None:
    (root,) = weighed(**how).roots
    assert (root.cause, root.argument) == (Cause.NONFINITE_PADDING, "state")
    left = "what request 7 left in step 1 behind 20 tokens, in slot 0, where request 9 begins in "
    assert f"{left}step 2 {text} was used" in root.sentence


def test_a_state_that_was_finite_is_not_blamed() -> None:
    for root in weighed().roots:
        assert root.argument != "state"
