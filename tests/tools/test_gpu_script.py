"""scripts/gpu without a GPU: it says what it would run, keeps sections apart, sees wrong ops."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from repository import ROOT

from hypocenter.base.tensor import DType

pytest.importorskip("torch")


def script(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts/gpu", *arguments], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHON": sys.executable, **environ},
    )  # fmt: skip


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of `benchmarks/` by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_the_dry_run_names_each_section_and_what_it_misses(tmp_path: Path) -> None:
    # A package that is broken counts as missing, with its reason.
    (tmp_path / "triton.py").write_text("raise RuntimeError('no driver for you')\n")
    done = script("--dry-run", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    states = {line.split()[0]: line for line in done.stdout.splitlines() if " up to " in line}
    names = "environment ops families decode rows overhead guard tests marks faults"
    assert list(states) == names.split()
    assert "ready" in states["environment"]
    assert "not present" in states["ops"]
    assert "needs triton: RuntimeError: no driver for you" in done.stdout
    assert "test_gpu_backend.py" in done.stdout


def test_a_family_that_is_wrong_or_left_out_fails_its_section(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    families = benchmarks("gpu_families")
    right = families.examine("llama", "cpu")
    assert max(right["prompt"], right["decode"]) < families.TOLERANCE
    rows = {
        name: {**right, "family": name}
        for name in importlib.import_module("models.family_table").FAMILIES
    }

    def told(**changed: dict[str, Any]) -> dict[str, Any]:
        kept = {**rows, **changed}
        monkeypatch.setattr(families, "_rows", lambda *_: iter(filter(None, kept.values())))
        report: dict[str, Any] = families.run("cpu")
        return report

    assert told()["ok"]
    absent = told(llama={"family": "llama", "absent": "no such class"})
    assert absent["ok"]
    assert absent["absent"] == ["llama"]
    for wrong in ({**right, "decode": 1e-4}, {"family": "llama", "problem": "ValueError: no"}):
        report = told(llama=wrong)
        assert not report["ok"]
        assert report["wrong"] == [wrong]
    assert not told(llama={})["ok"], "time ran out before it"


def test_a_family_whose_norm_has_no_groups_needs_a_newer_transformers(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    granite = importlib.import_module(
        "transformers.models.granitemoehybrid.modeling_granitemoehybrid"
    )

    class GraniteMoeHybridRMSNormGated(granite.GraniteMoeHybridRMSNormGated):  # type: ignore
        def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
            super().__init__(hidden_size, hidden_size, eps)

    families = benchmarks("gpu_families")
    monkeypatch.setattr(granite, "GraniteMoeHybridRMSNormGated", GraniteMoeHybridRMSNormGated)
    row = families.examine("granitehybrid", "cpu")
    assert row["absent"] == "GraniteMoeHybridRMSNormGated has no groups"
    assert "needs a newer transformers" in "\n".join(families._table([row]))
    # Only a model that has groups needs them.
    families._require_norm_of_groups("granitehybrid-moe")
    monkeypatch.undo()
    families._require_norm_of_groups("granitehybrid")


def test_a_failed_section_does_not_stop_the_others(tmp_path: Path) -> None:
    import torch

    wrong = "cuda" if torch.version.hip else "hip"
    done = script("--device", wrong, "--only", "environment,marks", "--out", str(tmp_path))
    assert done.returncode == 1
    (path,) = tmp_path.glob("gpu-*.json")
    report = json.loads(path.read_text())
    sections = report["sections"]
    assert list(sections) == ["environment", "marks"]
    assert sections["environment"]["status"] == "failed"
    assert "build, but torch" in sections["environment"]["problem"]
    assert str(ROOT) not in path.read_text()


def test_a_child_that_dies_or_hangs_is_reported(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = benchmarks("gpu")
    section = gpu.SECTIONS[0]
    code = "import os; print('last words', flush=True); os.abort()"
    real = subprocess.run

    def run(program: str) -> Any:
        def child(command: list[str], **keywords: Any) -> Any:
            return real([sys.executable, "-c", program], **keywords)

        return child

    monkeypatch.setattr(gpu.subprocess, "run", run(code))
    result = gpu._run_apart(section, "cuda", 20)
    assert (result["status"], result["ok"], result["exit_code"]) == ("failed", False, -6)
    assert "last words" in result["output"]
    monkeypatch.setattr(gpu.subprocess, "run", run("import time; time.sleep(60)"))
    result = gpu._run_apart(section, "cuda", 0.5)
    assert (result["status"], result["ok"]) == ("timed out", False)


def test_sections_that_are_not_there_do_not_fail_the_run_and_an_empty_run_does(
    benchmarks: Any, tmp_path: Path
) -> None:
    gpu = benchmarks("gpu")
    report = gpu._Report(tmp_path, "cuda:1")
    report.add("marks", {"status": "not present"})
    assert report.exit_code == 1
    report.add("environment", {"status": "done", "ok": True, "product": "NVIDIA H200"})
    assert report.exit_code == 0
    assert report.path.name.startswith("gpu-nvidia-h200-")
    report.add("ops", {"status": "timed out", "ok": False})
    assert report.exit_code == 1


def test_ops_are_checked_and_a_wrong_result_is_seen(benchmarks: Any) -> None:
    """On the CPU, through the same door."""
    ops = benchmarks("gpu_ops")
    make = ops._Make("cpu")
    for case in (make.rope("neox", 20, 12), make.gather(), make.linear(DType.Q4_K, 2, 70)):
        share, problem = ops.check(case, "cpu")
        assert (share <= 1, problem) == (True, "")
    case = make.rope("neox", 20, 12)
    share, problem = ops.check(replace(case, exact=case.wrong, wrong=None), "cpu")
    assert share > 1
    assert "x the bound" in problem
    weak = replace(make.rope("neox", 20, 12), bound=1e6)
    assert "planted fault" in ops.check(weak, "cpu")[1]
    undefined = replace(make.gather(), exact=np.full((3, 192), np.nan))
    assert ops.check(undefined, "cpu")[1]


def test_victims_of_a_real_gpu_are_right_or_the_section_fails(benchmarks: Any) -> None:
    from faults.row import Platform, Role, Row

    section = benchmarks("gpu_faults")
    named = Row(
        collection="victims", name="nan_weight", platform=Platform.CARD, role=Role.FAULT,
        says="right",
    )  # fmt: skip
    twin = msgspec.structs.replace(named, role=Role.TWIN, says="")
    rows = [named, twin] * section.FEWEST
    assert section.summary(rows)["ok"]
    assert not section.summary(rows[2:])["ok"]
    assert not section.summary([*rows, msgspec.structs.replace(named, says="vague")])["ok"]
    alarm = msgspec.structs.replace(twin, roots=[{"cause": "stale slot"}])
    found = section.summary([*rows, alarm])
    assert (found["ok"], found["counts"]["alarms"]) == (False, 1)


#: Foreign programs under `hypo guard`, and kernels plain and guarded, with Triton's interpreter.
GUARD = """
import json, sys
sys.path[:0] = ["benchmarks", "tests/support", "src"]
import gpu_guard
tail = gpu_guard.TWINS / "tail.py"
truth = gpu_guard.WITH_TWIN["tail"]
rows = [gpu_guard.examine(tail, ("cpu",), truth),
        gpu_guard.examine(tail, ("cpu", "right"), gpu_guard.Leaves()),
        gpu_guard.examine(tail, ("cpu",), gpu_guard.Leaves()),
        gpu_guard.examine(tail, ("cpu", "right"), truth)]
kernels = list(gpu_guard.costs("cpu", 1024, lambda launch: 1.0))
print(json.dumps([rows, kernels, [*gpu_guard.table(rows), *gpu_guard.cost_table(kernels)]]))
"""


def test_programs_under_guard_are_judged_and_kernels_compared() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GUARD], cwd=ROOT, capture_output=True, text=True, timeout=100,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, kernels, table = json.loads(done.stdout)
    assert [row["is_right"] for row in rows] == [True, True, False, False], rows
    assert rows[2]["wrong"] == ["a line is told that is right", "hypo guard ended with exit code 4"]
    assert rows[3]["wrong"] == ["a line at fault is not told", "hypo guard ended with exit code 0"]
    names = ["add", "softmax", "layer_norm", "gather", "matmul"]
    assert [(row["kernel"], row["is_right"]) for row in kernels] == [(n, True) for n in names]
    assert len(table) == 1 + len(rows) + 1 + len(kernels)


def test_programs_of_the_guard_are_there(benchmarks: Any) -> None:
    guard = benchmarks("gpu_guard")
    for folder, truths in ((guard.TWINS, guard.WITH_TWIN), (guard.PROGRAMS, guard.BREAKING)):
        for name, truth in truths.items():
            text = (folder / f"{name}.py").read_text()
            assert all(part in text for part in truth.texts), name
    assert {path.stem for path in guard.TWINS.glob("*.py")} == guard.WITH_TWIN.keys()
