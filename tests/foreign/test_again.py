"""`hypo doctor --again`: a command is run in one way after another until a cause is proven."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded.bundles import Run

from hypocenter.cli import app
from hypocenter.cli.escalation import (
    BLOCKING,
    WATCHED,
    Escalation,
    ExaminedRun,
    Way,
    _has_evidence,
    with_site,
)
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import GpuSight, Proof, RootCause, Verdict, row
from hypocenter.doctor.doctor import LADDER, diagnose
from hypocenter.doctor.report_parts import headline
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle
from hypocenter.record.driver_run import DriverKernel, DriverLaunch, DriverRun
from hypocenter.record.events import Launched
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.gpu_stop import GpuStop, GpuWarp, SanitizerReport
from hypocenter.watch.child import Deadlines, Ended
from hypocenter.watch.fault_text import reports_in

#: What leads astray stands in the last of `ids`, which are too many for a plain run to keep; where
#: they are floats, for a guarded run as well.
PROGRAM = """
import sys, numpy as np, torch, triton, triton.language as tl
@triton.jit
def pick(ids_ptr, table_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, mask=at < n, other=0).to(tl.int64)
    tl.store(out_ptr + at, tl.load(table_ptr + ids, mask=at < n), mask=at < n)
kind, far = sys.argv[1], float(sys.argv[2])
pool = torch.from_numpy(np.arange(4096, dtype=np.float32))
table = torch.from_numpy(pool.numpy()[:100])
num_ids = int(sys.argv[3]) if len(sys.argv) > 3 else 2000
ids, out = torch.zeros(num_ids, dtype=getattr(torch, kind)), torch.zeros(num_ids)
ids[1999] = far
pick[(2000 // 50,)](ids, table, out, 2000, BLOCK=64)
print("sum", out.sum().item())
"""


def again(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, *args: str
) -> tuple[int, dict[str, Any], list[str]]:
    """Exit code, the report, and the lines in which runs were told."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (folder / "program.py").write_text(PROGRAM)
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        app.main(["doctor", "--again", "--json", "--", sys.executable, "program.py", *args])
    out, err = capfd.readouterr()
    code = left.value.code
    told = [line for line in err.splitlines() if line.startswith("hypo: run ")]
    return code if isinstance(code, int) else 0, json.loads(out), told


def test_a_wild_index_is_proven_by_the_integers_that_a_guarded_run_keeps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found, told = again(capfd, monkeypatch, tmp_path, "int64", "1e12")
    assert code == 3
    assert [line.partition(":")[2].partition(":")[0] for line in told] == [
        " run 1, as it is", " run 2, guarded",
    ]  # fmt: skip
    assert "SIGSEGV" in told[0]
    assert "no root cause is proven" in told[0]
    [root] = found["roots"]
    assert (root["cause"], root["argument"]) == ("index out of range", "ids_ptr")
    assert root["proof"]["red"].startswith("the guarded run masked off this access: load of table")
    assert root["proof"]["corrected"] == "ids_ptr[1999] = 99"
    assert "no such finding" in root["proof"]["green"]
    assert [run["is_told"] for run in found["runs"]] == [False, True]
    assert "run as it is: crash" in found["symptom"]
    made = bundles.load(tmp_path / "hypo-bundle")
    assert made.fault.kind == "none"
    assert made.fault_before is not None
    assert made.fault_before.kind == "crash"
    assert "HYPO_RUN_DIR" not in made.environment
    with pytest.raises(SystemExit):
        app.main(["doctor", "hypo-bundle", "--run-sources", "--json"])
    assert json.loads(capfd.readouterr().out)["roots"] == [root]


@pytest.mark.tier("sim")  # of floats as of integers, which the test above has
def test_a_float_that_leads_astray_is_proven_by_what_a_guarded_run_keeps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found, told = again(capfd, monkeypatch, tmp_path, "float64", "150")
    assert (code, len(told)) == (3, 2)
    [root] = found["roots"]
    assert (root["cause"], root["argument"]) == ("index out of range", "ids_ptr")
    assert root["proof"]["red"].startswith("the guarded run masked off this access: load of table")
    assert root["proof"]["corrected"] == "all of ids_ptr = 0"
    assert "no such finding" in root["proof"]["green"]


@pytest.mark.tier("sim")
def test_what_no_replay_makes_again_is_proven_by_the_fault_that_goes_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many floats nobody keeps the values."""
    code, found, told = again(capfd, monkeypatch, tmp_path, "float64", "1e12", "10000")
    assert (code, len(told)) == (3, 2)
    [root] = found["roots"]
    assert (root["cause"], root["kernel"]) == ("access outside its tensor", "pick")
    assert (root["argument"], root["line"]) == ("table_ptr", 7)
    assert "SIGSEGV" in root["proof"]["red"]
    assert root["proof"]["corrected"] == "that access masked off"
    assert root["proof"]["green"] == "the same command ended without a fault"
    assert "is not proven" in root["sentence"]
    monkeypatch.delenv("TRITON_INTERPRET")
    made = bundles.load(tmp_path / "hypo-bundle")
    assert diagnose(made, allow_source=True, without=("guarded run",)).roots == ()


@pytest.mark.tier("sim")
def test_a_silent_access_is_confirmed_and_no_cause_is_claimed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found, told = again(capfd, monkeypatch, tmp_path, "float64", "150", "10000")
    assert code == 3
    assert found["roots"] == []
    [confirmed] = [row for row in found["hypotheses"] if row["verdict"] == "CONFIRMED"]
    assert (confirmed["cause"], confirmed["argument"]) == ("access outside its tensor", "table_ptr")
    evidence = " ".join(confirmed["evidence"])
    assert "at byte 600 in program (31, 0, 0)" in evidence
    assert "is certain" in evidence
    assert "is not proven" in evidence
    assert [bool(run["left_out"]) for run in found["runs"]] == [False, False, True, True]
    assert len(told) == 4


@pytest.mark.tier("sim")
def test_a_program_that_is_right_is_found_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found, told = again(capfd, monkeypatch, tmp_path, "float64", "99", "10000")
    assert (code, found["roots"], len(told)) == (0, [], 4)
    assert not [row for row in found["hypotheses"] if row["verdict"] == "CONFIRMED"]


FAKE = """#!/bin/sh
# A stand-in for compute-sanitizer: writes what one wrote, and runs the command.
while [ "$1" != sh ]; do
  [ "$1" = --log-file ] && log=$(echo "$2" | sed "s/%p/$$/")
  shift
done
cat "$SAID" > "$log"
exec "$@"
"""
SAID = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at pick+0xec0 in /src/program.py:7
=========     by thread (18,0,0) in block (31,0,0)
=========     Access to 0x74505bcccca0 is out of bounds
=========     and is 161 bytes after the nearest allocation at 0x74505bccc800 of size 1,024 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
========= Invalid __global__ atomic of size 4 bytes
=========     at 0xda0 in /src/moe.py:175:fused_moe_kernel
=========     by thread (96,0,0) in block (44,0,0)
=========     Address 0x763995f9f001 is misaligned
========= Invalid __global__ write of size 256 bytes
=========     at bulk_copy(unsigned char *, int)+0x120
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x763995f9f000 is out of bounds
=========     and is 1,241,911,296 bytes before the nearest allocation at 0x7639e0000000 of size 5 bytes
========= Invalid __shared__ read of size 4 bytes
=========     at other+0x10
========= ERROR SUMMARY: 3 errors
"""  # noqa: E501


def test_reports_of_memcheck_are_read() -> None:
    first, second, third = reports_in(SAID)
    assert (first.operation, first.width_bytes, first.kernel) == ("load", 16, "pick")
    assert (first.file, first.line, first.problem) == ("/src/program.py", 7, "out of bounds")
    assert (first.block, first.thread) == ((31, 0, 0), (18, 0, 0))
    assert (first.address, first.near_address) == (0x74505BCCCCA0, 0x74505BCCC800)
    assert first.near_bytes == 161
    assert (second.operation, second.kernel) == ("atomic", "fused_moe_kernel")
    assert (second.file, second.line, second.problem) == ("/src/moe.py", 175, "misaligned")
    assert second.near_bytes is None
    assert (third.kernel, third.file) == ("bulk_copy(unsigned char *, int)", "")
    assert third.near_bytes == -1_241_911_296
    assert list(reports_in("========= Invalid __global__ read of size 4\n")) == [
        SanitizerReport(
            tool="compute-sanitizer", problem="wrong", operation="load", width_bytes=4, kernel=""
        )
    ]


def test_all_ways_are_tried_of_a_crash_that_nobody_explains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(FAKE)
    tool.chmod(0o755)
    (tmp_path / "said").write_text(SAID)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    monkeypatch.chdir(tmp_path)
    script = 'echo "$CUDA_LAUNCH_BLOCKING $PYTORCH_NO_CUDA_MEMORY_CACHING" >> ran; kill -SEGV $$'
    with pytest.raises(SystemExit) as left:
        app.main(["doctor", "--again", "--json", "--", "sh", "-c", script])
    found = json.loads(capfd.readouterr().out)
    assert left.value.code == 3
    assert (tmp_path / "ran").read_text() == " \n1 \n 1\n"
    assert [run["name"] for run in found["runs"] if not run["left_out"]] == [
        "as it is", "with blocking launches, the driver watched", "below compute-sanitizer",
    ]  # fmt: skip
    assert found["runs"][1]["left_out"].startswith("no launch of Triton was recorded")
    assert found["runs"][3]["is_told"]
    confirmed = [row for row in found["hypotheses"] if row["verdict"] == "CONFIRMED"]
    assert "pick" in {row["kernel"] for row in confirmed}
    assert "161 bytes behind the allocation at 0x74505bccc800" in str(confirmed)


def test_without_the_tool_its_way_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypocenter.watch.sanitizers.memcheck", lambda: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        app.main(["doctor", "--again", "--", "sh", "-c", "kill -SEGV $$"])
    out, err = capfd.readouterr()
    assert "RUN 4      below compute-sanitizer: left out: compute-sanitizer is not on PATH" in out
    assert "hypo: run 4, below compute-sanitizer: left out" in err


def ended(**other: Any) -> Ended:
    facts: dict[str, Any] = {"exit_code": 1, "signal": None, "stderr": "", "started": 0.0}
    return Ended(("true",), 1, **facts | {"ended": 1.0, "since": 0.0} | other)


def examined(kind: str, device: str = "", *, has_launched: bool = True, **told: Any) -> ExaminedRun:
    """A run that ended so on that device, of which nothing is proven."""
    recorded = Run()
    launch = recorded.launch("add", {}, {}, source="def add(x):\n    pass\n")
    bundle = Bundle(
        kind="crash",
        device=device,
        fault=FaultRecord(kind=kind, message="broke"),
        events=(recorded.emit(Launched, launch=launch),) if has_launched else (),
    )
    return ExaminedRun(bundle, msgspec.structs.replace(diagnose(bundle, without=LADDER), **told))


PROVEN = RootCause(
    cause=Cause.INDEX_RANGE, sentence="it is so", fix="do", proof=Proof("red", "other", "green")
)


@pytest.mark.parametrize(
    ("ends", "num_runs", "is_hinted"),
    [
        ([(ended(), examined("crash"))] * 4, 4, True),
        ([(ended(), None)], 4, True),  # nothing to go by: all other ways are left out
        ([(ended(), examined("crash", roots=(PROVEN,)))], 1, False),
        ([(ended(), examined("crash")), (ended(), examined("crash", roots=(PROVEN,)))], 2, False),
        ([(ended(is_interrupted=True), examined("crash"))], 1, False),
    ],
    ids=["unproven", "unseen", "proven", "proven later", "interrupted"],
)
def test_what_none_of_the_runs_looks_for_is_said_where_none_proved_a_cause(
    ends: list[tuple[Ended, ExaminedRun | None]], num_runs: int, is_hinted: bool,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    left = iter(ends)
    monkeypatch.setattr(Escalation, "_run", lambda self, way: next(left))
    monkeypatch.setattr("hypocenter.watch.sanitizers.memcheck", lambda: "/bin/true")
    Escalation(("true",), tmp_path, Deadlines()).run()
    assert next(left, None) is None
    lines = capfd.readouterr().err.splitlines()
    assert sum(line.startswith("hypo: run ") for line in lines) == num_runs
    hint = (
        "hypo: no run proved a cause; elements that nobody wrote, reads of them, and races show in "
        "`hypo check FILE`, where FILE makes the launches"
    )
    assert [line for line in lines if not line.startswith("hypo: run ")] == [hint] * is_hinted


@pytest.mark.parametrize("code", [0, 7])
def test_where_nothing_was_recorded_the_exit_code_is_the_commands(
    code: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with a healthy program whose kernels are none of Triton's."""
    monkeypatch.setattr(Escalation, "_run", lambda self, way: (ended(exit_code=code), None))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        app.main(["doctor", "--again", "--", "./library-of-cuda"])
    assert left.value.code == code
    assert "no run recorded a launch or showed a fault" in capfd.readouterr().err


LEFT_OUT = [
    ("none", "cuda:0", {}, "/bin/true", ["the command ended without a fault"] * 2),
    ("crash", "interpreter", {}, "/bin/true", ["the launches ran on the CPU"] * 2),
    ("crash", "hip:0", {}, "/bin/true", ["", "compute-sanitizer is for GPUs of NVIDIA"]),
    ("crash", "cuda:0", {}, None, ["", "compute-sanitizer is not on PATH"]),
    # The driver's own record of launches is new all the same.
    ("crash", "cuda:0", {"CUDA_LAUNCH_BLOCKING": "1"}, "/bin/true", ["", ""]),
    ("crash", "cuda:0", {"HYPO_DRIVER": "1"}, "/bin/true", ["", ""]),
    ("crash", "cuda:0", {"CUDA_LAUNCH_BLOCKING": "1", "HYPO_DRIVER": "1"}, "/bin/true",
     ["CUDA_LAUNCH_BLOCKING=1 and HYPO_DRIVER were set before", ""]),
    ("crash", "hip:0", {"AMD_SERIALIZE_KERNEL": "3"}, "/bin/true",
     ["AMD_SERIALIZE_KERNEL=3 was set before", "compute-sanitizer is for GPUs of NVIDIA"]),
    ("crash", "cuda:0", {}, "/bin/true", ["", ""]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "device", "variables", "tool", "reasons"), LEFT_OUT)
def test_a_run_that_can_tell_nothing_more_is_left_out_with_its_reason(
    kind: str, device: str, variables: dict[str, str], tool: str | None, reasons: list[str],
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    for name in (*BLOCKING, *WATCHED):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Escalation, "_run", lambda self, way: (ended(), examined(kind, device)))
    monkeypatch.setattr("hypocenter.watch.sanitizers.memcheck", lambda: tool)
    Escalation(("true",), tmp_path, Deadlines()).run()
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hypo: run ")]
    assert len(lines) == 4
    for line, reason in zip(lines, ["", "", *reasons], strict=True):
        assert ("left out" in line) == bool(reason), line
        assert reason in line


AS_IT_IS, GUARDED, DRIVEN, CHECKED = (
    "as it is", "guarded", "with blocking launches, the driver watched", "below compute-sanitizer",
)  # fmt: skip
LAUNCHED = "a launch of Triton was recorded as well"
#: All that ROCm's runtime is asked for where launches are waited for.
WAITED = {
    "AMD_SERIALIZE_KERNEL": "3", "AMD_SERIALIZE_COPY": "3", "HSA_DISABLE_FRAGMENT_ALLOCATOR": "1",
    "AMD_LOG_LEVEL": "4",
}  # fmt: skip
ABORTED = "what():  kernel, /tmp/c/cab.main.cpp:24, index out of bounds: 0 <= tmp2 < 128L"


@pytest.mark.parametrize(
    ("is_triton", "signal", "stderr", "ways"),
    [
        (True, None, "", [AS_IT_IS, GUARDED, DRIVEN, CHECKED]),
        (False, None, "", [AS_IT_IS, DRIVEN, CHECKED]),
        (False, None, LAUNCHED, [AS_IT_IS, DRIVEN, CHECKED, GUARDED]),
        (True, 6, ABORTED, [AS_IT_IS, "on one thread", GUARDED, DRIVEN, CHECKED]),
        (True, None, ABORTED, [AS_IT_IS, GUARDED, DRIVEN, CHECKED]),
        (True, 6, "double free", [AS_IT_IS, GUARDED, DRIVEN, CHECKED]),
    ],
    ids=["Triton's", "another's", "one of several", "threads", "an exception", "aborted"],
)
def test_the_way_that_can_tell_most_comes_first(
    is_triton: bool, signal: int | None, stderr: str, ways: list[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    made: list[str] = []
    sight = GpuSight(source="dump", exception="illegal", kernel="scatter", is_triton=is_triton)
    run = examined("crash", sights=(sight,), has_launched=is_triton or stderr == LAUNCHED)
    fault = FaultRecord(kind="crash", message="broke", signal=signal)
    run = ExaminedRun(
        msgspec.structs.replace(run.bundle, fault=fault, stderr=stderr), run.diagnosis
    )

    def run_way(self: Escalation, way: Way) -> tuple[Ended, ExaminedRun]:
        made.append(way.name)
        return ended(), run

    for name in (*BLOCKING, *WATCHED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Escalation, "_run", run_way)
    monkeypatch.setattr("hypocenter.watch.sanitizers.memcheck", lambda: "/bin/true")
    Escalation(("true",), tmp_path, Deadlines()).run()
    assert made == ways


@pytest.mark.parametrize("told_by", ["driver", "core dump", ""])
def test_the_slow_tool_is_left_out_where_the_driver_has_told_of_a_kernel_of_another(
    told_by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of such a kernel the tool proves no cause, and its run takes as long as all others."""
    made: list[str] = []
    sight = GpuSight(source="dump", exception="illegal", kernel="copy")
    told = row(Cause.ACCESS_OUTSIDE, Verdict.CONFIRMED, told_by, "outside", kernel="copy")
    rows = (told.hypothesis,) if told_by else ()

    def run_way(self: Escalation, way: Way) -> tuple[Ended, ExaminedRun]:
        made.append(way.name)
        is_driven = way.name == DRIVEN
        run = examined(
            "crash", sights=(sight,), hypotheses=rows if is_driven else (), has_launched=False
        )
        driver_run = DriverRun() if is_driven else None
        return ended(), ExaminedRun(
            msgspec.structs.replace(run.bundle, driver_run=driver_run), run.diagnosis
        )

    for name in (*BLOCKING, *WATCHED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Escalation, "_run", run_way)
    monkeypatch.setattr("hypocenter.watch.sanitizers.memcheck", lambda: "/bin/true")
    Escalation(("true",), tmp_path, Deadlines()).run()
    assert made == [AS_IT_IS, DRIVEN, *[CHECKED] * (told_by != "driver")]


@pytest.mark.parametrize("kernel", ["rows", "other"])
def test_a_program_that_checks_the_drivers_answer_itself_ends_at_the_same_fault(
    kernel: str, tmp_path: Path
) -> None:
    """Waited for, the launch is answered with the fault, and the program ends by its own check."""
    warp = GpuWarp(
        grid=-1, block=None, warp=0, kernel="rows", symbol="rows", pc=0, is_error=True,
        exception="illegal address",
    )  # fmt: skip
    stop = GpuStop(source="NVIDIA core dump", exception="illegal address", warps=(warp,))
    first = examined("error")
    first = replace(first, bundle=msgspec.structs.replace(first.bundle, gpu_stops=(stop,)))
    failed = DriverLaunch(
        seq=1, kernel=1, grid=(1, 1, 1), block=(1, 1, 1), shared_bytes=0, stream=0, data=b"",
        code=700,
    )  # fmt: skip
    run = DriverRun(kernels=(DriverKernel(id=1, symbol=kernel),), launches=(failed,))
    bundle = msgspec.structs.replace(
        examined("none", has_launched=False).bundle,
        fault=FaultRecord(kind="none", message=""),
        driver_run=run,
    )
    escalation = Escalation(("true",), tmp_path, Deadlines())
    escalation._examined[0] = first
    joined = escalation._with_dump_before(bundle)
    assert [one.is_of_run_before for one in joined.gpu_stops] == [True] * (kernel == "rows")
    assert _has_evidence(bundle)
    refused = msgspec.structs.replace(failed, code=701)
    assert not _has_evidence(
        msgspec.structs.replace(bundle, driver_run=DriverRun(launches=(refused,)))
    )


@pytest.mark.parametrize("left", [(), *((name,) for name in list(WAITED)[1:])])
def test_waiting_that_was_set_before_leaves_a_run_out_only_where_nothing_is_armed(
    left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The log of launches, and memory that is not kept, are new all the same."""
    made: list[str] = []

    def run_way(self: Escalation, way: Way) -> tuple[Ended, ExaminedRun]:
        made.append(way.name)
        return ended(), examined("crash", "hip:0")

    for name in (*BLOCKING, *WATCHED, *WAITED):
        monkeypatch.delenv(name, raising=False)
    for name in WAITED.keys() - {*left}:
        monkeypatch.setenv(name, WAITED[name])
    monkeypatch.setattr("hypocenter.coredump.rocm.has_driver", lambda root=None: True)
    monkeypatch.setattr(Escalation, "_run", run_way)
    Escalation(("true",), tmp_path, Deadlines()).run()
    assert made == [AS_IT_IS, GUARDED, *[DRIVEN] * bool(left)]


@pytest.mark.tier("sim")
def test_a_report_of_a_sanitizer_is_joined_with_the_replay_of_its_program(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    again(capfd, monkeypatch, tmp_path, "int64", "150")
    monkeypatch.delenv("TRITON_INTERPRET")
    made = bundles.load(tmp_path / "hypo-bundle")
    first, *_ = reports_in(SAID)
    reported = msgspec.structs.replace(made, reports=(first,))
    without = ("guarded run", "replay")
    found = diagnose(reported, allow_source=True, without=without)
    [root] = found.roots
    assert root.cause is Cause.INDEX_RANGE
    assert root.proof.red.startswith(
        "compute-sanitizer: load of 16 bytes by pick at /src/program.py:7 in program (31, 0, 0) is "
        "out of bounds, 161 bytes behind"
    )
    # Another program of the kernel does nothing wrong: the report stands by itself.
    other = msgspec.structs.replace(first, block=(3, 0, 0))
    found = diagnose(
        msgspec.structs.replace(made, reports=(other,)), allow_source=True, without=without
    )
    assert found.roots == ()
    [row] = [row for row in found.hypotheses if row.verdict is Verdict.CONFIRMED]
    assert (row.cause, row.kernel, row.diagnostic) == (Cause.ACCESS_OUTSIDE, "pick", "sanitizer")


def watched_run(*sites: str, more: int = 0, symbol: str = "_Z7scatterPl") -> DriverRun:
    """Launches of one kernel at these lines; of `more` nothing is told any more."""
    launches = tuple(
        DriverLaunch(
            seq=number, kernel=1, grid=(1, 1, 1), block=(32, 1, 1), shared_bytes=0, stream=0,
            data=b"", site=site,
        )
        for number, site in enumerate(sites, 1)
    )  # fmt: skip
    kernel = DriverKernel(id=1, symbol=symbol, name="scatter(long*)")
    return DriverRun(kernels=(kernel,), launches=launches, num_launches=len(sites) + more)


REPORT = SanitizerReport(
    tool="compute-sanitizer", problem="out of bounds", operation="store", width_bytes=4,
    kernel="void ns::scatter<float>(long *)", file="scatter.cu", line=5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("watched", "site"),
    [
        (watched_run("p.py:7", "p.py:7"), "p.py:7"),
        (watched_run("p.py:7", "p.py:9"), ""),
        (watched_run("p.py:7", ""), ""),
        (watched_run("p.py:7", more=1), ""),  # of launches before nothing is known
        (watched_run(), ""),
        (None, ""),
    ],
    ids=["one line", "two lines", "one unknown", "some forgotten", "none", "no watch"],
)
def test_a_report_gets_the_line_that_launched_its_kernel_where_no_other_did(
    watched: DriverRun | None, site: str
) -> None:
    assert with_site(REPORT, watched).launched_at == site
    other = msgspec.structs.replace(REPORT, kernel="gather(long *)")
    assert with_site(other, watched).launched_at == ""


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("scatter", "scatter"),
        ("void ns::scatter<float, 4>(long *, int)", "scatter"),
        ("__main__::gather[abi:v1,cw51](Array<float, (int)2>, int)", "gather"),
    ],
)
def test_an_access_that_was_seen_is_told_with_its_kernel_and_line(kernel: str, name: str) -> None:
    report = msgspec.structs.replace(REPORT, kernel=kernel, launched_at="p.py:7")
    fault = FaultRecord(kind="crash", message="broke")
    found = diagnose(Bundle(kind="crash", device="cuda:0", fault=fault, reports=(report,)))
    assert not found.roots
    told = (
        f"no root cause is proven; confirmed: access outside its tensor by {name} at scatter.cu:5"
    )
    assert headline(found) == told
    [row] = [row for row in found.hypotheses if row.verdict is Verdict.CONFIRMED]
    assert row.evidence[1] == "p.py:7 launches it: so the driver's watch saw in another run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--again", "--", "run", "-p", "x"), "--launch-mode guarded"),
        (("--again", "bundle"), "--again is for a command"),
        (("--again", "--good", "good", "--", "true"), "leave --good out"),
    ],
)
def test_what_cannot_be_run_again_is_refused(
    words: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        app.main(["doctor", *words])
    assert left.value.code == 2
    assert said in capfd.readouterr().err
