"""How a diagnosis reads: the first lines, the formats, and the example in docs/doctor.md."""

from __future__ import annotations

import re

import msgspec
import pytest
from bundles import Run, background, crash, decoder, step, tensors_of_decoder
from repository import ROOT

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import LADDER, diagnose
from hypocenter.doctor.report import headline, report_markdown, report_text
from hypocenter.record.events import FaultRecord
from hypocenter.record.gap import Gap, GapKind

DOCUMENT = ROOT / "docs" / "doctor.md"


def shown(diagnosis: Diagnosis) -> str:
    """The text with what is another machine's or another second's taken out."""
    text = report_text(diagnosis).replace(f"{ROOT}/", "")
    lines = text[: text.index("\nRUNGS")].splitlines()
    return "\n".join(line.rstrip() for line in lines)


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnose(background())


def test_the_first_lines_say_what_to_do(found: Diagnosis) -> None:
    lines = report_text(found).splitlines()
    assert lines[0] == "CAUSE      dtype width: argument positions of kernel rope"
    labels = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert labels[:8] == [
        "CAUSE", "LINE", "WHEN", "REPLAY", "FIX", "PROOF", "SYMPTOM", "SURFACED",
    ]  # fmt: skip
    assert re.search(r"^LINE .*kernels/attention/rope_gpu\.py:\d+$", report_text(found), re.M)
    assert "    tl.load(positions_ptr + token)" in report_text(found)
    assert headline(found) == lines[0].removeprefix("CAUSE").strip()


def test_no_line_is_too_wide_but_for_paths(found: Diagnosis) -> None:
    wide = [line for line in report_text(found).splitlines() if len(line) > 100]
    assert all(line.startswith("LINE") for line in wide), wide


def test_each_hypothesis_has_its_verdict_and_evidence(found: Diagnosis) -> None:
    text = report_text(found, show_all=True)
    table = " ".join(text[text.index("HYPOTHESES") :].split())
    for one in found.hypotheses:
        assert f"{one.cause}" in table
        if one.verdict is not Verdict.NOT_TESTED:
            words = " ".join(one.evidence[0].split()[:4])
            assert words in table


def test_what_is_refuted_or_not_tested_is_counted(found: Diagnosis) -> None:
    counts = {
        verdict: len({one.cause for one in found.hypotheses if one.verdict is verdict})
        for verdict in Verdict
    }
    text = report_text(found)
    line = (
        f"  {counts[Verdict.REFUTED]} causes refuted, {counts[Verdict.NOT_TESTED]} not tested "
        "(--all shows them)"
    )
    assert line in text.splitlines()
    assert not re.search(r"^  (REFUTED|NOT TESTED)", text, re.M)
    assert "(--all" not in report_text(found, show_all=True)


def test_launches_not_replayed_for_one_reason_stand_in_one_line(found: Diagnosis) -> None:
    why = "it is the program's own kernel; its recorded source was not run"
    of_a, of_c = (Gap(GapKind.SOURCE_NOT_RUN, name, why) for name in "ac")
    many = msgspec.structs.replace(found, roots=(), unseen=(of_a, Gap.not_recorded("b"), of_c))
    told = report_text(many)
    seen = told[told.index("NOT SEEN") :].split("\n\n")[0].splitlines()[1:]
    assert seen[0] == "  - b"
    assert seen[1].startswith("  - not replayed: a, c: it is the program's own kernel;")
    assert "--run-sources runs it" in told.split("\n\n")[0]


def test_a_run_that_left_no_record_refutes_nothing() -> None:
    killed = FaultRecord(kind="crash", message="ended by SIGKILL", signal=9)
    found = diagnose(Run().bundle(killed))
    assert {one.verdict for one in found.hypotheses} == {Verdict.NOT_TESTED}
    assert "driver" not in found.surfaced.replace("not from the driver", "")
    assert found.symptom.startswith("ended from outside, by SIGKILL")
    assert not any("address" in str(text) for text in found.unseen)
    dead = diagnose(Run().bundle(FaultRecord(kind="crash", message="it has died")))
    assert dead.surfaced == (
        "it is not known where it was reported: the doctor did not run this program"
    )


def test_json_can_be_read_back(found: Diagnosis) -> None:
    assert msgspec.json.decode(msgspec.json.encode(found), type=Diagnosis) == found


def test_markdown_has_the_cause_the_proof_and_the_table(found: Diagnosis) -> None:
    text = report_markdown(found)
    assert text.startswith("# dtype width: argument positions of kernel rope\n")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert sum(line.startswith("| CONFIRMED |") for line in rows) == 1
    assert all(line.count("|") - line.count("\\|") in (3, 5) for line in rows)


def test_nothing_found_says_so() -> None:
    run = Run()
    tensors_of_decoder(run)
    step(run, decoder(run))
    clean = diagnose(run.bundle(), without=("replay",))
    assert headline(clean) == "nothing found"
    run.copy_out("out")
    crashed = diagnose(run.bundle(crash()), without=("replay",))
    assert report_text(crashed).startswith("CAUSE      no root cause is proven\n")
    assert "NOT SEEN\n  - the address of the fault: this driver does not give it" in report_text(
        crashed
    )


def test_the_example_of_the_document_is_what_the_doctor_says(found: Diagnosis) -> None:
    blocks = re.findall(r"^```\n(CAUSE.*?)\n```$", DOCUMENT.read_text(), re.S | re.M)
    example = re.sub(r":\d+$", ":N", blocks[0], flags=re.M)
    assert example == re.sub(r":\d+$", ":N", shown(found), flags=re.M)


def test_the_document_names_every_rung_and_every_cause() -> None:
    text = DOCUMENT.read_text()
    rungs = re.findall(r"^\| (?:`)?([a-z ]+?)(?:`)? \|", text, re.M)
    assert [name for name in rungs if name in LADDER] == list(LADDER)
    missing = [cause for cause in Cause if cause not in text]
    assert not missing
