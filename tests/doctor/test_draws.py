"""What tokens are drawn by: the position of each, and masks and biases beside a good run."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from recorded.bundles import REQUEST, Run, decoder, inputs, tensors_of_decoder

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.bundle import Bundle
from hypocenter.record.engine_events import Answered, Drawn
from hypocenter.record.events import (
    ArgumentDeclaration,
    Declaration,
    Launched,
    Place,
    Statistics,
)
from hypocenter.record.fault_record import FaultRecord

QUIET = FaultRecord(kind="none", message="")
NO_REPLAY = ("replay", "hang")
SAMPLED = msgspec.structs.replace(REQUEST, num_tokens=2, samples=True, num_kept=0)


def drawn(
    position: int = 2,
    answer: str = "k:1",
    num_steps: int = 1,
    digests: dict[str, str] | None = None,
) -> Bundle:
    """Steps of one request, each with a token that is drawn on the host."""
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    for step in range(num_steps):
        given = inputs(
            positions=[2 * step, 2 * step + 1], slots=[32 + 2 * step, 33 + 2 * step],
            sequence_rows=[0, 0], counts=[2, 1],
        )  # fmt: skip
        request = msgspec.structs.replace(
            SAMPLED, first_position=2 * step, digest=f"k:{answer * (step > 0)}"
        )
        run.run(plan, given, (request,))
        others: dict[str, Any] = dict.fromkeys(("masks", "biases", "counts"), ("",))
        others |= {name: (digest,) for name, digest in (digests or {}).items()}
        run.emit(Drawn, requests=(7,), positions=(position + 2 * step,), **others)
        run.emit(Launched, launch=run.launch("sample", {"logits": "x"}, source=None))
    run.emit(Answered, request=7, num_tokens=4, digest=answer)
    return run.bundle(QUIET)


def found_in(bundle: Bundle, good: Bundle | None = None) -> Diagnosis:
    found = diagnose(bundle, good, without=NO_REPLAY)
    assert all(not rung.left_out or rung.name in NO_REPLAY for rung in found.rungs), found.rungs
    return found


def test_a_token_that_is_drawn_for_its_own_position_is_no_finding() -> None:
    assert not found_in(drawn(num_steps=2)).roots


def test_a_token_that_is_drawn_for_another_position_is_named() -> None:
    root = found_in(drawn(1, num_steps=2)).roots[0]
    assert (root.cause, root.argument, root.kernel) == (Cause.WRONG_INPUT, "settings", "sample")
    assert "random number of position 1, but it will have position 2" in root.sentence
    assert root.proof.corrected == "position 2, and the like for 1 more"


@pytest.mark.parametrize("name", ["masks", "biases", "counts"])
def test_what_a_draw_on_the_host_depends_on_is_held_against_the_good_run(name: str) -> None:
    good = drawn(answer="k:1", num_steps=2, digests={name: "k:aa"})
    bad = drawn(answer="k:2", num_steps=2, digests={name: "k:bb"})
    root = found_in(bad, good).roots[0]
    assert (root.cause, root.kernel) == (Cause.WRONG_ANSWER, "sample")
    assert name in (root.argument or "") or root.argument == "output_counts"
    assert "bb" in root.sentence
    assert not found_in(good, good).roots


def test_a_draw_that_differs_and_changes_no_token_is_no_cause() -> None:
    good, bad = (
        drawn(num_steps=2, digests={"masks": "k:aa"}),
        drawn(num_steps=2, digests={"masks": "k:bb"}),
    )
    assert not found_in(bad, good).roots


def test_two_facts_of_a_draw_that_differ_are_told_and_none_is_blamed() -> None:
    good = drawn(answer="k:1", num_steps=2, digests={"masks": "k:aa", "biases": "k:1"})
    bad = drawn(answer="k:2", num_steps=2, digests={"masks": "k:bb", "biases": "k:2"})
    assert not found_in(bad, good).roots


def test_digests_of_other_keys_say_nothing() -> None:
    good = drawn(answer="k:1", num_steps=2, digests={"masks": "k:aa"})
    bad = drawn(answer="k:2", num_steps=2, digests={"masks": "other:bb"})
    assert not found_in(bad, good).roots


def biased(value: int) -> Bundle:
    """A step of a device's sampler, whose bias is told by its digest and by its elements."""
    run = Run()
    run.tensor("biases", "I64", 1)
    run.tensor("keys", "F32", 1, 8)
    plan = run.plan(run.launch("sample_bias", {"biases": "biases", "keys": "keys"}))
    written = ArgumentDeclaration(name="keys", dtypes=("F32",), shape="rows, n", access="both")
    run.contracts["sample_bias"] = Declaration(kernel="sample_bias", arguments=(written,))
    run.run(plan, {"biases": np.array([value], np.int64)})
    run.emit(
        Drawn, requests=(7,), positions=(2,), masks=("",), biases=(f"k:{value}",), counts=("",)
    )
    figures = Statistics(
        place=Place(1, plan, 0), tensor=run.tensors["keys"].id, digest=f"k:{value}", low=0.0,
        high=1.0, mean=float(value), rms=1.0, num_nan=0, num_inf=0,
    )  # fmt: skip
    return run.bundle(FaultRecord(kind="differs", message=""), statistics=(figures,))


def test_an_input_that_is_told_twice_is_one_fact() -> None:
    root = found_in(biased(5), biased(6)).roots[0]
    assert (root.cause, root.kernel, root.argument) == (
        Cause.WRONG_ANSWER, "sample_bias", "biases",
    )  # fmt: skip
    assert "biases[0] is 5, in the good run 6" in root.sentence
