"""`hypo guard`: programs as people write them, run with every Triton launch guarded.

Each runs in a process of its own, by Triton's interpreter, beside a twin that is right.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded.bundles import Run

from hypocenter.cli import app
from hypocenter.cli.verbs import guard as verb
from hypocenter.doctor.guard_findings import GuardFinding
from hypocenter.doctor.guard_report import (
    GuardReport,
    UnguardedKernel,
    report_text,
    unseen_rows,
)
from hypocenter.watch.child import Ended

PROGRAMS = Path(__file__).parent / "guarded"


def guard(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `hypo guard WORDS` under Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        app.main(["guard", *words])
    code = left.value.code
    return code if isinstance(code, int) else 0, *capfd.readouterr()


def guarded(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *command: str
) -> tuple[int, dict[str, Any], str]:
    """Exit code, the report of --json, and what the command itself wrote."""
    code, out, err = guard(capfd, monkeypatch, "--json", "--", sys.executable, *command)
    return code, json.loads(out), err


def line_of(script: Path, text: str) -> int:
    [number] = [at for at, line in enumerate(script.read_text().splitlines(), 1) if text in line]
    return number


#: Those whose processes the fast tier starts.
QUICK = ("indexed",)
#: Program to its sites: operation, argument, text in the line, bytes it may name, a value there.
SITES: dict[str, list[tuple[str, str, str, range, dict[str, int]]]] = {
    "silent_store": [
        ("store", "out_ptr", "tl.store(out_ptr", range(2048, 3072, 4), {"row": 8}),
    ],
    "indexed": [
        ("load", "table_ptr", "return tl.load", range(2**35 - 1, 2**35), {"index": 1 << 33}),
    ],
    "overflow": [
        (
            "load", "x_ptr", "x = tl.load(x_ptr + start", range(-(2**31), 0),
            {"stride": 1 << 30},
        ),
    ],
    "between_rows": [
        ("store", "out_ptr", "tl.store(out_ptr", range(256, 2688, 4), {"columns": 64}),
    ],
    "tail": [
        ("store", "y_ptr", "tl.store(y_ptr", range(4000, 4001), {"offsets": 1000}),
        ("load", "x_ptr", "tl.store(y_ptr", range(4000, 4001), {"offsets": 1000}),
    ],
    "listed_pointers": [
        ("atomic_add", "out_ptr", "tl.atomic_add", range(128, 160, 4), {"at": 32}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("program", SITES)
@pytest.mark.tier("sim", fast=lambda case: case.program in QUICK)
def test_what_leaves_its_tensor_is_masked_off_and_told_once_a_site(
    program: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = PROGRAMS / f"{program}.py"
    code, report, err = guarded(capfd, monkeypatch, str(script))
    assert code == 4, err
    found = report["findings"]
    assert len(found) == len(SITES[program])
    for finding, (operation, argument, text, offsets, values) in zip(
        found, SITES[program], strict=True
    ):
        assert (finding["operation"], finding["argument"]) == (operation, argument)
        assert (finding["file"], finding["line"]) == (str(script), line_of(script, text))
        assert finding["byte_offset"] in offsets
        assert finding["is_between"] == (program == "between_rows")
        assert finding["program"] is not None
        assert finding["lane"] is not None
        assert values.items() <= finding["values"].items()
        assert finding["launched_at"].startswith(f"{script}:")
        # Of an index that is too large the product fits its type all the same.
        assert finding["overflow"] == ("int32" if program == "overflow" else "")
    assert "sum" in err, "the program went on to its end"


@pytest.mark.parametrize("program", SITES)
@pytest.mark.tier("sim", fast=lambda case: case.program in QUICK)
def test_a_twin_that_is_right_raises_no_alarm(
    program: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(PROGRAMS / f"{program}.py")
    code, report, err = guarded(capfd, monkeypatch, script, "right")
    assert (code, report["findings"]) == (0, []), err
    assert report["num_guarded"] >= 1
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    plain = subprocess.run(
        [sys.executable, script, "right"], env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert plain.stdout in err, "it computes what it computes without a guard"


@pytest.mark.tier("whole")
def test_a_silent_store_no_longer_reaches_its_neighbour(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = PROGRAMS / "silent_store.py"
    plain = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert plain.stdout == "sum 2304.0 neighbour 2688.0\n"
    code, out, err = guard(capfd, monkeypatch, "--", sys.executable, str(script))
    assert code == 4
    first, *report = out.splitlines()
    assert first == "sum 2304.0 neighbour 0.0"
    assert report[0] == (
        f"{script}:{line_of(script, 'tl.store')}: store of out_ptr in fill_rows, outside its tensor"
    )
    assert "out_ptr is out: F32 of shape (8, 64), strides (64, 1)" in report[4]
    # All programs from the eighth on are wrong, and each in all of its lanes.
    assert report[2].startswith(
        "    in a replay program (8, 0, 0) lane (0) is the first at fault, at "
    )
    assert "row=8" in report[2]
    assert report[3].startswith("    the guard stopped program (11, 0, 0)")
    # The report ends with the summary, which is told once.
    assert report[-1] == "1 wrong access; 3 of 3 launches guarded, in 1 process"
    assert err == "hypo: the command ended with exit code 0\n"


@pytest.mark.tier("sim")
def test_a_call_chain_is_told_from_the_inside_out(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = PROGRAMS / "indexed.py"
    _, report, _ = guarded(capfd, monkeypatch, str(script))
    [finding] = report["findings"]
    assert (finding["kernel"], finding["function"]) == ("embed", "row_of")
    [call] = finding["called_from"]
    assert (call["line"], call["function"]) == (line_of(script, "row = row_of("), "embed")
    assert finding["is_far"], "the offset is larger than a slot can tell"


def test_what_cannot_be_guarded_runs_as_it_is_and_is_listed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = PROGRAMS / "listed_pointers.py"
    _, report, err = guarded(capfd, monkeypatch, str(script))
    [kernel] = report["unguarded"]
    assert (kernel["kernel"], kernel["line"]) == ("add_listed", line_of(script, "total += tl.load"))
    assert "which parameter" in kernel["reason"]
    assert (report["num_launches"], report["num_guarded"]) == (2, 1)
    assert "sum 224.0" in err, "its sums are those of a plain run"


MANY = """
import sys, numpy as np, torch, triton, triton.language as tl
@triton.jit
def pair(x_ptr, y_ptr, bias_ptr, n, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr = 32):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    if HAS_BIAS:
        x += tl.load(bias_ptr + at, mask=at < n, other=0)
    tl.store(y_ptr + at, x, mask=at < n)
@triton.jit
def hooked(x_ptr, n):
    tl.store(x_ptr + n, tl.load(x_ptr + n) + 1)
calls = []
hooked.add_pre_run_hook(lambda *args, **options: calls.append(sorted(options)))
for dtype in (torch.float16, torch.float32, torch.int8, torch.int64, torch.float64):
    x = torch.ones(100).to(dtype)
    y = torch.zeros(100).to(dtype)
    pair[(4,)](x, y, None, 100, HAS_BIAS=False, num_warps=2)
    assert y.sum().item() == 100, y
    pair[4, 1](x_ptr=x, y_ptr=y, bias_ptr=x, n=100, HAS_BIAS=True, BLOCK=64)
    assert y.sum().item() == 200, y
pair[lambda meta: (meta["BLOCK"] // 8,)](triton.reinterpret(torch.ones(100), tl.int32),
                                         triton.reinterpret(y, tl.int32), None, 100, False)
view = torch.ones(8, 100).t()
pair[(25,)](view, torch.zeros(800), None, 799, HAS_BIAS=False)
hooked[(1,)](torch.zeros(4), 3)
assert len(calls) == 1 and not any("guard" in name for name in calls[0]), calls
pair[(0,)](x, y, None, 100, HAS_BIAS=False)
with torch.inference_mode():
    pair[(4,)](x, y, None, 100, HAS_BIAS=False)
print("all well")
"""


def test_launches_of_every_kind_go_on_as_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defaults, None for a pointer, types, options, hooks, reinterpreted and transposed tensors."""
    (tmp_path / "many.py").write_text(MANY)
    code, report, err = guarded(capfd, monkeypatch, str(tmp_path / "many.py"))
    assert (code, report["findings"], report["unguarded"]) == (0, [], []), err
    assert "all well" in err
    assert report["num_guarded"] == report["num_launches"] >= 13


SEVERAL = """
import os, subprocess, sys
if len(sys.argv) > 1:
    import torch, triton, triton.language as tl
    if sys.argv[1] == "wrong":
        torch.inference_mode().__enter__()
    @triton.jit
    def zero(x_ptr, B: tl.constexpr):
        tl.store(x_ptr + tl.arange(0, B), 0.0)
    zero[(1,)](torch.ones(15 if sys.argv[1] == "wrong" else 16), B=16)
    if sys.argv[1] == "dies":
        os.kill(os.getpid(), 9)
else:
    codes = [subprocess.run([sys.executable, __file__, kind]).returncode
             for kind in ("wrong", "wrong", "right", "dies")]
    print(codes)
    sys.exit(7)
"""


@pytest.mark.tier("sim")
def test_all_processes_below_the_command_are_guarded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "several.py").write_text(SEVERAL)
    code, report, err = guarded(capfd, monkeypatch, str(tmp_path / "several.py"))
    assert "[0, 0, 0, -9]" in err
    assert (code, report["exit_code"], report["num_processes"]) == (4, 7, 4)
    [finding] = report["findings"]
    assert (finding["element"], finding["extent_bytes"]) == (15, 60)


def test_an_offset_that_left_its_type_is_told_as_an_overflow() -> None:
    plain = GuardFinding(
        kernel="k", operation="load", argument="x_ptr", file="rows.py", line=19, function="k",
        expression="tl.load(x_ptr + start)", called_from=(), program=(2, 0, 0),
        byte_offset=-2147483648, is_far=False, is_null=False, element=-2147483648,
    )  # fmt: skip
    report = GuardReport(
        command=("true",), exit_code=0, signal=None, findings=(plain,), unguarded=(),
        num_launches=1, num_guarded=1, num_processes=1,
    )  # fmt: skip
    assert "overflows" not in report_text(report)
    found = msgspec.structs.replace(
        plain, overflow="int32", overflows_at=("rows.py:18", "row * stride")
    )
    told = report_text(msgspec.structs.replace(report, findings=(found,)))
    assert "row * stride (rows.py:18) overflows int32" in told


def test_a_clean_run_has_its_summary_once(capfd: pytest.CaptureFixture[str]) -> None:
    ended = Ended(("true",), 1, 0, None, "", started=0.0, ended=1.0, since=0.0)
    clean = GuardReport(
        command=("true",), exit_code=0, signal=None, findings=(), unguarded=(), num_launches=3,
        num_guarded=3, num_processes=1,
    )  # fmt: skip
    verb._leave(clean, ended)
    told = "hypo: the command ended with exit code 0"
    assert capfd.readouterr().err == (
        f"{told}; 0 wrong accesses; 3 of 3 launches guarded, in 1 process\n"
    )
    plain = UnguardedKernel(kernel="k", reason="why", file="", line=0, expression="")
    listed = msgspec.structs.replace(clean, unguarded=(plain,))
    verb._leave(listed, ended)  # its report, on stdout, ends with the summary
    assert capfd.readouterr().err == f"{told}\n"
    assert report_text(listed).splitlines()[-1].startswith("0 wrong accesses")


def test_without_a_finding_the_code_is_that_of_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = SEVERAL.replace('("wrong", "wrong", "right", "dies")', '("right",)')
    (tmp_path / "right.py").write_text(right)
    assert guarded(capfd, monkeypatch, str(tmp_path / "right.py"))[0] == 7
    code, out, err = guard(capfd, monkeypatch, "--", "sh", "-c", "exit 0")
    assert (code, out) == (1, "")
    assert err == (
        "hypo: the command ended with exit code 0; no Triton launch was seen, so nothing was "
        "guarded\n"
    )
    code, _, err = guard(capfd, monkeypatch, "--", "sh", "-c", "kill -9 $$")
    assert code == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "put the command behind --"),
        (("python", "x.py"), "put the command behind --"),
        (("--",), "no command stands behind --"),
        (("--", "run", "-p", "x"), "--launch-mode guarded"),
        (("--", "hypo", "run"), "--launch-mode guarded"),
    ],
)
def test_what_cannot_be_guarded_is_refused(
    words: tuple[str, ...],
    said: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, _, err = guard(capfd, monkeypatch, *words)
    assert code == 2
    assert said in err


def test_a_switched_off_recorder_is_told(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPO_RECORD", "0")
    code, _, err = guard(capfd, monkeypatch, "--", "true")
    assert code == 2
    assert "HYPO_RECORD=0" in err


def test_the_views_whose_rows_the_guard_does_not_know_are_listed() -> None:
    run = Run()
    packed = run.tensor("packed", "F32", 4, 6)
    columns = run.tensor("columns", "F32", 4, 6, strides=(1, 4))
    rows = run.tensor("rows", "F32", 5, 6, 16, strides=(160, 16, 1))
    view = run.tensor("q", "F32", 5, 4, 16, strides=(320, 40, 1))
    assert unseen_rows([packed, columns, rows]) == ()
    [gap] = unseen_rows([packed, view, columns, view])
    assert gap.what == "what lies between the rows of q"
    assert "hypo check" in gap.reason
