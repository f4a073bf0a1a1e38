"""Inputs of a step against the requests that it runs, and against what the device found."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from recorded.bundles import DIM, HEADS, REQUEST, ROWS, Run, decoder, inputs, tensors_of_decoder

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.kernels.sampling.draw import TokenChoice, columns_of, settings_of
from hypocenter.record.bundle import Bundle
from hypocenter.record.contents import Snapshot
from hypocenter.record.engine_events import Entered
from hypocenter.record.events import (
    LaunchRecord,
    RequestRecord,
    Stepped,
    Values,
)
from hypocenter.record.fault_record import FaultRecord
from hypocenter.settings.config import SamplingParams

DIFFERS = FaultRecord(kind="differs", message="the text is not that of the good run")
NO_REPLAY = ("replay", "hang")
FIRST = msgspec.structs.replace(REQUEST, num_tokens=2, samples=True, num_kept=0)
SECOND = RequestRecord(
    id=8, row=1, first_position=4, num_tokens=1, blocks=(5,), samples=True, num_kept=0
)
PARAMS = {7: SamplingParams(temperature=0.5, seed=3), 8: SamplingParams(temperature=0.5, seed=4)}


def two(**other: Any) -> dict[str, Any]:
    """The inputs of a step of FIRST and SECOND."""
    tables = inputs()["block_tables"]
    tables[1, 0] = 5
    right = {
        "positions": [0, 1, 4], "slots": [32, 33, 84], "sequence_rows": [0, 0, 1],
        "block_tables": tables, "counts": [3, 2], "logit_rows": [1, 2],
    }  # fmt: skip
    return inputs(**(right | other))


def run_of_two(**other: Any) -> Run:
    run = Run()
    tensors_of_decoder(run)
    run.tensor("logit_rows", "I32", ROWS)
    run.tensor("logits", "F32", ROWS, HEADS * DIM)
    plan = decoder(run)
    facts = {"x": "x", "out": "logits", "rows": "logit_rows", "counts": "counts"}
    launches = (*run.plans[plan - 1].launches, run.launch("gather", facts))
    run.plans[plan - 1] = msgspec.structs.replace(run.plans[plan - 1], launches=launches)
    run.run(plan, two(**other), (FIRST, SECOND))
    return run


def sampled(*positions: tuple[int, int]) -> Bundle:
    """A step of both requests whose sampler got the settings of (request, position) as rows."""
    run = run_of_two()
    for number, params in PARAMS.items():
        run.emit(
            Entered, request=number, num_prompt_tokens=2, seed=params.seed,
            settings=tuple(map(float, columns_of(params))),
        )  # fmt: skip
    rows = [settings_of(TokenChoice(PARAMS[number], position)) for number, position in positions]
    settings = np.array(rows, np.float64).view(np.int64)
    run.tensor("settings", "I64", ROWS, 8)
    draw: LaunchRecord = run.launch("sample_start", {"settings": "settings"})
    plan = run.plan(draw)
    run.emit(
        Stepped, plan=plan,
        inputs=(Values(run.tensors["settings"].id, "I64", settings.shape, settings.tobytes()),),
    )  # fmt: skip
    return run.bundle(DIFFERS)


def found_in(bundle: Bundle) -> Diagnosis:
    found = diagnose(bundle, without=NO_REPLAY)
    assert all(not rung.left_out or rung.name in NO_REPLAY for rung in found.rungs), found.rungs
    return found


def verdict(found: Diagnosis, cause: Cause) -> Verdict:
    return next(one.verdict for one in found.hypotheses if one.cause is cause)


def test_inputs_of_the_steps_own_requests_are_no_finding() -> None:
    found = found_in(run_of_two().bundle(DIFFERS))
    assert found.is_clean
    assert verdict(found, Cause.WRONG_INPUT) is Verdict.REFUTED
    assert verdict(found, Cause.CHANGED_INPUT) is Verdict.NOT_TESTED


@pytest.mark.parametrize(
    ("name", "wrong", "kernel", "told"),
    [
        ("positions", [0, 1, 3], "rope", "the one at position 4 of request 8"),
        ("positions", [0, 1, 5], "rope", "the one at position 4 of request 8"),
        ("positions", [0, 0, 4], "rope", "the one at position 1 of request 7"),
        ("logit_rows", [2, 1], "gather", "request 7 draws from its last token, which is row 1"),
        ("logit_rows", [0, 2], "gather", "request 7 draws from its last token, which is row 1"),
        ("counts", [2, 2], "lookup", "the step has 3 tokens"),
        ("counts", [3, 1], "lookup", "the step has 2 rows of logits"),
    ],
)
def test_an_input_of_another_token_or_request_is_the_cause(
    name: str, wrong: list[int], kernel: str, told: str
) -> None:
    root = found_in(run_of_two(**{name: wrong}).bundle(DIFFERS)).roots[0]
    argument = {"logit_rows": "rows"}.get(name, name)  # by the word of the launch
    assert (root.cause, root.kernel, root.argument) == (Cause.WRONG_INPUT, kernel, argument)
    assert root.tensor == name
    assert told in root.sentence
    assert f"every entry of {name} is that of the step's requests" in root.proof.green


def test_an_input_outside_its_range_is_one_cause() -> None:
    """Whether it is the step's own and whether it is in range are two sights of one entry."""
    found = found_in(run_of_two(logit_rows=[1, 100_002]).bundle(DIFFERS))
    assert [(root.kernel, root.argument) for root in found.roots] == [("gather", "rows")]


def test_logits_that_are_kept_come_behind_those_that_are_drawn_from() -> None:
    keeping = msgspec.structs.replace(FIRST, num_kept=2)
    run = run_of_two(logit_rows=[1, 2, 0, 1], counts=[3, 4])
    events = [
        msgspec.structs.replace(event, requests=(keeping, SECOND))
        if isinstance(event, Stepped)
        else event
        for event in run.events
    ]
    bundle = run.bundle(DIFFERS)
    assert found_in(msgspec.structs.replace(bundle, events=tuple(events))).is_clean
    assert not found_in(bundle).is_clean  # nobody keeps any


def test_a_row_that_is_kept_may_be_the_last_one() -> None:
    """As of a text whose last token stands for it; the first one instead is the wrong row."""
    keeping = msgspec.structs.replace(FIRST, samples=False, num_kept=1, first_kept=1)
    for rows, is_clean in (([2, 1], True), ([2, 0], False)):
        run = run_of_two(logit_rows=rows, counts=[3, 2])
        events = tuple(
            msgspec.structs.replace(event, requests=(keeping, SECOND))
            if isinstance(event, Stepped)
            else event
            for event in run.events
        )
        bundle = msgspec.structs.replace(run.bundle(DIFFERS), events=events)
        assert found_in(bundle).is_clean == is_clean


def test_a_record_from_before_these_fields_says_nothing_of_logit_rows() -> None:
    run = run_of_two(logit_rows=[2, 1])
    old = tuple(
        msgspec.structs.replace(request, samples=None, num_kept=None) for request in (FIRST, SECOND)
    )
    events = tuple(
        msgspec.structs.replace(event, requests=old) if isinstance(event, Stepped) else event
        for event in run.events
    )
    assert found_in(msgspec.structs.replace(run.bundle(DIFFERS), events=events)).is_clean


def test_settings_of_the_sampler_are_those_of_the_row_s_request() -> None:
    assert found_in(sampled((7, 2), (8, 5))).is_clean
    root = found_in(sampled((8, 5), (7, 2))).roots[0]
    assert (root.cause, root.kernel) == (Cause.WRONG_INPUT, "sample_start")
    assert root.argument == "settings"
    assert "the random number of request 7 for position 2 is" in root.sentence
    late = found_in(sampled((7, 2), (8, 4))).roots[0]
    assert "the random number of request 8 for position 5 is" in late.sentence


def seen_on_device(since: int = 0, **other: Any) -> Bundle:
    """A traced step; `other` is what launches from `since` on found in the inputs, by name."""
    run = run_of_two()
    meant = two()
    snapshots = []
    for number, launch in enumerate(run.plans[0].launches):
        values = []
        for fact in launch.facts:
            name = next((n for n, t in run.tensors.items() if t.id == fact.tensor), "")
            if name in meant:
                now = other.get(name, meant[name]) if number >= since else meant[name]
                array = np.asarray(now, np.int32)
                values.append(Values(fact.tensor or 0, "I32", array.shape, array.tobytes()))
        snapshots.append(Snapshot(1, 1, number, tuple(values)))
    return run.bundle(DIFFERS, snapshots=tuple(snapshots))


def test_inputs_that_the_device_found_as_written_are_no_finding() -> None:
    found = found_in(seen_on_device())
    assert found.is_clean
    assert verdict(found, Cause.CHANGED_INPUT) is Verdict.REFUTED


def test_an_input_that_the_device_found_changed_is_the_cause() -> None:
    found = found_in(seen_on_device(slots=[32, 33, 9], logit_rows=[1, 0]))
    root = found.roots[0]
    assert (root.cause, root.kernel) == (Cause.CHANGED_INPUT, "kv_write")
    assert root.argument == "slots"
    assert "the host wrote slots[2] = 84, and this launch found 9 there" in root.sentence
    assert len(found.roots) == 1
    evidence = "\n".join(found.hypotheses[0].evidence)
    assert "gather: the host wrote rows[1] = 2, and this launch found 0 there" in evidence


def test_the_last_launch_that_found_it_right_is_told() -> None:
    early = found_in(seen_on_device(counts=[2, 2])).roots[0]
    assert (early.kernel, "no launch before it looked at it" in early.sentence) == ("lookup", True)
    late = found_in(seen_on_device(since=2, counts=[2, 2])).roots[0]
    assert (late.kernel, "launch 1 still found it right" in late.sentence) == ("kv_write", True)
