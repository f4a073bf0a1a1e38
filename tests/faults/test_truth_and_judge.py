"""The one judge: five claims, each right, left out or wrong; and what that makes of a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.ablation import TESTED_ELSEWHERE
from faults.judge import CLAIMS, VAGUE_CAUSE, Claim, judged, refuted
from faults.row import Platform, Role, Row
from faults.truth import FIX_OF, Fix, Truth
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.doctor import LADDER

TRUTH = Truth(
    causes=("offset overflow",), kernels=("copy_row",), arguments=("cache", "stride"),
    lines=("row * stride",), fix=Fix("64|int64"),
)  # fmt: skip
GUILTY = [("/somewhere/program/cache_rows.py", 19)]
RIGHT: dict[str, Any] = {
    "cause": "offset overflow", "kernel": "copy_row", "argument": "cache_ptr",
    "file": "program/cache_rows.py", "line": 19, "fix": "Take row as a 64-bit number",
    "sentence": "",
}  # fmt: skip
ELSEWHERE = {"culprit": {"place": "program/cache_rows.py:3", "does": ""}}
HERE = {"culprit": {"place": "cache_rows.py:19", "does": ""}}
MASK = {"fix": "Mask the access"}
Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "claim", "worth"),
    [
        (lambda root: root, "", Claim.RIGHT),
        (lambda root: root | {"cause": "missing tail mask"}, "cause", Claim.WRONG),
        (lambda root: root | {"cause": VAGUE_CAUSE}, "cause", Claim.MISSING),
        (lambda root: root | {"kernel": "copy_row_kernel"}, "", Claim.RIGHT),
        (lambda root: root | {"kernel": "copy_row_2"}, "kernel", Claim.WRONG),
        (lambda root: root | {"kernel": "copy"}, "kernel", Claim.WRONG),
        (lambda root: root | {"kernel": None}, "kernel", Claim.MISSING),
        (lambda root: root | {"argument": "stride"}, "", Claim.RIGHT),
        (lambda root: root | {"argument": "out_ptr"}, "argument", Claim.WRONG),
        (lambda root: root | {"argument": None}, "argument", Claim.MISSING),
        (lambda root: root | {"line": 20}, "line", Claim.WRONG),
        (lambda root: root | {"file": "~/program/cache_rows.py"}, "", Claim.RIGHT),
        (lambda root: root | {"file": "~/other/cache_rows.py"}, "line", Claim.MISSING),
        (lambda root: root | {"file": "other.py"}, "line", Claim.MISSING),
        (lambda root: root | {"file": "other.py"} | ELSEWHERE, "line", Claim.WRONG),
        (lambda root: root | {"file": "other.py"} | HERE, "", Claim.RIGHT),
        (lambda root: root | {"file": None, "line": None}, "line", Claim.MISSING),
        (lambda root: root | {"fix": "Mask the access"}, "fix", Claim.WRONG),
        (lambda root: root | {"fix": ""}, "fix", Claim.MISSING),
        (lambda root: root | {"sentence": "make cache_ptr larger"}, "fix", Claim.WRONG),
        (lambda root: root | {"alternatives": [MASK, {"fix": "int64"}]}, "", Claim.RIGHT),
        (lambda root: root | {"alternatives": [MASK]}, "fix", Claim.WRONG),
    ],
)  # fmt: skip
def test_each_claim_is_right_left_out_or_wrong(change: Change, claim: str, worth: Claim) -> None:
    verdict = judged([change(RIGHT)], TRUTH, GUILTY)
    assert verdict.claims == dict.fromkeys(CLAIMS, Claim.RIGHT) | ({claim: worth} if claim else {})
    says = {Claim.RIGHT: "right", Claim.MISSING: "vague", Claim.WRONG: "false"}[worth]
    assert verdict.says == says
    # Whoever reads a second cause may believe it; the first one is what is to be right.
    beside = judged([RIGHT, change(RIGHT)], TRUTH, GUILTY).says
    assert beside == ("false" if says == "false" else "right")


def test_nothing_is_silent_and_what_is_no_fault_of_a_doctor_is_false_when_named() -> None:
    assert judged([], TRUTH, GUILTY).says == judged(None, TRUTH, GUILTY).says == "silent"
    assert judged([RIGHT], Truth()).says == "false"
    assert refuted(judged([RIGHT], TRUTH, GUILTY)).says == "false"


def test_of_what_no_record_decides_silence_is_right_and_a_wrong_claim_is_false() -> None:
    truth = Truth(causes=TRUTH.causes, lines=TRUTH.lines, undecided="only the program knows")
    row = Row(collection="programs", name="row", platform=Platform.CPU, role=Role.FAULT)
    for roots, says in (([], "silent"), ([RIGHT], "right"), ([RIGHT | {"line": 20}], "false")):
        told = row.with_verdict(judged(roots, truth, GUILTY), is_seen=truth.is_seen)
        assert (told.says, told.is_as_wanted) == (says, says != "false")


@pytest.mark.parametrize(
    ("place", "says"),
    [("engine/a.py:7", "right"), ("engine/a.py:1", "false"), ("b.py:7", "false"), ("", "vague")],
)
def test_whoever_is_blamed_must_be_a_changed_line(place: str, says: str) -> None:
    root = {key: value for key, value in RIGHT.items() if key not in ("file", "line")}
    root |= {"culprit": {"place": place, "does": ""}} if place else {}
    truth = Truth(causes=TRUTH.causes)
    assert judged([root], truth, (), [("/x/hypocenter/engine/a.py", 7)]).says == says


def test_names_of_a_compiler_and_no_kernel_at_all() -> None:
    truth = Truth(causes=TRUTH.causes, kernels=("triton_", "cpp_"))
    assert judged([RIGHT | {"kernel": "triton_poi_0"}], truth).claims["kernel"] is Claim.RIGHT
    none = Truth(causes=TRUTH.causes, kernels=("",))
    assert judged([RIGHT | {"kernel": None}], none).claims["kernel"] is Claim.RIGHT
    assert judged([RIGHT], none).claims["kernel"] is Claim.WRONG


def test_a_fix_without_a_pattern_of_its_own_must_fit_its_cause() -> None:
    assert FIX_OF.keys() <= set(Cause)
    truth = Truth(causes=("use after free",))
    root = RIGHT | {"cause": "use after free", "fix": "Keep it alive"}
    assert judged([root], truth).says == "right"
    assert judged([root | {"fix": "Mask the load"}], truth).says == "false"


def test_rungs_that_no_fault_here_can_need_are_rungs_and_have_tests() -> None:
    tests = Path(__file__).parents[1]
    for rung, file in TESTED_ELSEWHERE.items():
        assert rung in LADDER
        assert (tests / file).is_file(), file
