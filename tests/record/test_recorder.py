"""What a run records: every thing in order and by name, whatever becomes of the process."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_launch import counts, rows_tensor, tensor
from pretended.fake_torch import FakeTorch
from recorded.bundle_of import bundle_of_run
from recorded.recorder_kills import kill_at_random
from repository import SUPPORT

from faults.model import model_path
from hypocenter import LLM
from hypocenter.base.errors import CopyRejected, DeviceFault, ErrorKind, LaunchRejected, OutOfMemory
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, marks, memory
from hypocenter.device.gpu.torch_gpu import TorchGpu
from hypocenter.device.launch import run as run_launches
from hypocenter.device.limits import named_gpu
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.device.sim.sim import open_sim
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Verdict
from hypocenter.doctor.rungs.contracts import contracts
from hypocenter.kernels import mark as mark_kernels
from hypocenter.kernels import mark_gpu
from hypocenter.kernels.attention import rope, unfused
from hypocenter.kernels.mark import mark, reference
from hypocenter.record import recorder, ring, run_folder
from hypocenter.record.events import (
    Allocated,
    Called,
    Captured,
    Copied,
    Freed,
    HostWrote,
    Launched,
    Place,
    Rejected,
    Stepped,
    StreamEvent,
)
from hypocenter.record.keyed_digest import KeyedDigest
from hypocenter.record.recorder import Recorder
from hypocenter.record.ring_writer import RingWriter
from hypocenter.record.run_records import ModelRecord
from hypocenter.settings.config import EngineConfig, SamplingParams

SMALL = EngineConfig(context_length=64, max_batch_tokens=8, num_threads=1)
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the runs of one test; whatever recorded before is at its end."""
    recorder.close_recorder()
    monkeypatch.setenv("HYPO_RUN_DIR", str(tmp_path / "runs"))
    yield tmp_path / "runs"
    recorder.close_recorder()


@pytest.fixture
def opened(runs: Path) -> Recorder:
    found = recorder.open_recorder()
    assert isinstance(found, recorder.Recorder)
    return found


def _read(opened: Recorder) -> ring.Run:
    run = ring.read_run(opened.folder)
    assert run.missing == ()
    return run


def _events(opened: Recorder, kind: type[Any]) -> list[Any]:
    return [event for event in _read(opened).events if isinstance(event, kind)]


# -- a run of the engine -------------------------------------------------------------------------


def test_a_run_is_told_by_name_and_in_order(runs: Path) -> None:
    with LLM(model_path(), SMALL) as llm:
        llm.generate([[5, 6, 7], [9]], GREEDY)
        opened = recorder.current()
        assert isinstance(opened, recorder.Recorder)
        run = _read(opened)
        cache = llm.engine.cache
    assert run.process is not None
    assert run.process.command == tuple(sys.orig_argv)
    assert run.process.packages["numpy"] == np.__version__
    assert run.process.environment["HYPO_RUN_DIR"] == str(runs)
    assert (run.process.python, run.process.platform) == (
        platform.python_version(), platform.platform(),
    )  # fmt: skip
    assert run.process.driver is not None
    assert run.model == ModelRecord(
        name=Path(model_path()).name, architecture="llama", quantisation="F32"
    )
    assert [device.name for device in run.devices] == ["cpu"]
    tensors = {one.id: one for one in run.tensors}
    allocations = {e.allocation.id: e.allocation for e in run.events if isinstance(e, Allocated)}
    steps = [event for event in run.events if isinstance(event, Stepped)]
    assert [event.step for event in steps] == list(range(1, len(steps) + 1))
    first = {tensors[v.tensor].name: v for v in steps[0].inputs}
    assert np.frombuffer(first["token_ids"].data, np.int32).tolist() == [5, 6, 7, 9]
    assert np.frombuffer(first["positions"].data, np.int32).tolist() == [0, 1, 2, 0]
    assert first["block_tables"].shape == (2, 1)
    one, two = steps[0].requests
    assert (one.row, one.first_position, one.num_tokens) == (0, 0, 3)
    assert (two.row, two.first_position, two.num_tokens) == (1, 0, 1)
    assert len({*one.blocks, *two.blocks}) == 2
    assert max(*one.blocks, *two.blocks) < cache.num_blocks
    assert one.digest == KeyedDigest(struct.pack("<3i", 5, 6, 7)).text()
    # A launch is told as its kernel sees it, and as its contract names it.
    plan = next(plan for plan in run.plans if plan.id == steps[0].plan)
    turned = next(launch for launch in plan.launches if launch.kernel == "rope_write")
    given = {argument.name: argument for argument in turned.arguments}
    positions = tensors[given["positions"].tensor or 0]
    assert (positions.name, positions.owner, positions.dtype) == ("positions", "step", "I32")
    memory_of = allocations[positions.allocation]
    assert positions.address == memory_of.address + 4 * positions.offset
    assert positions.extent_bytes == 4 * 8 < memory_of.num_bytes
    assert memory_of.site.rpartition(":")[0].endswith("model/layers/step_buffers.py")
    assert {fact.name: fact.value for fact in turned.facts}["head_dim"] == 16
    source = next(source for source in run.sources if source.id == turned.source)
    assert hashlib.sha256(source.text.encode()).hexdigest() == source.id
    assert source.file.endswith("rope_write_cpu.py")
    text = Path(source.file).read_text().splitlines()
    assert source.text.splitlines()[0] == text[source.first_line - 1]
    declared = run.contracts["rope_write"].argument("positions")
    assert declared is not None
    assert declared.dtypes == ("I32",)
    assert {name for name, armed, _ in map(_check, run.checks) if armed} == {
        "contracts", "step indices", "host copies",
    }  # fmt: skip
    assert run.progress.submitted is not None
    assert run.step_started_ns is None


def test_drivers_are_told_with_their_versions_where_they_have_one(tmp_path: Path) -> None:
    assert run_folder.loaded_drivers(tmp_path) == ""
    for name in ("nvidia", "amdgpu"):
        (tmp_path / "sys/module" / name).mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("550.54.15\n")
    assert run_folder.loaded_drivers(tmp_path) == "nvidia 550.54.15, amdgpu of the kernel"


def _check(check: Any) -> tuple[str, bool, int]:
    return check.name, check.armed, check.num_runs


def test_equal_runs_have_equal_digests_and_others_do_not(opened: Recorder) -> None:
    with LLM(model_path(), SMALL) as llm:
        for prompt in ([5, 6], [5, 6], [5, 7]):
            ids = (*prompt, *llm.generate(prompt, GREEDY).token_ids[:-1])
    steps = _events(opened, Stepped)
    digests = [event.requests[0].digest for event in steps]
    third = len(digests) // 3
    assert digests[:third] == digests[third : 2 * third] != digests[2 * third :]
    assert len(set(digests[:third])) == third
    assert digests[-1] == KeyedDigest(struct.pack(f"<{len(ids)}i", *ids)).text()


def test_a_weight_is_named_with_its_parts(opened: Recorder) -> None:
    with LLM(model_path("q8_0"), SMALL) as llm:
        llm.generate([5], GREEDY)
    run = _read(opened)
    parts = {one.part: one for one in run.tensors if one.name == "blk.0.attn_q.weight"}
    assert set(parts) == {"", "records"}
    assert (parts[""].dtype, parts[""].shape) == ("Q8_0", (64, 64))
    record = 16 * (64 + 2 * 2)  # 16 rows of 64 codes and two scales
    assert (parts["records"].dtype, parts["records"].shape) == (f"RECORD{record}", (4,))
    assert parts["records"].extent_bytes == 4 * record
    assert parts["records"].address == parts[""].address


def test_two_engines_in_one_process_are_told_apart(opened: Recorder) -> None:
    with LLM(model_path(), SMALL) as one, LLM(model_path(), SMALL) as two:
        threads = [
            threading.Thread(target=llm.generate, args=([5, 6, index], GREEDY))
            for index, llm in enumerate((one, two))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = _read(opened)
    steps = [event for event in run.events if isinstance(event, Stepped)]
    assert sorted(event.step for event in steps) == list(range(1, 13))
    tensors = {one.id: one for one in run.tensors}
    of_engine: dict[int, set[int]] = {}
    for event in steps:  # each plan fills the buffers of one engine alone
        of_engine.setdefault(tensors[event.inputs[0].tensor].allocation, set()).add(event.plan)
    first, second = of_engine.values()
    assert not first & second
    assert len(steps[0].requests) == 1


def test_threads_do_not_write_into_each_other(opened: Recorder) -> None:
    def allocate() -> None:
        for _ in range(50):
            memory.free(memory.allocate("x", "test", DType.F32, (4,)))
            opened.record_host_write(1, 2)

    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run = _read(opened)
    assert len(run.events) == 600
    assert len({event.seq for event in run.events}) == 600


# -- the death of a process ----------------------------------------------------------------------


def test_a_process_that_is_killed_leaves_a_whole_record(runs: Path) -> None:
    assert len(kill_at_random(runs, num_kills=10, seed=7)) == 10
    # The last ones that died are kept, besides the one that has just died and the one that forks.
    assert len(ring.run_folders(runs)) == run_folder.MAX_DIED + 2


def _child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip


RUN = """
import os
from hypocenter.device import devices, memory
from hypocenter.record import recorder
from hypocenter.base.tensor import DType, Tensor
devices.open_device("cpu")
memory.allocate("x", "test", DType.F32, (4,))
"""


def test_off_writes_nothing(tmp_path: Path) -> None:
    done = _child(
        RUN + "print(recorder.current().is_on)",
        HYPO_RECORD="0",
        HYPO_RUN_DIR=str(tmp_path / "runs"),
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert not (tmp_path / "runs").exists()


def test_a_clean_end_is_told_from_a_death(tmp_path: Path) -> None:
    for end, is_clean in (("", True), ("os.abort()", False), ("os._exit(0)", False)):
        runs = tmp_path / end
        _child(RUN + end, HYPO_RUN_DIR=str(runs))
        (folder,) = ring.run_folders(runs)
        run = ring.read_run(folder)
        assert (run.is_clean, run.is_alive, len(run.events)) == (is_clean, False, 1)
        assert stat.S_IMODE(runs.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_fork_has_a_record_of_its_own(tmp_path: Path) -> None:
    fork = """
memory.allocate("before", "test", DType.F32, (4,))
if not (pid := os.fork()):
    assert not recorder.current().is_on
    devices.open_device("cpu")
    memory.allocate("child", "test", DType.F32, (4,))
    os.kill(os.getpid(), 9)
os.waitpid(pid, 0)
memory.allocate("after", "test", DType.F32, (4,))
"""
    done = _child("import warnings\nwarnings.simplefilter('ignore')" + RUN + fork,
                  HYPO_RUN_DIR=str(tmp_path))  # fmt: skip
    assert done.stderr == ""
    found = {}
    for folder in ring.run_folders(tmp_path):
        run = ring.read_run(folder)
        assert run.missing == ()
        found[run.is_clean] = [e.allocation.name for e in run.events if isinstance(e, Allocated)]
    assert found == {True: ["x", "before", "after"], False: ["child"]}


def test_an_interrupted_or_failed_run_is_no_clean_one(opened: Recorder) -> None:
    x = memory.allocate("x", "test", DType.F32, (4,))
    memory.free(x)
    with pytest.raises(CopyRejected):
        copies.to_host(x)
    recorder.close_recorder()
    run = ring.read_run(opened.folder)
    assert (run.is_clean, run.is_alive) == (False, False)
    assert ring.read_heartbeat(opened.folder) is not None


# -- old folders ---------------------------------------------------------------------------------


def _left(runs: Path, name: str, state: int | None, age: float = 0.0) -> Path:
    writer = RingWriter(runs / name, 1024)
    writer.close(state) if state else writer.release()
    then = time.time() - age
    os.utime(writer.folder / "ring", (then, then))
    return writer.folder


def test_old_folders_go_and_the_last_that_died_stay(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o700)
    alive = RingWriter(runs / "1-1", 1024)
    died = [_left(runs, f"2-{i}", [None, ring.FAILED][i % 2]) for i in range(7)]
    clean = _left(runs, "3-1", ring.ENDED)
    old = _left(runs, "4-1", ring.ENDED, age=run_folder.CLEAN_SECONDS + 9)
    (runs / "notes").mkdir()
    name = run_folder.claim_folder(runs)
    assert name.parent == runs
    assert not name.exists()
    kept = set(runs.iterdir())
    assert kept == {alive.folder, clean, runs / "notes", *died[-run_folder.MAX_DIED :]}
    assert not old.exists()
    alive.close()


def test_all_folders_together_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died = [_left(tmp_path, f"2-{i}", None) for i in range(3)]
    size = sum(file.stat().st_size for file in died[0].iterdir())
    monkeypatch.setattr(run_folder, "MAX_TOTAL_BYTES", 2 * size)
    run_folder.remove_old(tmp_path)
    assert ring.run_folders(tmp_path) == died[:0:-1]


def test_a_folder_that_others_may_read_is_refused_with_one_warning(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs.mkdir()
    (runs / "something").touch()
    runs.chmod(0o755)
    for _ in range(2):
        assert not recorder.open_recorder().is_on
    (warning,) = caplog.records
    assert "is open to others; chmod 700" in warning.getMessage()
    assert [path.name for path in runs.iterdir()] == ["something"]


# -- nothing that the recorder does breaks a run ---------------------------------------------------


@pytest.mark.parametrize("call", ["static", "event"])
def test_a_full_disk_is_told_once_and_the_run_goes_on(
    opened: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def full(*_: Any) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    with LLM(model_path(), SMALL) as llm:
        wanted = llm.generate([5, 6], GREEDY).token_ids
    monkeypatch.setattr(opened._writer, call, full)
    with LLM(model_path(), SMALL) as llm:
        assert llm.generate([5, 6], GREEDY).token_ids == wanted
    (warning,) = caplog.records
    assert "No space left" in warning.getMessage()
    recorder.close_recorder()
    assert "too large, or the log was full" in ring.read_run(opened.folder).missing[0].reason


def test_no_room_for_the_ring_is_no_reason_to_stop(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    devices.open_device("cpu")
    memory.allocate("x", "test", DType.F32, (4,))
    assert not recorder.current().is_on
    (warning,) = caplog.records
    assert "this run is not recorded" in warning.getMessage()
    assert list(runs.iterdir()) == []


def test_an_end_while_others_still_run_does_them_no_harm(opened: Recorder) -> None:
    with LLM(model_path(), SMALL) as llm:
        for _ in llm.stream([5, 6], GREEDY):
            opened.close()
            break
        assert llm.generate([5, 6], GREEDY).token_ids


# -- GPUs ------------------------------------------------------------------------------------------

SIM = "sim:h200"


@pytest.fixture
def sim(opened: Recorder, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(devices, "_backends", dict(devices._backends))
    monkeypatch.setattr(kernel_launch, "device", SIM)
    devices.use_backend(open_sim(SIM, graphs=True))
    return opened


def _turning(position: int = 1) -> Plan:
    """A plan of two launches with a mark behind each."""
    builder, x = PlanBuilder(1, SIM), rows_tensor("x", np.ones((1, 64), np.float32))
    table = tuple(tensor(name, np.zeros((8, 32), np.float32)) for name in ("cos", "sin"))
    where = tensor("positions", np.array([position], np.int32))
    for _ in range(2):
        rope.rotate(
            builder, x, where, (table[0], table[1]), counts(1), num_heads=1, head_dim=64,
            style="neox",
        )  # fmt: skip
        mark(builder)
    return Plan(builder, x)


def test_marks_say_how_far_a_device_has_come(sim: Recorder) -> None:
    plan = _turning()
    plan.run()
    progress = _read(sim).progress
    assert (progress.submitted, progress.completed) == (Place(1, 1, 1), None)
    copies.to_host(plan.result)
    assert _read(sim).progress.completed == Place(1, 1, 1)
    plan.run()  # is captured
    plan.run()  # is replayed
    run = _read(sim)
    assert run.progress.submitted == Place(3, 1, 1)
    assert run.progress.completed == Place(1, 1, 1)
    copies.to_host(plan.result)
    assert _read(sim).progress.completed == Place(3, 1, 1)
    (captured,) = (e for e in run.events if isinstance(e, Captured))
    steps = [(e.step, e.plan, e.graph) for e in run.events if isinstance(e, Stepped)]
    assert (captured.step, captured.plan) == (2, 1)
    assert steps == [(1, 1, 0), (2, 1, 0), (3, 1, captured.graph)]
    names = {e.allocation.id: e.allocation.name for e in run.events if isinstance(e, Allocated)}
    assert {names[one] for one in captured.allocations} == {
        "x",
        "positions",
        "cos",
        "sin",
        "counts",
    }


def test_a_fault_lies_between_what_ended_and_what_was_begun(sim: Recorder) -> None:
    plan = _turning()
    x = plan.launches[1].tensors["x"]
    faulty = plan.launches[1]
    wild = type(faulty.args[0])(1 << 50, "float32")
    plan.launches[1].run = lambda: faulty.function(wild, *faulty.args[1:], **faulty.options)
    plan.run()
    with pytest.raises(DeviceFault, match="copy_out"):
        copies.to_host(x)
    run = _read(sim)
    assert run.progress.completed == Place(1, 1, 0)
    assert run.progress.submitted == Place(1, 1, 1)
    (called,) = (e for e in run.events if isinstance(e, Called))
    assert (called.call, called.outcome) == ("copy_out", "an illegal memory access was encountered")
    (copied,) = (e for e in run.events if isinstance(e, Copied) and e.direction == "out")
    assert copied.seq < called.seq
    recorder.close_recorder()
    assert not ring.read_run(sim.folder).is_clean


def test_an_abort_of_the_driver_leaves_the_place(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parent), str(SUPPORT)]!r}
import test_recorder as t
from hypocenter.device import copies, devices
from hypocenter.record import recorder
t.SIM = t.kernel_launch.device = devices.open_device("sim:mi300x")
plan = t._turning()
one = plan.launches[1]
wild = type(one.args[0])(1 << 50, "float32")
one.run = lambda: one.function(wild, *one.args[1:], **one.options)
plan.run()
copies.to_host(plan.result)
"""
    done = _child(code, HYPO_RUN_DIR=str(tmp_path))
    assert done.returncode == -signal.SIGABRT, done.stderr
    (folder,) = ring.run_folders(tmp_path)
    run = ring.read_run(folder)
    assert (run.is_clean, run.missing) == (False, ())
    assert run.progress.completed == Place(1, 1, 0)
    assert run.progress.submitted == Place(1, 1, 1)
    last = run.events[-1]
    assert isinstance(last, Copied)
    tensors = {one.id: one for one in run.tensors}
    assert tensors[last.tensor or 0].name == "x"
    assert last.site.rpartition(":")[2].isdigit()


def test_streams_events_and_pinned_buffers_are_told(sim: Recorder) -> None:
    x = memory.allocate("x", "test", DType.F32, (4,), device=SIM)
    buffer = memory.allocate_pinned("staging", "test", DType.F32, (4,), device=SIM)
    copies.fill_pinned(buffer, np.arange(4, dtype=np.float32))
    with devices.stream(SIM, "copies"):
        copies.copy_in_pinned(x, buffer)
        done = devices.record_event(SIM)
    devices.wait_event(SIM, done)
    devices.synchronise(SIM)
    assert copies.to_host(x).tolist() == [0, 1, 2, 3]
    events = [e for e in _read(sim).events if isinstance(e, HostWrote | Copied | StreamEvent)]
    wrote, copied, recorded, waited, synchronised, out = (cast(Any, event) for event in events)
    assert (wrote.host_address, wrote.num_bytes) == (buffer.address, 16)
    assert (copied.is_pinned, copied.host_address, copied.stream) == (
        True,
        buffer.address,
        "copies",
    )
    assert (recorded.action, recorded.stream) == ("record", "copies")
    assert (waited.action, waited.event, waited.stream) == ("wait", recorded.event, "")
    assert (synchronised.action, out.direction) == ("synchronise", "out")
    kinds = {e.allocation.name: e.allocation.kind for e in _events(sim, Allocated)}
    assert kinds == {"x": "device", "staging": "pinned"}
    with pytest.raises(CopyRejected, match="into"):
        copies.copy_in_pinned(x, memory.allocate("y", "test", DType.F32, (5,)))


def test_a_pinned_buffer_that_is_changed_too_early_is_visible(sim: Recorder) -> None:
    x = memory.allocate("x", "test", DType.I32, (1,), device=SIM)
    buffer = memory.allocate_pinned("staging", "test", DType.I32, (1,), device=SIM)
    copies.fill_pinned(buffer, np.array([1], np.int32))
    copies.copy_in_pinned(x, buffer)
    copies.fill_pinned(buffer, np.array([2], np.int32))
    assert copies.to_host(x).tolist() == [2]  # the lab's defect
    kinds = [type(e) for e in _read(sim).events if isinstance(e, HostWrote | Copied)]
    assert kinds == [HostWrote, Copied, HostWrote, Copied]


def test_refusals_are_told_with_their_facts(sim: Recorder) -> None:
    x = memory.allocate("x", "test", DType.F32, (4,), device=SIM)
    half, where = (
        tensor("cos", np.zeros((8, 32), np.float32)), tensor("positions", np.array([1], np.int32)),
    )  # fmt: skip
    turned, live = rows_tensor("x", np.ones((1, 64), np.float32)), counts(1)
    with pytest.raises(LaunchRejected, match="head_dim"):
        rope.rotate(
            PlanBuilder(1, SIM), turned, where, (half, half), live, num_heads=1, head_dim=63,
            style="neox",
        )  # fmt: skip
    with pytest.raises(CopyRejected):
        copies.to_device(x, np.zeros(5, np.float32))
    with pytest.raises(OutOfMemory):
        memory.allocate("huge", "test", DType.F32, (1 << 40,), device=SIM)
    run = _read(sim)
    refused, copy, out = (e for e in run.events if isinstance(e, Rejected | Called))
    assert isinstance(refused, Rejected)
    assert (refused.kernel, "head_dim is 63" in str(refused.refusal)) == ("rope", True)
    assert refused.launch is not None
    facts = {fact.name: fact for fact in refused.launch.facts}
    assert facts["head_dim"].value == 63
    tensors = {one.id: one.name for one in run.tensors}
    assert tensors[facts["positions"].tensor or 0] == "positions"
    assert isinstance(copy, Rejected)
    assert (copy.what, "shape (5,) into (4,)" in str(copy.refusal)) == ("copy of x", True)
    assert isinstance(out, Called)
    assert "asked for" in out.outcome
    assert out.kind is ErrorKind.OUT_OF_MEMORY


def test_each_launch_names_its_own_contract(sim: Recorder) -> None:
    """Keys and values are expanded by one kernel, under contracts with the same facts."""

    def place(*shape: int) -> Tensor:
        return memory.allocate("cache", "test", DType.F32, shape, device=SIM)

    tables = tensor("block_tables", np.zeros((1, 4), np.int32))
    lengths, out = tensor("lengths", np.ones(1, np.int32)), place(1, 2, 64, 20)
    builder = PlanBuilder(1, SIM)
    for _ in range(2):
        unfused.expand_keys(builder, place(4, 2, 20, 16), tables, lengths, out)
        unfused.expand_values(builder, place(4, 2, 16, 32), tables, lengths, out)
    run_launches(builder.launches)
    with pytest.raises(LaunchRejected, match="a value must fit its row"):
        unfused.expand_values(builder, place(4, 2, 16, 16), tables, lengths, out)
    bundle = bundle_of_run(sim.folder)
    found = [event.launch for event in bundle.events if isinstance(event, Launched | Rejected)]
    keys, values = unfused.EXPAND_KEYS, unfused.EXPAND_VALUES
    wanted = [one.declaration for one in (keys, values, keys, values, values)]
    assert [launch and bundle.declaration(launch) for launch in found] == wanted
    assert list(bundle.contracts.values()) == wanted[:2]
    told = [claim.hypothesis for claim in contracts(Case(bundle))]
    open_ = [(one.cause, one.argument) for one in told if one.verdict is not Verdict.REFUTED]
    assert open_ == [(Cause.WRONG_STRIDE, "cache")]


def test_a_launch_over_the_limits_is_told_with_its_grid(sim: Recorder) -> None:
    x = memory.allocate("x", "test", DType.I64, (1,), device=SIM)
    facts = {"runs": x, "cell": x, "number": 1}
    with pytest.raises(LaunchRejected, match="grid"):
        PlanBuilder(1, SIM).add_gpu(
            mark_gpu.mark_kernel, x, x, 1, grid=(1, 70000), contract=mark_kernels.CONTRACT,
            facts=facts, BEGINS=True,
        )  # fmt: skip
    (refused,) = _events(sim, Rejected)
    assert (refused.launch.grid, refused.launch.num_warps) == ((1, 70000), 4)
    assert refused.launch.constants == {"BEGINS": True, "OVERLAPS": False}


def test_frees_and_launches_outside_of_plans_are_told(sim: Recorder) -> None:
    plan = _turning()
    run_launches(plan.launches[:1])
    (launched,) = _events(sim, Launched)
    assert (launched.launch.function, launched.launch.grid) == ("rope_kernel", (1, 1))
    assert launched.launch.constants["NEIGHBOURS"] is False
    names = [argument.name for argument in launched.launch.arguments]
    assert names[:4] == ["x_ptr", "counts_ptr", "positions_ptr", "cos_ptr"]
    sources = {source.id: source for source in _read(sim).sources}
    source = sources[launched.launch.source]
    assert "tl.load(counts_ptr)" in source.text
    called = {sources[one].function: sources[one].text for one in source.callees}
    assert list(called) == ["follow", "angles", "as_offset", "columns", "rotate"]
    assert "tl.load(positions_ptr" in called["angles"]
    x = plan.launches[0].tensors["x"]
    memory.free(x)
    (freed,) = _events(sim, Freed)
    assert freed.allocation == x.allocation.id
    assert "test_recorder.py" in freed.site


def test_a_launch_that_comes_again_is_told_as_itself(sim: Recorder) -> None:
    one, two = _turning().launches[0], _turning().launches[0]
    for launch, stream in ((one, ""), (one, ""), (two, ""), (one, ""), (one, "7"), (one, "")):
        sim.record_launch_outside_plans(launch, stream)
    launches = [event.launch for event in _events(sim, Launched)]
    told = [each.facts[0].tensor for each in launches]
    assert told[0] == told[1] == told[3] != told[2]
    assert [each.stream for each in launches] == ["", "", "", "", "7", ""]
    kept = weakref.ref(one)
    del one, launch
    assert kept() is None, "the record keeps memory alive"


# -- the kernel of a mark --------------------------------------------------------------------------


def test_the_word_of_a_mark(sim: Recorder) -> None:
    builder = PlanBuilder(1, SIM)
    runs_, cell = (
        memory.allocate(name, "test", DType.I64, (1,), device=SIM) for name in ("runs", "cell")
    )
    for number in (3, (1 << 31) - 1):
        builder.mark_by(
            mark_kernels.MARK, runs=runs_, cell=cell, number=number, begins=not builder.marks
        )
    for num_runs in (1, 2):
        for _, launch in builder.marks:
            launch.run()
            number = launch.args[2]  # type: ignore[attr-defined]
            assert copies.to_host(cell).item() == reference(num_runs, number)
    with pytest.raises(LaunchRejected, match="number is -1"):
        builder.mark_by(mark_kernels.MARK, runs=runs_, cell=cell, number=-1, begins=True)
    assert len(builder.marks) == 2


class _MarkedPlan:
    """As much of a plan on a GPU as a recorder looks at."""

    name, device, launches, host_launches, graph = "step", "cuda", (), (), 0

    def __init__(self, marks: Any, tag: int) -> None:
        self.marks, self.tag = marks, tag


def test_a_mark_of_a_gpu_is_looked_up_in_the_table_of_runs(opened: Recorder) -> None:
    cells = opened.header
    opened.device("cuda", None)  # when it is opened, and when it has its slot
    opened.mark_runs.claim("cuda")
    opened.device("cuda", None, 0)

    plan: Any = _MarkedPlan((1,), 77)
    places = [ring.place_of(opened.record_begin(plan)[1]) for _ in range(40)]
    cells[ring.CELL_PLACE] = ring.place_word(40, 1, 5)
    for run, wanted in ((40, places[39]), (20, places[19]), (5, None)):
        cells[ring.CELL_MARK] = reference(run, 77 << 16 | 3)
        completed = ring.read_run(opened.folder).progress.completed
        assert completed == (Place(wanted.step, 1, 3) if wanted else None)
    cells[ring.CELL_MARK] = reference(40, 78 << 16 | 3)  # another plan's
    assert ring.read_run(opened.folder).progress.completed is None


class _Runtime:
    """`torch.cuda.cudart()`: a runtime that maps host memory, or cannot."""

    def __init__(self, outcome: int) -> None:
        self.outcome = outcome
        self.mapped: list[tuple[int, int, int]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.mapped.append((address, num_bytes, flags))
        return self.outcome


@pytest.mark.parametrize("outcome", [0, 1])
def test_marks_of_a_gpu_lie_in_the_header_of_the_ring(
    opened: Recorder, monkeypatch: pytest.MonkeyPatch, outcome: int
) -> None:
    monkeypatch.setattr(devices, "_backends", dict(devices._backends))
    torch, runtime = FakeTorch(), _Runtime(outcome)
    torch.cuda.cudart = lambda: runtime  # type: ignore[attr-defined]
    gpu = TorchGpu("cuda", torch, 0, named_gpu("h200"))
    devices.use_backend(gpu)
    builder = PlanBuilder(1, "cuda")
    builder.launches.append(cast(Any, None))
    mark(builder)
    mark(builder)
    ((address, num_bytes, flags),) = runtime.mapped
    assert (address % 4096, num_bytes, flags) == (0, ring.HEADER_BYTES, 3)
    if outcome:
        assert builder.marks == []
        # torch has been asked for the error, which is not that of the next call.
        assert "empty" in torch.cuda.calls
        return
    first, second = (cast(Any, one) for _, one in builder.marks)
    assert (first.options["BEGINS"], second.options["BEGINS"]) == (True, False)
    cell = first.args[1]
    cell[0] = 12345
    assert opened.header[ring.CELL_MARK] == 12345
    # A capture notes in which allocation each argument lies.
    assert gpu.base_of(cell.data_ptr()) == address
    assert [device.slot for device in _read(opened).devices] == [None, 0]
    # A plan that is refused before its first mark has begun a run all the same.
    plan: Any = _MarkedPlan(builder.marks, builder.tag)
    opened.record_begin(plan)
    opened.record_begin(plan)
    marks.catch_up("cuda")
    assert first.args[0].tolist() == [2]


@pytest.mark.parametrize(("num_layers", "num_marks"), [(1, 1), (11, 3), (22, 3), (32, 4)])
def test_a_deep_model_has_few_marks(
    monkeypatch: pytest.MonkeyPatch, num_layers: int, num_marks: int
) -> None:
    placed: list[Any] = []
    monkeypatch.setattr(mark_kernels, "mark", placed.append)
    for index in range(num_layers):
        mark_kernels.mark_layer(cast(Any, None), index, num_layers)
    assert len(placed) == num_marks <= mark_kernels.MAX_LAYER_MARKS


def test_the_beat_of_the_heart_is_that_of_the_engines_steps(
    opened: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def walk(self: Plan) -> None:
        beat = ring.read_heartbeat(opened.folder)
        assert beat is not None
        seen.append((beat.step, beat.step_started_ns))
        original(self)

    original = Plan.run
    monkeypatch.setattr(Plan, "run", walk)
    before = time.monotonic_ns()
    with LLM(model_path(), SMALL) as llm:
        llm.generate([5, 6], GREEDY)
    assert [step for step, _ in seen] == list(range(1, 7))
    starts = [started or 0 for _, started in seen]
    assert before <= starts[0] < starts[1] <= time.monotonic_ns()
    beat = ring.read_heartbeat(opened.folder)
    assert beat is not None
    assert beat.step_started_ns is None


def test_a_variable_that_is_no_switch_is_refused() -> None:
    done = _child(RUN, HYPO_RECORD="maybe")
    assert "HYPO_RECORD is 'maybe', but must be 0 or 1" in done.stderr
