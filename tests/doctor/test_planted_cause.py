"""A cause that the doctor does not know, planted into a copy of its source.

The table of causes alone makes it one that is asked after; the rung that proves it is the other
file.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from repository import PACKAGE_DIR

_MEMBER = '    CHANGED_LINE = "changed line of the engine"\n'
_ROW = "    Cause.LOST_EVENT: CauseRow(symptoms=_HANG, is_of_engine=True),\n"
_PLANTED_MEMBER = '    WORN_OUT = "worn out"\n'
_PLANTED_ROW = """    Cause.WORN_OUT: CauseRow(
        symptoms=_OF_MEMORY, blames=Blame.KERNEL, untested="age: nobody asked how old it is"
    ),
"""
_PLANTED_RUNG = """

_older = limits


def limits(case: Case) -> list[Claim]:
    from hypocenter.doctor.diagnosis import Proof, RootCause, proven

    proof = Proof("it is 99", "it is 1", "then it is young")
    root = RootCause(cause=Cause.WORN_OUT, sentence="it is old", fix="Make a new one", proof=proof)
    return [*_older(case), proven(root, NAME, ("its age was asked for",), "another age")]
"""
_ASKS = """
import json
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.bundle import Bundle
from hypocenter.record.fault_record import FaultRecord
found = {}
for kind in ("crash", "hang"):
    bundle = Bundle(kind=kind, fault=FaultRecord(kind=kind, message="an illegal memory access"))
    diagnosis = diagnose(bundle)
    rows = {row.cause: (row.verdict, *row.evidence) for row in diagnosis.hypotheses}
    found[kind] = rows.get("worn out"), [root.cause for root in diagnosis.roots]
print(json.dumps(found))
"""


def asked(folder: Path) -> dict[str, list[object]]:
    """By how a run ended: the row of the planted cause, and what is proven."""
    done = subprocess.run(
        [sys.executable, "-c", _ASKS],
        env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("{"), done.stderr
    answered: dict[str, list[object]] = json.loads(done.stdout)
    return answered


def test_a_planted_cause_needs_an_edit_of_the_table_and_one_of_its_rung(tmp_path: Path) -> None:
    package = tmp_path / "hypocenter"
    shutil.copytree(PACKAGE_DIR, package, ignore=shutil.ignore_patterns("__pycache__"))
    table, rung = package / "doctor" / "causes.py", package / "doctor" / "rungs" / "limits.py"
    text = table.read_text()
    assert text.count(_MEMBER) == text.count(_ROW) == 1
    table.write_text(text.replace(_MEMBER, _MEMBER + _PLANTED_MEMBER).replace(
        _ROW, _ROW + _PLANTED_ROW
    ))  # fmt: skip
    untested = ["NOT TESTED", "no launch of this run was recorded"]
    assert asked(tmp_path) == {"crash": [untested, []], "hang": [None, []]}
    rung.write_text(rung.read_text() + _PLANTED_RUNG)
    proven = ["CONFIRMED", "its age was asked for"]
    assert asked(tmp_path)["crash"] == [proven, ["worn out"]]
