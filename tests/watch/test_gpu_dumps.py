"""Dumps of a GPU that commands leave: when they are armed, asked for, read, and what is said else.

The commands here are Python that does what NVIDIA's driver does: it obeys the variables.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded.core_dumps import AGENT_TEXT, fixture

from hypocenter.base.errors import ErrorKind
from hypocenter.record.gap import Gap, GapKind
from hypocenter.watch import collect, gpu_dumps
from hypocenter.watch.child import Deadlines, Ended, environment_for, watch
from hypocenter.watch.gpu_dumps import GpuDumps

#: Writes the dump that its first argument names, as the driver does at a fault.
FAULTS = """
import os, shutil, sys
place = os.environ["CUDA_COREDUMP_FILE"].replace("%p", str(os.getpid()))
assert os.environ["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"] == "1"
shutil.copyfile(sys.argv[1], place)
sys.exit("RuntimeError: CUDA error: an illegal memory access was encountered")
"""
#: Waits for a byte in its pipe, writes the dump, and goes on to hang.
HANGS = """
import os, shutil, sys, time
from pathlib import Path
from hypocenter.record import ring
from hypocenter.record.ring_writer import RingWriter
from hypocenter.record.run_folder import claim_folder
writer = RingWriter(claim_folder(Path(os.environ["HYPO_RUN_DIR"])))
pipe = os.environ["CUDA_COREDUMP_PIPE"].replace("%p", str(os.getpid()))
place = os.environ["CUDA_COREDUMP_FILE"].replace("%p", str(os.getpid()))
os.mkfifo(pipe)
end = os.open(pipe, os.O_RDWR)
writer.header[ring.CELL_STEP] = 1
writer.header[ring.CELL_STEP_STARTED] = time.monotonic_ns()
assert os.read(end, 1)
whole = Path(sys.argv[1]).read_bytes()
with open(place, "wb") as file:
    for at in range(0, len(whole), 1 << 16):
        file.write(whole[at : at + (1 << 16)])
        file.flush()
        time.sleep(0.02)
time.sleep(60)
"""

#: Arms dumps as where a driver is, says where, and waits to be killed.
ARMED = """
import time
from hypocenter.watch import gpu_dumps
gpu_dumps._DRIVER = ("dev/null",)
with gpu_dumps.gpu_dumps({}) as dumps:
    print(dumps.folder, flush=True)
    time.sleep(60)
"""
#: Has a file of the debug agent's name mapped, prints at SIGQUIT what that would, and hangs; with a
#: second argument it catches no signal.
AGENT_HANGS = """
import mmap, os, signal, sys, time
from pathlib import Path
from hypocenter.record import ring
from hypocenter.record.ring_writer import RingWriter
from hypocenter.record.run_folder import claim_folder
mapped = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ)
if len(sys.argv) < 3:
    text = Path(sys.argv[1]).read_text()
    signal.signal(signal.SIGQUIT, lambda *_: os.write(2, text.encode()))
writer = RingWriter(claim_folder(Path(os.environ["HYPO_RUN_DIR"])))
writer.header[ring.CELL_STEP] = 1
writer.header[ring.CELL_STEP_STARTED] = time.monotonic_ns()
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def with_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_dumps, "_DRIVER", ("dev/null",))
    for name in [name for name in os.environ if "COREDUMP" in name]:
        monkeypatch.delenv(name)


def run(tmp_path: Path, script: str, *words: str, deadlines: Deadlines | None = None) -> Ended:
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o700, exist_ok=True)
    command = [sys.executable, "-c", script, *words]
    return watch(command, environment_for(runs), runs, lambda data: None, deadlines)


@pytest.fixture
def dump(tmp_path: Path) -> str:
    path = tmp_path / "real.nvcudmp"
    path.write_bytes(fixture("gather"))
    return str(path)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []  # nothing of a dump is left behind


@pytest.mark.usefixtures("with_driver")
def test_a_fault_leaves_a_dump_that_goes_into_the_bundle(
    tmp_path: Path, dump: str, temporary: Path
) -> None:
    ended = run(tmp_path, FAULTS, dump)
    [stop] = ended.gpu_stops
    assert stop.faulting is not None
    assert (stop.pid, stop.faulting.kernel) == (ended.pid, "embed")
    made = collect.collect(tmp_path / "runs", ended)
    assert made is not None
    assert made.gpu_stops == (stop,)
    assert ended.gpu_gaps == ()


@pytest.mark.usefixtures("with_driver")
def test_a_fault_that_the_program_hides_is_a_fault_all_the_same(
    tmp_path: Path, dump: str, temporary: Path
) -> None:
    quiet = FAULTS.partition("sys.exit(")[0]
    ended = run(tmp_path, quiet, dump)
    assert ended.exit_code == 0
    made = collect.collect(tmp_path / "runs", ended)
    assert made is not None
    assert made.fault.message == (
        "the GPU stopped at a fault (illegal address) in embed, of which the command said nothing: "
        "it ended with exit code 0"
    )
    assert made.fault.error_kind is ErrorKind.FOUND_LATER


@pytest.mark.usefixtures("with_driver")
def test_a_dump_that_somebody_asked_for_is_no_fault(tmp_path: Path, temporary: Path) -> None:
    path = tmp_path / "spin"
    path.write_bytes(fixture("spin"))
    ended = run(tmp_path, FAULTS.partition("sys.exit(")[0], str(path))
    assert len(ended.gpu_stops) == 1
    assert collect.collect(tmp_path / "runs", ended) is None


@pytest.mark.usefixtures("with_driver")
def test_a_dump_that_is_cut_off_is_one_line_of_what_is_missing(
    tmp_path: Path, temporary: Path
) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(fixture("gather")[:30_000])
    ended = run(tmp_path, FAULTS, str(cut))
    assert ended.gpu_stops == ()
    [gap] = ended.gpu_gaps
    assert (gap.kind, gap.what) == (GapKind.DAMAGED, "a core dump of the GPU")
    assert gap.reason.startswith(f"{ended.pid}.nvcudmp is cut off or damaged")
    made = collect.collect(tmp_path / "runs", ended)
    assert made is not None
    assert gap in made.missing


@pytest.mark.usefixtures("with_driver")
def test_a_command_that_hangs_says_where_its_gpu_stands_before_it_is_ended(
    tmp_path: Path, temporary: Path
) -> None:
    path = tmp_path / "spin"
    path.write_bytes(fixture("spin"))
    ended = run(tmp_path, HANGS, str(path), deadlines=Deadlines(1.0, 1.0))
    assert ended.hung_seconds is not None
    assert ended.gpu_gaps == ()
    [stop] = ended.gpu_stops
    assert stop.is_on_request
    assert stop.standing[0].kernel == "spin"


def test_without_a_driver_nothing_is_armed_and_nothing_said(tmp_path: Path) -> None:
    with gpu_dumps.gpu_dumps({"PATH": "/bin"}, root=tmp_path) as dumps:
        assert dumps == GpuDumps()
        assert dumps.ask() == 0
        assert dumps.stops("") == ((), ())


@pytest.mark.usefixtures("with_driver")
def test_what_is_armed_is_light_and_lets_the_program_end_as_ever(temporary: Path) -> None:
    with gpu_dumps.gpu_dumps({}) as dumps:
        assert dumps.folder is not None
        assert dumps.folder.stat().st_mode & 0o077 == 0
        flags = dumps.variables["CUDA_COREDUMP_GENERATION_FLAGS"].split(",")
        assert {"skip_global_memory", "skip_constbank_memory", "skip_abort"} <= set(flags)
        assert dumps.variables["CUDA_COREDUMP_FILE"] == f"{dumps.folder}/%p.nvcudmp"
        assert dumps.variables["CUDA_COREDUMP_PIPE"] == f"{dumps.folder}/pipe.%p"
        assert dumps.variables["CUDA_ENABLE_USER_TRIGGERED_COREDUMP"] == "1"


@pytest.mark.usefixtures("with_driver")
@pytest.mark.parametrize("name", ["CUDA_COREDUMP_FILE", "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP"])
def test_what_the_user_has_set_is_left_alone(tmp_path: Path, name: str, temporary: Path) -> None:
    with gpu_dumps.gpu_dumps({name: f"{tmp_path}/mine.%p"}) as dumps:
        assert dumps.variables == {}
        stops, gaps = dumps.stops("")
    assert stops == ()
    assert gaps == (
        Gap.not_recorded(
            "where the GPU stood", f"{name} is set, so the doctor armed no core dump of its own"
        ),
    )


@pytest.mark.usefixtures("with_driver")
def test_a_dump_of_the_users_own_is_read_and_stays(tmp_path: Path, dump: str) -> None:
    old = tmp_path / "mine.1"
    old.write_bytes(b"of an earlier run")
    os.utime(old, (1, 1))
    mine = {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_COREDUMP_FILE": f"{tmp_path}/mine.%p",
    }
    with gpu_dumps.gpu_dumps(mine) as dumps:
        os.rename(dump, tmp_path / "mine.77")
        os.utime(tmp_path / "mine.77")
        [stop], gaps = dumps.stops("")
    assert (stop.pid, gaps) == (77, ())
    assert (tmp_path / "mine.77").exists()


@pytest.mark.usefixtures("with_driver")
def test_a_debugger_of_gpus_has_the_gpu_for_itself(temporary: Path) -> None:
    with gpu_dumps.gpu_dumps({}, ["/usr/bin/compute-sanitizer", "python", "x.py"]) as dumps:
        _, [gap] = dumps.stops("")
    assert dumps.variables == {}
    assert gap.reason == "compute-sanitizer looks at the GPU itself, so no core dump was armed"


@pytest.mark.usefixtures("with_driver")
def test_a_disk_that_is_full_arms_nothing_and_says_so(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_dumps, "MIN_FREE_BYTES", 1 << 62)
    with gpu_dumps.gpu_dumps({}) as dumps:
        _, [gap] = dumps.stops("")
    assert dumps.variables == {}
    assert "too few for a core dump" in gap.reason


def test_what_the_debug_agent_printed_is_read_of_stderr() -> None:
    [stop], gaps = GpuDumps().stops(AGENT_TEXT)
    assert (stop.source, gaps) == ("ROCm debug agent", ())


def test_lines_are_read_of_sources_alone(tmp_path: Path) -> None:
    source, secret = tmp_path / "kernel.cu", tmp_path / "secret"
    source.write_text("first\n   out[ids[i]] = 1.0f;\n")
    secret.write_text("first\nsecond\n")
    text = AGENT_TEXT.replace("/home/user/scatter.hip", str(source)).replace("17  ", "2  ")
    [stop], _ = GpuDumps().stops(text)
    assert stop.warps[0].frames[0].text == "out[ids[i]] = 1.0f;"
    [stop], _ = GpuDumps().stops(text.replace(str(source), str(secret)))
    assert (stop.warps[0].frames[0].line, stop.warps[0].frames[0].text) == (2, "")


@pytest.mark.parametrize("catches", [True, False])
def test_before_a_command_that_hangs_is_ended_the_debug_agent_tells_its_waves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, catches: bool
) -> None:
    monkeypatch.setattr("hypocenter.watch.child._QUIET_SECONDS", 0.3)
    agent = tmp_path / "librocm-debug-agent.so.2"
    agent.write_text(AGENT_TEXT)
    words = [str(agent), *([] if catches else ["no"])]
    ended = run(tmp_path, AGENT_HANGS, *words, deadlines=Deadlines(0.5, 0.5))
    # Who does not catch the signal is not ended by it: its stacks are written.
    assert "Fatal Python error: Aborted" in ended.stderr
    assert ended.hung_seconds is not None
    assert [stop.num_warps for stop in ended.gpu_stops] == ([2] if catches else [])


@pytest.mark.usefixtures("with_driver")
def test_what_a_killed_process_armed_goes_with_the_next_one(temporary: Path) -> None:
    command = [sys.executable, "-c", ARMED]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as killed,
        gpu_dumps.gpu_dumps({}) as beside,
    ):
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().decode().strip())
        assert set(temporary.iterdir()) == {left, beside.folder}
        with gpu_dumps.gpu_dumps({}):
            assert left.is_dir()
        killed.kill()
        killed.wait()
        with gpu_dumps.gpu_dumps({}) as dumps:
            assert set(temporary.iterdir()) == {beside.folder, dumps.folder}
