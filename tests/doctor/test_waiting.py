"""Requests that later ones pass, by the steps in which they run."""

from __future__ import annotations

import msgspec
import pytest
from recorded.bundles import REQUEST, Run, decoder, inputs, tensors_of_decoder

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.bundle import Bundle
from hypocenter.record.engine_events import BlocksNamed, Entered
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.module_texts import ModuleText
from hypocenter.record.prefixes import ROTATION

ENDED = FaultRecord(kind="none", message="")
NO_REPLAY = ("replay", "hang")


def run_of(*steps: str, lengths: str = "222", turns: bool = False, text: str = "") -> Bundle:
    """Requests a, b, c come in that order; each step is told by the letters of those in it.

    A prompt has as many tokens as `lengths` says, a capital letter reads the last of them.
    """
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    for number, size in enumerate(lengths):
        run.emit(Entered, request=number, num_prompt_tokens=int(size), settings=(), seed=0)
    if turns:
        run.emit(
            BlocksNamed, request=0, blocks=(2,), prefixes=b"12345678", made_with={ROTATION: "long"}
        )
    for letters in steps:
        requests = tuple(
            msgspec.structs.replace(
                REQUEST, id="abc".index(letter.lower()), row=row, num_tokens=1, blocks=(2 + row,),
                first_position=int(lengths["abc".index(letter.lower())]) - 1
                if letter.isupper() else 0,
                samples=letter.isupper(), digest=f"k:{letter.lower()}",
            )
            for row, letter in enumerate(letters)
        )  # fmt: skip
        run.run(plan, inputs(), requests)
    bundle = run.bundle(ENDED)
    module = ModuleText(file="engine/scheduler.py", digest=text, text=text or "x = 1\n")
    return msgspec.structs.replace(bundle, modules=(module,))


def claims(bundle: Bundle, good: Bundle | None = None) -> tuple[Diagnosis, list[str]]:
    found = diagnose(bundle, good, without=[*NO_REPLAY, "ownership", "step inputs", "arguments"])
    assert all(rung.left_out in ("", "left out on request") for rung in found.rungs), found.rungs
    return found, [r.sentence for r in found.roots if r.cause is Cause.PASSED_OVER]


def test_a_request_that_came_first_and_runs_last_is_named() -> None:
    _, told = claims(run_of("b", "B", "c", "C", "a", "A"))
    assert told == [
        "request 0 came before request 1, and runs from step 5 on; that one runs from step 1 on; "
        "2 later requests passed it in all"
    ]


@pytest.mark.parametrize(
    ("steps", "lengths"),
    [
        (("a", "A", "b", "B", "C"), "222"),
        (("ac", "aC", "b", "B"), "221"),  # a short one need not wait for a long one
        (("C", "A", "B"), "999"),  # what is kept of its prompt has not to be read
        (("b", "b", "a"), "222"),  # nobody knows how much there was to read
    ],
)
def test_an_order_that_is_as_it_should_be_is_no_finding(
    steps: tuple[str, ...], lengths: str
) -> None:
    assert claims(run_of(*steps, lengths=lengths))[1] == []


def test_long_and_short_texts_run_by_turns() -> None:
    assert claims(run_of("b", "a", "B", "A", turns=True))[1] == []
    assert claims(run_of("b", "b", "B", "a", "A", turns=True))[1]


def test_a_wait_that_the_good_run_has_not_is_blamed_on_the_line_that_changed() -> None:
    late = ("a", "a", "a", "a", "a", "A", "B")
    good = run_of("ab", "aB", "a", "a", "A", lengths="92")
    found, told = claims(run_of(*late, lengths="92", text="x = 2\n"), good)
    assert told == ["request 1 waits 6 steps while others run, and 0 steps in the good run"]
    culprit = found.roots[0].culprit
    assert culprit is not None
    assert culprit.place == "hypocenter/engine/scheduler.py:1"
    found, told = claims(run_of(*late, lengths="92"), good)
    assert told == []
    rows = [row.verdict for row in found.hypotheses if row.cause is Cause.PASSED_OVER]
    assert rows == [Verdict.INCONCLUSIVE]
    nearly = run_of("a", "a", "ab", "aB", "A", lengths="92", text="x = 2\n")
    assert claims(nearly, good)[1] == []
