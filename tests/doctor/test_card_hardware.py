"""Broken hardware of a card is told as the card's, where it is this run's, and else left open."""

from __future__ import annotations

import msgspec
import pytest
from pretended.runtime_words import FRAMES

from hypocenter.base.cards import Card
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.report import report_text
from hypocenter.record.bundle import Bundle
from hypocenter.record.xid_text import HARDWARE_XIDS, hardware_xids
from hypocenter.watch.fault_text import fault_in

PID = 4211
CARD = Card(index=0, vendor="nvidia", name="H100", bus="0000:18:00.0")
ECC = (
    FRAMES.format(line="loss.backward()")
    + "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n"
)
LATE = FRAMES.format(line="x.cpu()") + (
    "torch.AcceleratorError: CUDA error: unspecified launch failure\n"
)
PYTHON = FRAMES.format(line="table[key]") + "KeyError: 'x'\n"
ILLEGAL = "NVRM: Xid (PCI:0000:18:00): 31, pid=4211, Ch 8, MMU Fault: faulted @ 0x7f_00000000"


def line(number: int, pid: str = "4211") -> str:
    return f"[ 12.3] NVRM: Xid (PCI:0000:18:00): {number}, pid={pid}, name=python, more words"


def diagnosed(stderr: str, *log: str, cards: tuple[Card, ...] = (CARD,)) -> Diagnosis:
    fault = fault_in(stderr, 1 if stderr else 0, None)
    bundle = Bundle(
        kind="error" if stderr else "suspect", fault=fault, stderr=stderr, kernel_log=log, pid=PID,
        cards=cards,
    )  # fmt: skip
    return diagnose(bundle)


def verdicts(diagnosis: Diagnosis) -> list[Verdict]:
    return [h.verdict for h in diagnosis.hypotheses if h.cause is Cause.CARD_HARDWARE]


@pytest.mark.parametrize(
    "words",
    ["CUDA error: uncorrectable ECC error encountered", "CUDA error: uncorrectable NVLink error"],
)
def test_an_error_that_the_runtime_says_is_of_the_card_and_of_no_launch(words: str) -> None:
    found = diagnosed(ECC.replace("CUDA error: uncorrectable ECC error encountered", words))
    [root] = found.roots
    assert (root.cause, root.kernel, root.argument) == (Cause.CARD_HARDWARE, None, None)
    assert "reset" in root.fix
    text = report_text(found)
    assert text.startswith("CAUSE      broken hardware of the GPU\n")
    assert "which met a card that had failed" in " ".join(text.split())


@pytest.mark.parametrize("number", sorted(n for n, x in HARDWARE_XIDS.items() if x.ends_work))
def test_a_report_of_this_process_is_the_cause_and_says_what_to_do(number: int) -> None:
    [root] = diagnosed(LATE, line(number)).roots
    assert root.cause is Cause.CARD_HARDWARE
    assert f"Xid {number} for process {PID}" in root.sentence
    assert ("restart the machine" in root.fix.lower()) == (number == 79)
    assert "{card}" not in root.fix


def test_a_report_without_a_process_is_of_the_only_card() -> None:
    anonymous = line(79, "'<unknown>'")
    assert diagnosed(LATE, anonymous).roots[0].cause is Cause.CARD_HARDWARE
    two = (CARD, msgspec.structs.replace(CARD, index=1, bus="0000:2a:00.0"))
    found = diagnosed(LATE, anonymous, cards=two)
    assert not found.roots
    assert verdicts(found) == [Verdict.INCONCLUSIVE]


def test_what_nvml_counted_is_told_where_the_log_is_not_readable() -> None:
    seen = msgspec.structs.replace(CARD, xids=(95,))
    assert diagnosed(LATE, cards=(seen,)).roots[0].cause is Cause.CARD_HARDWARE
    counted = msgspec.structs.replace(CARD, new_ecc_errors=2)
    found = diagnosed(LATE, cards=(counted,))
    assert (found.roots, verdicts(found)) == ((), [Verdict.INCONCLUSIVE])


@pytest.mark.parametrize("number", [63, 64])
def test_a_row_to_be_replaced_is_told_and_ends_no_program(number: int) -> None:
    found = diagnosed(LATE, line(number))
    assert (found.roots, verdicts(found)) == ((), [Verdict.INCONCLUSIVE])


@pytest.mark.parametrize(
    ("stderr", "log"),
    [
        (LATE, line(94, "77")),  # of another process
        (PYTHON, line(48)),  # of an end that no card has made
        ("", line(94)),  # of a run that ended well
    ],
)
def test_what_may_be_of_others_is_left_open(stderr: str, log: str) -> None:
    found = diagnosed(stderr, log)
    assert (found.roots, verdicts(found)) == ((), [Verdict.INCONCLUSIVE])


@pytest.mark.parametrize("log", ["", ILLEGAL, line(13), line(45), "usb 1-2: Xid 79"])
def test_what_programs_do_wrong_is_no_hardware(log: str) -> None:
    assert not list(hardware_xids([log]))
    assert verdicts(diagnosed(LATE, log)) == []
