"""What the doctor may say of a program whose launches alone are known, and what it may not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.bundles import Run
from recorded.foreign_launch import TAKE as TAKE_ENTRY
from recorded.foreign_launch import launch_of

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.kernel_text import follows_what_it_loads, is_masked
from hypocenter.doctor.report import report_text
from hypocenter.doctor.report_parts import headline
from hypocenter.record.bundle import Bundle, save
from hypocenter.record.events import FOREIGN, Launched, SourceRecord
from hypocenter.record.fault_record import FaultRecord

ENDED = FaultRecord(kind="none", message="")
DIED = FaultRecord(kind="crash", message="ended by SIGSEGV", signal=11)
OUTSIDE = (Cause.MISSING_MASK, Cause.OFF_BY_ONE, Cause.OFFSET_OVERFLOW)
HISTORY = (Cause.UNINITIALISED_READ, Cause.OUTPUT_NOT_WRITTEN)

COPY = """@triton.jit
def copy_kernel(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n)
    tl.store(o + i, v * 2.0, mask=i < n)
"""
TAKE = COPY.replace(
    "    tl.store(", "    v = tl.load(x + v.to(tl.int64), mask=i < n)\n    tl.store("
)
UNMASKED = """@triton.jit
def unmasked_kernel(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i) * 2.0, mask=i < n)
"""
ADD = """@triton.jit
def add_kernel(x, o, n, B: tl.constexpr):
    tl.store(o, tl.load(o) + 1)
"""


def program(text: str, fault: FaultRecord = ENDED, num_launches: int = 1) -> Bundle:
    """Launches over 1000 elements in 8 programs, as a program of anybody's leaves them."""
    run = Run()
    for name in ("x", "o"):
        run.tensor(name, "F32", 1000, owner=FOREIGN)
    for _ in range(num_launches):
        run.step += 1
        name = text.split("def ")[1].split("_kernel")[0]
        launch = run.launch(
            name, {}, {"x": "x", "o": "o", "n": 1000}, source=text, grid=(8,),
            constants={"B": 128},
        )  # fmt: skip
        run.emit(Launched, launch=launch)
    return run.bundle(fault)


def verdicts(found: Diagnosis) -> dict[Cause, Verdict]:
    return {one.cause: one.verdict for one in found.hypotheses}


def told(text: str, **options: Any) -> dict[Cause, Verdict]:
    return verdicts(diagnose(program(text, **options), allow_source=True))


def test_what_was_in_memory_before_is_not_refuted() -> None:
    found = told(COPY)
    assert {found[cause] for cause in HISTORY} == {Verdict.NOT_TESTED}
    assert {found[cause] for cause in OUTSIDE} == {Verdict.REFUTED}
    first = report_text(diagnose(program(COPY), allow_source=True)).split("\n\n")[0]
    assert "not tested: output not written, uninitialised read: who wrote which element" in first


def test_addresses_from_what_was_not_recorded_are_not_refuted() -> None:
    diagnosis = diagnose(program(TAKE), allow_source=True)
    assert {verdicts(diagnosis)[cause] for cause in OUTSIDE} == {Verdict.INCONCLUSIVE}
    [row] = [one for one in diagnosis.hypotheses if one.cause is Cause.MISSING_MASK]
    assert any("from x, whose contents were not recorded" in text for text in row.evidence)


def test_an_index_that_was_replayed_as_zeros_is_said_first_and_where_it_is_to_be_seen() -> None:
    diagnosis = diagnose(launch_of(TAKE_ENTRY), allow_source=True)
    assert not diagnosis.roots
    assert headline(diagnosis).endswith(
        "; ids of take_entry leads to addresses, and was replayed as zeros"
    )
    text = " ".join(report_text(diagnosis).split())
    assert "400 bytes were not recorded; `hypo guard -- COMMAND` and `hypo check FILE` see" in text
    assert "what it held was not recorded: `hypo guard -- COMMAND` and `hypo check FILE`" in text
    # A finding elsewhere is as sure as ever; one at such an address says so.
    unmasked = TAKE_ENTRY.replace("tl.load(x + at, mask=i < n)", "1.0").replace(
        "o + i, 1.0, mask=i < n", "o + i, 1.0"
    )
    elsewhere = diagnose(launch_of(unmasked), allow_source=True)
    assert [root.zeros for root in elsewhere.roots] == [""]
    beside = TAKE_ENTRY.replace("mask=i < n), mask=i < n)", "mask=i < n))")
    sure = diagnose(launch_of(beside), allow_source=True)
    assert [(root.argument, root.zeros) for root in sure.roots] == [("o", "")]
    behind = TAKE_ENTRY.replace("tl.load(x + at, mask=i < n)", "tl.load(x + at + i)")
    doubtful = diagnose(launch_of(behind), allow_source=True)
    assert [root.zeros for root in doubtful.roots] == ["ids of take_entry"]
    assert headline(doubtful).startswith("ids of take_entry leads to addresses, and was replayed")
    known = diagnose(launch_of(TAKE_ENTRY, [3] * 100), allow_source=True)
    assert "zeros" not in report_text(known)


def test_the_launch_in_which_the_process_died_is_not_refuted() -> None:
    assert {told(COPY, fault=DIED)[cause] for cause in OUTSIDE} == {Verdict.INCONCLUSIVE}


def test_the_mask_of_another_access_of_the_line_is_no_mask() -> None:
    found = diagnose(program(UNMASKED), allow_source=True)
    [root] = found.roots
    assert (root.cause, root.argument, root.expression) == (
        Cause.MISSING_MASK, "x", "tl.load(x + i)",
    )  # fmt: skip
    assert any("element 1000 of 1000: 1 past the last" in t for t in found.hypotheses[0].evidence)


def test_of_equal_launches_that_race_the_first_is_named() -> None:
    [root] = diagnose(program(ADD, num_launches=3), allow_source=True).roots
    assert root.cause is Cause.PROGRAM_RACE
    assert root.place is not None
    assert root.place.step == 1
    assert "atomic" in root.fix


def test_a_defect_that_cannot_have_ended_the_process_is_said_not_to_explain_it() -> None:
    found = diagnose(program(ADD, fault=DIED), allow_source=True)
    assert [root.cause for root in found.roots] == [Cause.PROGRAM_RACE]
    assert found.is_unexplained
    assert report_text(found).startswith("OPEN       what is proven here does not explain this:")
    assert headline(found).startswith("what is proven here does not explain this: crash")
    # What leaves its tensor does explain it, and so may a race the error of a program's own.
    assert not diagnose(program(UNMASKED, fault=DIED), allow_source=True).is_unexplained
    own = FaultRecord(kind="error", message="AssertionError", call="`assert`", is_statement=True)
    assert not diagnose(program(ADD, fault=own), allow_source=True).is_unexplained


def test_two_kernels_with_a_defect_each_are_both_told_in_their_order() -> None:
    run = Run()
    for number, text in enumerate((UNMASKED, UNMASKED.replace("unmasked", "late")), 1):
        names = f"x{number}", f"o{number}"
        for name in names:
            run.tensor(name, "F32", 1000, owner=FOREIGN)
        run.step += 1
        launch = run.launch(
            text.split("def ")[1].split("_kernel")[0],
            {},
            {"x": names[0], "o": names[1], "n": 1000},
            source=text,
            grid=(8,),
            constants={"B": 128},
        )
        run.emit(Launched, launch=launch)
    found = diagnose(run.bundle(ENDED), allow_source=True)
    assert [root.kernel for root in found.roots] == ["unmasked", "late"]
    assert {root.cause for root in found.roots} == {Cause.MISSING_MASK}


def test_the_replay_says_that_it_stopped_at_what_it_proved() -> None:
    found = diagnose(program(UNMASKED), allow_source=True)
    [row] = [one for one in found.hypotheses if one.cause is Cause.PROGRAM_RACE]
    assert row.verdict is Verdict.NOT_TESTED
    assert row.evidence == ("the replay stopped at the first cause that it proved",)


def test_a_bundle_whose_kernels_may_not_run_says_so_first() -> None:
    first = report_text(diagnose(program(UNMASKED))).split("\n\n")[0]
    assert first.startswith("CAUSE      none found, but the kernels were not replayed\n")
    assert "the program's own kernels were not replayed" in first
    assert "--run-sources runs it" in first
    assert "add --good" in first


def test_what_only_the_engine_can_have_is_left_out() -> None:
    found = told(COPY, fault=DIED)
    assert not {Cause.TOKEN_RANGE, Cause.FOREIGN_BLOCK, Cause.MISSING_WAIT} & found.keys()
    diagnosis = diagnose(program(COPY), allow_source=True)
    assert not any("--suspect" in str(text) for text in diagnosis.unseen)


@pytest.mark.parametrize(
    ("body", "follows"),
    [
        ("tl.store(o, tl.load(x))", False),
        ("v = tl.load(x)\n    tl.store(o + v, 1.0)", True),
        ("v = tl.load(x)\n    w = v + 1\n    tl.store(o, 1.0, mask=w > 0)", True),
        ("v = tl.load(x)\n    if v > 0:\n        tl.store(o, 1.0)", True),
        ("for i in range(tl.load(x)):\n        tl.store(o + i, 1.0)", True),
        ("v = helper(x)\n    tl.store(o, v)", True),
        ("v = tl.load(x)\n    tl.store(o, v.to(tl.float32) + tl.exp(v))", False),
    ],
)
def test_what_is_loaded_leads_somewhere_or_not(body: str, follows: bool) -> None:
    text = f"def k(x, o):\n    {body}\n"
    source = SourceRecord(id="1", function="k", file="k.py", first_line=1, text=text)
    assert follows_what_it_loads(source, "x") is follows


def test_a_mask_is_the_accesss_own() -> None:
    assert is_masked("tl.load(x + i, mask=i < n)")
    assert is_masked("tl.load(x + i, i < n, 0.0)")
    assert is_masked("tl.store(o + i, v, i < n)")
    assert not is_masked("tl.load(x + i)")
    assert not is_masked("tl.store(o + mask, v)")


COUNT = """@triton.jit
def count_kernel(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n)
    tl.store(o, tl.load(o) + tl.sum(v))
"""


def test_a_mask_that_was_put_right_is_that_of_its_own_launch() -> None:
    """A race is looked for beside a cause only where the text was put right: not in other kernels.

    What `count` does besides reading too far is told when that is mended.
    """
    run = Run()
    for name in ("x", "o", "y", "total"):
        run.tensor(name, "F32", 1000, owner=FOREIGN)
    # The last launch is looked at first.
    for text, n, x, o in ((COUNT, 1020, "y", "total"), (UNMASKED, 1000, "x", "o")):
        run.step += 1
        launch = run.launch(
            text.split("def ")[1].split("_kernel")[0], {}, {"x": x, "o": o, "n": n},
            source=text, grid=(8,), constants={"B": 128},
        )  # fmt: skip
        run.emit(Launched, launch=launch)
    found = diagnose(run.bundle(ENDED), allow_source=True)
    assert {(root.kernel, root.cause) for root in found.roots} == {
        ("unmasked", Cause.MISSING_MASK), ("count", Cause.BAD_SCALAR),
    }  # fmt: skip


def test_nothing_is_loaded_that_this_packages_own_kernels_need(tmp_path: Path) -> None:
    """Torch and a compiler for the CPU: their import took longer than the diagnosis."""
    save(program(UNMASKED), tmp_path / "bundle")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hypocenter.doctor.doctor import diagnose\n"
        "from hypocenter.record.bundle import load\n"
        "found = diagnose(load(Path(sys.argv[1])), allow_source=True)\n"
        "print(found.roots[0].cause, {'numba', 'torch', 'triton'} & {*sys.modules})\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "bundle")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout.strip() == "missing tail mask {'triton'}"
