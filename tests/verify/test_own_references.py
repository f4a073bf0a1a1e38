"""`hypo verify FILE.py`: bounds by types and lengths, shrinking, whole files, the pytest plugin."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from hypocenter.verify.outcome import StageVerdict
from hypocenter.verify.own.file import require_right, verify_file, write_tests
from hypocenter.verify.own.launches import shrink
from hypocenter.verify.own.numbers import BadReference, hold
from hypocenter.verify.own.reference import Reference, python_function, reference

torch = pytest.importorskip("torch")
ROW_SUMS = ROOT / "examples" / "row_sums.py"


def product(x: Any, w: Any, **_: Any) -> Mapping[str, Any]:
    return {"out": x @ w.T}


def made(function: Any, sums: int | str = 1, rounds_to: str = "fp32") -> Reference:
    return Reference(function, None, sums, rounds_to, None, None)


@pytest.mark.parametrize(("dtype", "rounds_to"), [("float32", "fp32"), ("float16", "fp16")])
def test_a_right_product_is_within_its_bound_and_a_column_less_is_not(
    dtype: str, rounds_to: str
) -> None:
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 64, generator=generator).to(kind) for n in (3, 5))
    arguments = {"x": x, "w": w, "K": 64}
    right = (x.float() @ w.float().T).to(kind)
    (held,) = hold(made(product, "K", rounds_to), arguments, {"out": right})
    assert held.share <= 1
    short = (x.float()[:, :63] @ w.float()[:, :63].T).to(kind)
    (held,) = hold(made(product, "K", rounds_to), arguments, {"out": short})
    assert held.share > 1
    assert len(held.place) == 2


def test_sums_that_cancel_are_judged_by_what_was_added() -> None:
    x = torch.tensor([[1e6, -1e6, 1.0]])
    (held,) = hold(
        made(lambda x, n: {"out": x.sum(dim=1)}, "n"),
        {"x": x, "n": 3},
        {"out": torch.tensor([0.9])},
    )
    assert held.share <= 1, "f32 has no more digits there"


def test_a_reference_that_says_too_little_is_refused() -> None:
    x = torch.ones(2, 3)
    for function, sums, message in (
        (lambda x: x, 1, "by name"),
        (lambda x: {"y": x}, 1, "no tensor of the launch"),
        (lambda x: {"out": x[0]}, 1, r"out is \[3\]"),
        (lambda x: {"out": x}, "K", "no number of the launch"),
    ):
        with pytest.raises(BadReference, match=message):
            hold(made(function, sums), {"x": x}, {"out": x})


def test_a_schema_needs_a_grid() -> None:
    with pytest.raises(ValueError, match="belong together"):
        reference(product, draw={"n": (1,)})
    with pytest.raises(ValueError, match="rounds_to"):
        reference(product, rounds_to="fp8")
    assert python_function(product) is product


def test_the_smallest_launch_that_is_wrong_is_found() -> None:
    tried: list[dict[str, int]] = []

    def is_wrong(numbers: dict[str, int]) -> bool:
        tried.append(numbers)
        return numbers["n"] >= 5 and numbers["BLOCK"] >= 32

    found = shrink({"m": 9, "n": 100, "BLOCK": 128}, {"BLOCK": (16, 32, 128)}, is_wrong)
    assert found == {"m": 1, "n": 5, "BLOCK": 32}
    assert {item["BLOCK"] for item in tried} <= {16, 32, 128}


@pytest.mark.tier("sim")
def test_a_file_is_verified_and_its_smallest_failure_is_a_test(tmp_path: Path) -> None:
    outcome, report = verify_file(ROW_SUMS, "sm_90", 60.0)
    right, wrong = outcome.stages
    assert (right.name, right.verdict, right.num_covered) == ("row_sums", StageVerdict.RIGHT, 7)
    assert (wrong.name, wrong.verdict) == ("short_sums", StageVerdict.WRONG)
    assert report.smallest == {"short_sums": {"m": 1, "n": 4, "BLOCK": 64}}
    (written,) = write_tests(ROW_SUMS, report, tmp_path)
    done = _pytest(tmp_path, written.name)
    assert done.returncode == 1, done.stdout
    assert "out_ptr[0] is" in done.stdout
    require_right(str(ROW_SUMS), "row_sums", {"m": 1, "n": 4, "BLOCK": 64})


TESTS = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import torch
from row_sums import row_sums, short_sums

def launch(kernel):
    x, out = torch.randn(2, 8, device="cuda"), torch.empty(2, device="cuda")
    kernel[(2,)](x, out, 2, 8, BLOCK=16)

def test_right(): launch(row_sums)
def test_wrong(): launch(short_sums)
"""


@pytest.mark.tier("sim")
def test_the_plugin_fails_tests_whose_launches_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "test_kernels.py").write_text(TESTS)
    # Once: an installed package has it by an entry point, a path to the sources does not.
    plugin = ("-p", "no:hypocenter", "-p", "hypocenter.verify.own.pytest_plugin")
    done = _pytest(tmp_path, *plugin, "--hypo-check")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "short_sums(x_ptr=float32[2, 8]" in done.stdout


def _pytest(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
