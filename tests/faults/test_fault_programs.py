"""Programs with a fault: each says what is right about it, and the doctor never sees that."""

from __future__ import annotations

import ast
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faults.program import FOLDER, Program, interpreter_problem, programs, read
from faults.report import lost_of, with_edits
from faults.row import Again, Platform, Role
from faults.table import table
from hypocenter.doctor.causes import Cause

ALL = programs()


def named(name: str) -> Program:
    [found] = [one for one in ALL if one.name == name and one.collection != "victims"]
    return found


def is_right(again: Again | None) -> bool:
    assert again is not None
    return again.is_right


def test_each_truth_is_about_its_program() -> None:
    for one in ALL:
        assert set(one.truth.causes) <= set(Cause), one.name
        for text in one.truth.lines:
            assert text in one.text, (one.name, text)
        assert "# ///" not in one.text, one.name
        ast.parse(one.text)
        assert one.has_twin or one.is_healthy or one.collection == "gpu", one.name
        if one.fix_old:
            assert one.text.count(one.fix_old) == 1, one.name
            ast.parse(one.text.replace(one.fix_old, one.fix_new))


def test_there_are_enough_of_each_collection() -> None:
    sizes = {kind: sum(one.collection == kind for one in ALL) for kind in (
        "programs", "written", "gpu", "healthy",
    )}  # fmt: skip
    assert sizes["programs"] >= 101
    assert (sizes["written"], sizes["gpu"], sizes["healthy"]) >= (34, 24, 46)
    assert all(Platform.CARD in one.platforms for one in ALL)


def test_a_truth_that_is_none_is_refused(tmp_path: Path) -> None:
    for text, why in (
        ("x = 1\n# /// truth\n# causes = []\n", "does not end"),
        ("x = 1\n# /// truth\ncauses = []\n# ///\n", "no comment"),
        ("x = 1\n# /// truth\n# cause = []\n# ///\n", "'cause' is no word of a truth"),
    ):
        (tmp_path / "a.py").write_text(text)
        with pytest.raises(ValueError, match=why):
            read(tmp_path / "a.py", tmp_path)


def test_a_new_program_is_one_file(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "programs")
    text = (FOLDER / "padded_expert.py").read_text()
    (tmp_path / "programs" / "planted_expert.py").write_text(text)
    before, after = programs(FOLDER), programs(tmp_path / "programs")
    [new] = {one.name for one in after} - {one.name for one in before}
    [planted] = [one for one in after if one.name == new]
    assert (planted.truth, planted.collection) == (named("padded_expert").truth, "programs")
    root = {
        "cause": "index out of range", "kernel": "count_experts", "argument": "experts_ptr",
        "file": "planted_expert.py", "line": 1, "fix": "Keep experts inside 0 to 8",
    }  # fmt: skip
    [(_, line)] = planted.truth.places("", planted.text)
    assert planted.verdict([root | {"line": line}]).says == "right"
    assert planted.verdict([root]).says == "false"


def test_a_line_of_a_file_that_the_program_wrote_for_a_compiler_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = named("cuda_tail")
    file = tmp_path / "490a801c8c57e29d.cu"
    file.write_text(case.text.partition('r"""')[2].partition('"""')[0])
    [(_, line)] = case.truth.places("", file.read_text())
    root = {
        "cause": "missing tail mask", "kernel": "scale", "argument": "parameter 0",
        "file": str(file), "line": line, "fix": "Bound i: i < n",
    }  # fmt: skip
    assert case.verdict([root]).says == "right"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert case.verdict([root | {"file": f"~/{file.name}"}]).says == "right"
    culprit = {"place": f"{file}:{line + 1}"}
    assert case.verdict([root | {"line": line + 1, "culprit": culprit}]).says == "false"
    file.write_text(file.read_text() + "// of somebody else\n")
    assert case.verdict([root]).says == "vague"


def test_a_fix_is_put_into_the_text(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def f():\n    x = 1\n    y = 2\n")
    edit = {"file": "/where/it/was/a.py", "line": 2, "old": "x = 1", "new": "x = 3"}
    assert with_edits(file, [edit]) == "def f():\n    x = 3\n    y = 2\n"
    assert with_edits(file, []) is None
    for other in ({"file": "b.py"}, {"line": 9}, {"old": "x = 2"}, {"name": "grid"}):
        assert with_edits(file, [edit | other]) is None


def test_a_launch_that_was_lost_is_read_from_the_report() -> None:
    lost = '{"kind": "launch not recorded", "what": "2 launches of k", "reason": "not recorded: x"}'
    other = '{"kind": "not recorded", "what": "a GPU", "reason": ""}'
    report = f'{{"roots": [], "unseen": [{other}, {lost}]}}'
    assert lost_of(report) == ["2 launches of k: not recorded: x"]
    assert lost_of("") == []


@pytest.mark.tier("tools")
def test_a_program_and_its_twin_are_run_and_told(tmp_path: Path) -> None:
    one = named("padded_expert")
    fault, twin = one.run(Platform.CPU, tmp_path)
    assert (fault.role, fault.says, fault.exit_code, fault.is_as_wanted) == (
        Role.FAULT, "right", 3, True,
    )  # fmt: skip
    assert (twin.role, twin.exit_code, twin.is_alarm, twin.is_as_wanted) == (
        Role.TWIN, 0, False, True,
    )  # fmt: skip
    assert "truth" not in (tmp_path / one.name / "program" / one.file.name).read_text()
    assert list(table([fault, twin]))[1].split()[:5] == ["programs", "cpu", "1", "1", "0"]
    assert is_right(one.named_again(tmp_path, ()))
    assert not is_right(one.named_again(tmp_path, ("replay",)))
    assert one.named_again(tmp_path / "elsewhere", ()) is None


@pytest.mark.parametrize(
    ("counts", "numpy", "is_refused"),
    [
        ("lambda self: int(self.handle.data))", "2.4.6", True),
        ("lambda self: int(self.handle.data))", "3.0.0", True),
        ("lambda self: int(self.handle.data))", "2.3.5", False),
        ("lambda self: int(self.handle.data.squeeze()))", "2.4.6", False),
    ],
)
def test_an_interpreter_that_cannot_count_loops_is_refused(
    counts: str, numpy: str, is_refused: bool
) -> None:
    """As Triton 3.6 and 3.8 have it; all programs with such a loop fail in the first one."""
    text = f'    scope.set_attr(tensor, "__index__", {counts}'
    problem = interpreter_problem(text, numpy)
    assert ("NumPy" in problem) is is_refused
    assert bool(problem) is is_refused


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_healthy_run_of_which_nothing_is_recorded_is_no_good_result(
    is_recorded: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Inductor's kernels are C++ on a CPU. There the doctor examined nothing, and must say so."""
    program = replace(named("compiled_embedding"), is_recorded_on_cpu=is_recorded)
    assert not named("compiled_embedding").is_recorded_on_cpu
    code = 0

    def run(command: list[str], folder: Path, options: object, environment: object) -> Any:
        return code, "", ""

    monkeypatch.setattr("faults.program.run_doctor", run)
    for code in (0, 1):
        row = program._healthy(Platform.CPU, tmp_path / f"cpu-{code}", Role.TWIN)
        assert row.is_alarm == (code != (0 if is_recorded else 1))
        row = program._healthy(Platform.CARD, tmp_path / f"card-{code}", Role.TWIN)
        assert row.is_alarm == (code != 0)
