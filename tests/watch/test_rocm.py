"""What is armed of ROCm's for a command, and the log that its runtime then writes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hypocenter.cli import app
from hypocenter.coredump import rocm
from hypocenter.coredump.rocm_log import launch_at_end
from hypocenter.record import bundle as bundles
from hypocenter.record.logged_launch import LoggedArgument
from hypocenter.watch.gpu_dumps import gpu_dumps
from hypocenter.watch.launcher_lines import without_prefixes

WAITED = {"AMD_SERIALIZE_KERNEL": "3"}
#: Launches of two kernels as CLR logs them with AMD_LOG_LEVEL=4; the last one does not return.
CALL = " hipLaunchKernel ( 0x55d4be7d6d90, {32,4,1}, {64,1,1}, 0x7ffd49f8a0c0, 0, stream:<null> ) "
RETURNED = "hipLaunchKernel: Returned hipSuccess : : duration: 42 us"
SIZES = (
    "SWq=0x7fcf2a564000, HWq=0x7fcbe4200000, id=1, Dispatch Header = 0x1502 (type=2, barrier=1, "
    "acquire=2, release=2), setup=3, grid=[2048, 4, 1], workgroup=[64, 1, 1], private_seg_size=0, "
    "group_seg_size=512, kernel_obj=0x7fcbc5532bc0, kernarg_address=0x7fcbdc200000, "
    "completion_signal=0x0, correlation_id=0, rptr=7, wptr=7"
)
PAGE = 0x7F3E5A400000
FAULT = (
    "Memory access fault by GPU node-1 (Agent handle: 0x55d0) on address 0x7f3e5a400000. Reason: "
    "Page not present or supervisor privilege.\n"
)


def line(said: str, tid: str = "0x7fcd43d616c0", pid: int = 9) -> str:
    return f":3:rocvirtual.cpp           :883 : 38724080989 us: [pid:{pid} tid: {tid}] {said}\n"


def launch(kernel: str, *, returned: str = "", tid: str = "0x7fcd43d616c0") -> str:
    said = [
        CALL,
        "Arg0:   = ptr:0x7f3e5a200000 obj:[0x7f3e5a200000-0x7f3e5a210000]",
        "Arg1:  positions = ptr:0x7f3e5a3ff000 obj:[0x7f3e5a3ff000-0x7f3e5a400000]",
        "Arg2:  heads = val:0x80 (size:0x4)",
        "Arg3:  bias = ptr:(nil) ",
        f"ShaderName : {kernel}",
        SIZES,
        *([returned] if returned else []),
    ]
    return "".join(line(text, tid) for text in said)


LOG = launch("_Z4normPf", returned=RETURNED) + launch("_Z4ropePfPKiii")


def in_log(tmp_path: Path, text: str, environment: dict[str, str] = WAITED) -> str:
    path = tmp_path / "rocm-log_9"
    path.write_text(text)
    found = launch_at_end([path], "", environment)
    return found.kernel if found is not None else ""


def test_the_launch_that_a_log_ends_in_is_read_with_its_parameters(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    found = launch_at_end([tmp_path / "log"], "", WAITED)
    assert found is not None
    assert (found.kernel, found.call, found.outcome) == ("rope", "hipLaunchKernel", "")
    assert (found.grid, found.block, found.shared_bytes) == ((32, 4, 1), (64, 1, 1), 512)
    assert (found.num_launches, found.variable) == (2, "AMD_SERIALIZE_KERNEL=3")
    x, positions, heads, bias = found.arguments
    assert (x.value, x.first, x.past) == (0x7F3E5A200000, 0x7F3E5A200000, 0x7F3E5A210000)
    assert (positions.name, positions.past) == ("positions", PAGE)
    assert heads == LoggedArgument(number=2, name="heads", value=128)
    assert (bias.is_address, bias.value, bias.first) == (True, 0, None)


@pytest.mark.parametrize("prefix", [
    "", "(EngineCore_DP0 pid=4711) ", "[rank3]: ", "(RayWorkerWrapper pid=99, ip=10.0.0.7) ",
    "server-1  | ",
])  # fmt: skip
def test_a_log_in_stderr_is_read_behind_what_a_launcher_puts_before_lines(prefix: str) -> None:
    text = "".join(f"{prefix}{row}\n" for row in f"{LOG}{FAULT}".splitlines())
    found = launch_at_end([], without_prefixes(text), {"HIP_LAUNCH_BLOCKING": "1"})
    assert found is not None
    assert (found.kernel, found.variable) == ("rope", "HIP_LAUNCH_BLOCKING=1")


@pytest.mark.parametrize("form", [
    ":3:a.cpp :1 : 12 us: [pid:16    tid:0x7f54f7603280] ",
    ":3:a.cpp :1 : 7270d us: [pid:2 tid: 7f3]",
    ":3:a.cpp :1 : 102993890639 us: 17154: [tid:0x7f0824e798c0] ",
    ":4:a.cpp   :707 : 260823088939 us:  ",
])  # fmt: skip
def test_lines_of_several_versions_are_read(form: str, tmp_path: Path) -> None:
    said = [row.partition("] ")[2] for row in LOG.splitlines()]
    assert in_log(tmp_path, "".join(f"{form}{text}\n" for text in said)) == "rope"


def test_nothing_is_told_where_launches_were_not_waited_for(tmp_path: Path) -> None:
    # Another kernel may have been under way: the call has returned before its kernel began.
    for environment in ({}, {"AMD_SERIALIZE_KERNEL": "1"}, {"HIP_LAUNCH_BLOCKING": "0"}):
        assert in_log(tmp_path, LOG, environment) == ""


def test_nothing_is_told_where_every_launch_has_returned(tmp_path: Path) -> None:
    assert in_log(tmp_path, launch("_Z4normPf", returned=RETURNED)) == ""
    other = line(" hipMemcpy ( 0x7f08, 0x7f07, 4000000, hipMemcpyDeviceToHost ) ")
    assert in_log(tmp_path, launch("_Z4normPf", returned=RETURNED) + other) == ""


def test_of_two_threads_that_launch_none_is_named(tmp_path: Path) -> None:
    other = launch("_Z4normPf", tid="0x7f0000000001")
    assert in_log(tmp_path, LOG + other) == ""
    assert in_log(tmp_path, LOG + other + line(RETURNED, "0x7f0000000001")) == "rope"


def test_a_launch_that_returned_a_fault_is_the_one(tmp_path: Path) -> None:
    failed = "hipLaunchKernel: Returned hipErrorIllegalAddress : : duration: 42 us"
    text = launch("_Z4ropePfPKiii", returned=failed) + launch("_Z4normPf", returned=failed)
    (tmp_path / "log").write_text(text)
    found = launch_at_end([tmp_path / "log"], "", WAITED)
    assert found is not None
    assert (found.kernel, found.outcome, found.num_launches) == (
        "rope", "hipErrorIllegalAddress", 1,
    )  # fmt: skip
    # An answer that is none of what ran names no launch.
    refused = "hipLaunchKernel: Returned hipErrorInvalidValue :"
    assert in_log(tmp_path, launch("_Z4ropePfPKiii", returned=refused)) == ""


def test_kernels_of_a_graph_are_not_named(tmp_path: Path) -> None:
    graph = line(" hipGraphLaunch ( 0x7f, stream:0x8 ) ") + line("Graph ShaderName : _Z4ropePf")
    assert in_log(tmp_path, graph) == ""


def test_a_log_of_nothing_and_one_that_cannot_be_read_name_nothing(tmp_path: Path) -> None:
    assert in_log(tmp_path, "\n:3:x\nShaderName : _Z4ropePf\nArg0: = ptr:\n") == ""
    assert launch_at_end([tmp_path / "none", tmp_path], "", WAITED) is None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with AMD's driver and ROCm's debug agent in it."""
    agent = tmp_path / "opt" / "rocm-7.2" / "lib" / "librocm-debug-agent.so.2"
    agent.parent.mkdir(parents=True)
    agent.touch()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kfd").touch()
    return tmp_path


def armed(environment: dict[str, str], root: Path) -> dict[str, str]:
    return rocm.as_environment(rocm.variables_at_fault(environment, root))


def test_the_debug_agent_and_the_runtimes_errors_are_armed_where_they_are(root: Path) -> None:
    agent = str(root / "opt" / "rocm-7.2" / "lib" / "librocm-debug-agent.so.2")
    everything = {"HSA_TOOLS_LIB": agent, "HSA_ENABLE_DEBUG": "1", "AMD_LOG_LEVEL": "1"}
    assert armed({}, root) == everything
    with gpu_dumps({}, root=root) as dumps:
        assert dumps.variables == everything
    # What the user has set stays.
    assert armed({"HSA_TOOLS_LIB": "librocprofiler.so"}, root) == {"AMD_LOG_LEVEL": "1"}
    assert "AMD_LOG_LEVEL" not in armed({"AMD_LOG_LEVEL": "0"}, root)
    (root / "dev" / "kfd").unlink()
    assert armed({}, root) == {}


def test_a_log_is_asked_for_unless_somebody_else_has_one(root: Path) -> None:
    asked = rocm.as_environment(rocm.variables_of_waiting({}, Path("/runs"), root))
    assert asked == {
        "AMD_SERIALIZE_KERNEL": "3", "AMD_SERIALIZE_COPY": "3", "AMD_LOG_LEVEL": "4",
        "HSA_DISABLE_FRAGMENT_ALLOCATOR": "1", "AMD_LOG_MASK": "0x89",
        "AMD_LOG_LEVEL_FILE": "/runs/rocm-log", "AMD_LOG_LEVEL_SIZE": "64",
    }  # fmt: skip
    theirs = {"AMD_LOG_LEVEL": "3", "AMD_SERIALIZE_KERNEL": "2"}
    left = rocm.as_environment(rocm.variables_of_waiting(theirs, Path("/runs"), root))
    assert left == {"AMD_SERIALIZE_COPY": "3", "HSA_DISABLE_FRAGMENT_ALLOCATOR": "1"}
    (root / "dev" / "kfd").unlink()
    assert rocm.variables_of_waiting({}, Path("/runs"), root) == ()


@pytest.mark.parametrize("name", ["HSA_COREDUMP_PATTERN", "HSA_COREDUMP_FILE"])
def test_dumps_are_looked_for_where_the_runtime_is_told_to_write_them(name: str) -> None:
    assert rocm.dump_places({name: "/dumps/%e.%p"}) == ("/dumps/*.*",)
    assert rocm.dump_places({name: "|/usr/bin/keep"}) == ()
    assert rocm.dump_places({}) == ("gpucore.*", "core*.gpu")


#: Faults as a program of HIP does, and writes what the variables ask ROCm for.
PROGRAM = """
import os, signal, sys
log, prefix = os.environ.get("AMD_LOG_LEVEL_FILE"), "[rank0]: "
if os.environ.get("AMD_LOG_LEVEL") == "4":
    open(f"{log}_{os.getpid()}", "a").write(open(sys.argv[1]).read())
sys.stderr.write(prefix + sys.argv[2])
os.kill(os.getpid(), signal.SIGABRT)
"""


def test_again_names_the_launch_and_says_what_it_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rocm, "DRIVER", "dev/null")
    for name in [name for name in os.environ if name.startswith(("AMD_", "HSA_", "HIP_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "log").write_text(LOG)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log"), FAULT]
    with pytest.raises(SystemExit):
        app.main(["doctor", "--again", "--out", str(tmp_path / "out"), "--", *command])
    out, err = capfd.readouterr()
    assert "AMD_LOG_LEVEL=1 is set for the command" in err
    assert "AMD_LOG_LEVEL=4 AMD_LOG_MASK=0x89 AMD_LOG_LEVEL_FILE=" in err
    text = " ".join(out.split())
    assert "hipLaunchKernel of rope, grid (32, 4, 1), blocks of (64, 1, 1) threads" in text
    assert "is, begins right behind the memory of parameter 1 (positions)" in text
    assert "no root cause is proven" in text
    logged = bundles.load(tmp_path / "out").logged_launch
    assert logged is not None
    assert logged.kernel == "rope"
