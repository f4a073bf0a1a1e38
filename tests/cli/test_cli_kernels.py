"""`hypo kernels`: table, JSON, exit codes, and workers whose compiler dies or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from outside.terminal import lines_without_progress
from repository import SUPPORT

from hypocenter.base.errors import HypoError, UsageError
from hypocenter.base.package import module_command
from hypocenter.check import compile_pool
from hypocenter.check.compile_worker import Listed
from hypocenter.cli import app
from hypocenter.cli.verbs import kernels
from hypocenter.device.limits import TABLE, named_archs
from hypocenter.device.offline.compiled import CompiledKernel

HERE = Path(__file__).parent


@pytest.fixture
def kernels_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of `gpu_specimens.py` in place of the project's."""
    monkeypatch.setattr(kernels, "OWN_KERNELS", "kernels_worker")
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{SUPPORT}")


def _hypo(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        app.main(["kernels", *arguments])
    out, err = capfd.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


@pytest.mark.usefixtures("kernels_of_tests")
def test_json_is_a_list_of_rows(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = _hypo(capfd, "--arch", "gfx942,sm_90", "--json", "--kernel", "copy_kernel")
    rows = json.loads(out)
    assert code == 0
    assert "something that a compiler says" not in out + err
    assert [(row["kernel"], row["arch"]) for row in rows] == [
        ("copy_kernel", "gfx942"), ("copy_kernel", "sm_90"),
    ]  # fmt: skip
    for row in rows:
        assert row["ok"] is True
        assert row["registers"] > 0
        assert row["spills"] == 0
        assert row["shared_bytes"] == 0
        assert row["shared_limit"] == TABLE[row["arch"]].shared_limit_bytes
        assert "128" in row["loads"]


@pytest.mark.usefixtures("kernels_of_tests")
def test_a_kernel_that_would_not_launch_fails_the_gate(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = _hypo(capfd, "--arch", "h200,gfx1100")
    assert code == 4
    bad = "refused_kernel (sm_90, gfx1100)"
    assert f"hypo: 2 of 8 builds would not launch: {bad}\n" in err
    assert f"hypo: {kernels.LEGEND}\n" in err
    blocks = dict(block.split("\n", 1) for block in out.strip().split("\n\n"))
    assert list(blocks) == ["copy_kernel", "product_kernel", "hoard_kernel", "refused_kernel"]
    assert "! does not compile: CompileTimeAssertionFailure" in blocks["refused_kernel"]
    assert "!" not in blocks["copy_kernel"]
    header, first, second = blocks["product_kernel"].splitlines()
    columns = "arch registers spills shared memory occupancy loads stores"
    assert header.split() == columns.split()
    assert first.split()[0] == "sm_90"
    assert second.split()[0] == "gfx1100"
    assert "/232448 " in first
    assert "12x128" in first


@pytest.mark.usefixtures("kernels_of_tests")
def test_a_compiler_that_dies_costs_one_record(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_DIES_AT", "product_kernel")
    code, out, _ = _hypo(capfd, "--arch", "gfx942", "--json")
    rows = {row["kernel"]: row for row in json.loads(out)}
    assert code == 4
    assert rows["product_kernel"]["problems"] == [
        "does not compile: the compiler ended with SIGABRT: LLVM ERROR: Cannot select: intrinsic"
    ]
    assert rows["product_kernel"]["threads"] == 256
    assert (rows["copy_kernel"]["ok"], rows["hoard_kernel"]["ok"]) == (True, True)


@pytest.mark.usefixtures("kernels_of_tests")
def test_a_compiler_that_hangs_costs_one_record(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_HANGS_AT", "copy_kernel")
    monkeypatch.setattr(compile_pool, "COMPILE_SECONDS", 0.5)
    code, out, _ = _hypo(capfd, "--arch", "gfx942", "--json", "--kernel", "copy_kernel")
    assert code == 4
    problem = "does not compile: the compiler did not answer in time"
    assert json.loads(out)[0]["problems"] == [problem]


def test_an_unknown_architecture_is_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = _hypo(capfd, "--arch", "gfx943,sm_90")
    assert (code, out) == (2, "")
    assert err == "hypo: no GPU architecture or product 'gfx943'; did you mean gfx942?\n"


@pytest.mark.usefixtures("kernels_of_tests")
def test_an_unknown_kernel_is_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = _hypo(capfd, "--kernel", "copy_kernal")
    assert (code, out) == (2, "")
    assert lines_without_progress(err) == [
        "hypo: no kernel 'copy_kernal'; did you mean copy_kernel?"
    ]


def test_archs_are_names_products_or_all() -> None:
    assert named_archs("all") == list(TABLE)
    assert named_archs("mi300x, gfx942,H200") == ["gfx942", "sm_90"]
    with pytest.raises(UsageError, match="--arch is ','; give names between commas, or all"):
        named_archs(",")


def test_without_triton_one_line_says_what_to_install(tmp_path: Path) -> None:
    # A folder before site-packages in which `import triton` fails as when it is not installed.
    (tmp_path / "triton.py").write_text("raise ModuleNotFoundError(\"No module named 'triton'\")\n")
    done = subprocess.run(
        [sys.executable, "-m", "hypocenter", "kernels"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    # On a busy machine a line of progress may stand before it.
    assert len([line for line in done.stderr.splitlines() if "collecting" not in line]) == 1
    assert "needs triton" in done.stderr
    assert "pip install triton" in done.stderr


def test_a_worker_that_cannot_start_is_an_error() -> None:
    with (
        compile_pool.Worker(module_command("hypocenter.no_such_module")) as worker,
        pytest.raises(HypoError, match=r"ended with exit code 1: .*No module named"),
    ):
        worker.start()


USERS_FILE = """
import sys
import torch, triton, triton.language as tl

@triton.jit
def double_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < count) * 2, mask=at < count)

@triton.autotune([triton.Config({"BLOCK": 64}, num_warps=2),
                  triton.Config({"BLOCK": 1024}, num_warps=32)], key=["count"])
@triton.jit
def tuned_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < count) * 2, mask=at < count)

print("a line of the file's own")
x = torch.ones(1024, device="cuda")
y = torch.zeros_like(x)
for _ in range(3):
    double_kernel[(1,)](x, y, 1024, BLOCK=1024)
assert y.sum().item() == 2048
double_kernel[(1,)](x.half(), y.half(), 1024, BLOCK=1024, num_warps=8)
if torch.cuda.get_device_capability() == (9, 4):
    tuned_kernel[lambda meta: (1024 // meta["BLOCK"],)](x, y, 1024)
assert len(sys.argv) == 1
"""


def test_the_launches_of_a_file_are_compiled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "launches.py"
    path.write_text(USERS_FILE)
    code, out, err = _hypo(capfd, str(path), "--arch", "gfx942", "--json")
    rows = json.loads(out)
    assert [(row["kernel"], row["label"], row["threads"], row["ok"]) for row in rows] == [
        ("double_kernel", "*fp32 *fp32 BLOCK=1024", 256, True),
        ("double_kernel", "*fp16 *fp16 BLOCK=1024 num_warps=8", 512, True),
        ("tuned_kernel", "*fp32 *fp32 BLOCK=64 num_warps=2 num_stages=3", 128, True),
        ("tuned_kernel", "*fp32 *fp32 BLOCK=1024 num_warps=32 num_stages=3", 2048, False),
    ]
    assert code == 4
    assert "ended early" not in err


@pytest.mark.tier("sim")
def test_a_file_that_fails_shows_what_it_launched_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "launches.py"
    path.write_text(f"{USERS_FILE}\nraise ValueError('no more')\n")
    code, out, err = _hypo(capfd, str(path), "--arch", "gfx1100", "--json")
    assert (code, len(json.loads(out))) == (0, 2)
    assert "launches.py ended early, so launches may be missing: ValueError: no more" in err


@pytest.mark.parametrize(("text", "code", "message"), [
    ("import torch", 2, "there are no kernels: the file launches none"),
    ("1 / 0", 1, "empty.py ended before its first launch: ZeroDivisionError: division by zero"),
    (None, 2, "empty.py: no such file"),
])  # fmt: skip
@pytest.mark.tier("whole", fast=lambda case: case.text is None)
def test_a_file_without_launches_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str | None, code: int, message: str
) -> None:
    path = tmp_path / "empty.py"
    if text is not None:
        path.write_text(text)
    found, out, err = _hypo(capfd, str(path), "--arch", "sm_80")
    assert (found, out) == (code, "")
    assert message in err.splitlines()[-1]


RECORD: dict[str, Any] = {
    "kernel": "rope", "label": "neox", "arch": "gfx942", "guarded": True, "ok": True,
    "problems": (), "threads": 256, "shared_limit": 65536, "registers": 64, "spills": 3,
    "scratch_bytes": 12, "shared_bytes": 1024, "occupancy": 0.5, "waves_per_simd": 4.0,
    "max_waves_per_simd": 8, "limited_by": "registers", "loads": {128: 12, 32: 3}, "stores": {},
}  # fmt: skip


def test_the_table_shows_what_the_record_holds() -> None:
    lines = kernels.table([CompiledKernel(**RECORD)]).splitlines()
    assert lines[0] == "rope (neox) guarded"
    cells = [cell for cell in lines[2].split("  ") if cell]
    assert [cell.strip() for cell in cells] == [
        "gfx942", "64", "3", "1024/65536", "50%, registers", "12x128 3x32", "-",
    ]  # fmt: skip


def test_the_table_says_what_is_wrong_and_what_is_slow() -> None:
    slow = CompiledKernel(**RECORD)
    broken = CompiledKernel(**{**RECORD, "ok": False, "problems": ("too big",), "spills": 0})
    remarks = [line for line in kernels.table([slow, broken]).splitlines() if line[4] in "!~"]
    assert remarks == [
        "    ~ 3 registers of each thread live in memory; use smaller tiles or more warps",
        "    ! too big",
    ]


def test_the_summary_names_the_kernels() -> None:
    fine = CompiledKernel(**{**RECORD, "spills": 0})
    assert kernels.summary([fine]) == ["all 1 builds of 1 kernel for 1 architecture would launch"]
    bad = msgspec.structs.replace(fine, kernel="gate", arch="sm_80", ok=False)
    slow = msgspec.structs.replace(fine, kernel="attention", spills=3)
    assert kernels.summary([fine, bad, slow]) == [
        "1 of 3 builds would not launch: gate (sm_80)",
        "1 of 3 builds spill registers: attention (gfx942)",
    ]


def test_a_kernel_goes_by_the_name_that_logs_show() -> None:
    listed = [Listed("gate_kernel", "", 4), Listed("rope_kernel", "", 4)]
    assert kernels.choose(listed, "rope") == kernels.choose(listed, "rope_kernel") == [1]


def test_a_target_gets_its_vendors_forms() -> None:
    listed = [Listed("a", "", 4), Listed("b", "", 8, "amd"), Listed("b", "", 2, "nvidia")]
    jobs = kernels.jobs_of(listed, [0, 1, 2], ["gfx942", "sm_90"], guarded=False)
    found = [(job.index, job.arch) for job in jobs]
    assert found == [(0, "gfx942"), (0, "sm_90"), (1, "gfx942"), (2, "sm_90")]
