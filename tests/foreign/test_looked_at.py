"""A run with `--suspect` on a GPU: what small tensors hold is read back before each launch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended.fake_gpu_tensors import JIT, FakeTensor, Launching, Storage

from hypocenter.foreign import hooks
from hypocenter.foreign.argument_facts import UNDEFINED, mark_undefined
from hypocenter.foreign.recorder import ForeignRecorder, LaunchPlace
from hypocenter.foreign.seen_reads import SeenReads, watch_reads
from hypocenter.record import ring
from hypocenter.record.contents import Snapshot
from hypocenter.record.events import Launched
from hypocenter.record.trace_log import read_trace
from hypocenter.watch.foreign_runs import unseen


class Held(FakeTensor):
    """A tensor of a GPU that is not there; what it holds comes from memory of the host."""

    num_reads = 0

    def __init__(self, address: int, held: torch.Tensor) -> None:
        num_bytes = held.numel() * held.element_size()
        super().__init__(Storage(address, num_bytes), tuple(held.shape), held.dtype)
        self.held = held

    def numel(self) -> int:
        return self.held.numel()

    def is_contiguous(self) -> bool:
        return True

    def detach(self) -> Held:
        return self

    def cpu(self) -> torch.Tensor:
        Held.num_reads += 1
        return self.held


class Graph:
    """Stands for a graph of torch's."""


@pytest.fixture
def looking(tmp_path: Path) -> ForeignRecorder:
    Held.num_reads = 0
    return ForeignRecorder(tmp_path, looks_closely=True)


def held_by(recorder: ForeignRecorder) -> list[Snapshot]:
    return list(read_trace(recorder.folder).snapshots)


def unwritten(*shape: int) -> torch.Tensor:
    """As `mark_undefined` leaves new memory."""
    made = torch.empty(*shape)
    made.view(torch.uint8).fill_(UNDEFINED)
    return made


def test_small_tensors_are_read_before_each_launch(looking: ForeignRecorder) -> None:
    ids, out = torch.arange(6, dtype=torch.int32), unwritten(4)
    out[1] = 5
    launch = Launching(looking)
    for number in range(2):  # the second is like the first, and is told in full all the same
        ids[0] = 40 + number
        launch[(2,)](Held(0x1000, ids), Held(0x2000, out), 6)
    first, second = held_by(looking)
    for snapshot, number in ((first, 40), (second, 41)):
        integers, floats = snapshot.values
        assert torch.frombuffer(bytearray(integers.data), dtype=torch.int32)[0] == number
        written = torch.frombuffer(bytearray(floats.data), dtype=torch.float32)
        assert written.isnan().tolist() == [True, False, True, True]
        assert written[1] == 0  # what it is, is the program's own business
    run = ring.read_run(looking.folder)
    assert sum(isinstance(event, Launched) for event in run.events) == 2
    [device] = run.devices
    assert device.is_read_back
    assert any("integers of up to 65536 bytes" in gap.what for gap in unseen(run))


def test_nothing_is_read_while_a_graph_is_captured_nor_of_large_tensors(
    looking: ForeignRecorder,
) -> None:
    launch = Launching(looking)
    large = Held(0x1000, torch.zeros(1 << 15, dtype=torch.int32))
    launch[(2,)](large, large, 6)
    launch.graph = Graph()
    looking.record_capture(launch.graph)
    small = Held(0x2000, torch.zeros(4, dtype=torch.int32))
    launch[(2,)](small, small, 6)
    assert Held.num_reads == 0
    assert held_by(looking) == []


def test_a_run_that_is_not_suspected_reads_nothing_of_a_gpu(tmp_path: Path) -> None:
    Held.num_reads = 0
    recorder = ForeignRecorder(tmp_path)
    small = Held(0x2000, torch.zeros(4, dtype=torch.int32))
    Launching(recorder)[(2,)](small, small, 6)
    assert Held.num_reads == 0
    assert not ring.read_run(recorder.folder).devices[0].is_read_back


class OfGpu:
    """A new tensor of a GPU that is not there."""

    dtype, device = torch.float32, torch.device("cuda")

    def __init__(self) -> None:
        self.filled: list[int] = []

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: 64, fill_=self.filled.append)


@pytest.mark.parametrize("is_capturing", [False, True])
def test_new_memory_of_a_gpu_is_filled_but_not_in_a_graph(is_capturing: bool) -> None:
    made = OfGpu()
    OfGpu.new_empty = None  # type: ignore[attr-defined]
    cuda = SimpleNamespace(is_current_stream_capturing=lambda: is_capturing)
    fake = SimpleNamespace(
        empty=lambda: made, empty_like=None, empty_strided=None, cuda=cuda, Tensor=OfGpu,
        compiler=torch.compiler,
    )  # fmt: skip
    mark_undefined(fake)
    assert fake.empty() is made
    assert made.filled == [UNDEFINED] * (not is_capturing)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own functions, marked for the time of a test."""
    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))
    mark_undefined(torch)


@pytest.mark.usefixtures("marked")
def test_a_program_makes_its_tensors_as_it_would_without() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.ones(3).new_empty(2).isnan().all()
    # What is there already is not touched, nor what is too large to be looked at.
    held = torch.ones(6)
    torch.empty(2, out=held[:2])
    assert held.tolist() == [1.0] * 6
    large = torch.empty(1 << 15)
    assert not large.isnan().all()
    assert torch.empty(3, 3, layout=torch.sparse_coo).is_sparse
    rows = torch.ones(4, 3)
    assert torch.equal(torch.vmap(lambda row: torch.empty_like(row).copy_(row))(rows), rows)
    exported = torch.export.export(Emptying(), (torch.ones(3),), strict=True).graph
    assert [str(node.target) for node in exported.nodes if node.op == "call_function"] == [
        "aten.empty_like.default", "aten.copy_.default",
    ]  # fmt: skip


class Emptying(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x).copy_(x)


def test_torch_is_not_asked_what_it_reads_while_a_graph_is_captured(
    looking: ForeignRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks._State, "recorder", looking)
    assert hooks._reads() is looking.reads
    monkeypatch.setattr(hooks._State, "graphs", SimpleNamespace(captured_into=Graph()))
    assert hooks._reads() is None


@pytest.mark.parametrize(("interpreted", "is_new"), [("0", True), ("0", False), ("1", False)])
def test_reads_are_watched_unless_torch_would_compile_nothing(
    monkeypatch: pytest.MonkeyPatch, interpreted: str, is_new: bool
) -> None:
    """Older versions of torch compile nothing below a mode that they do not know."""
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    entered: list[Any] = []
    mode: Any = type("Mode", (), {"__enter__": lambda self: entered.append(self)})
    if is_new:
        mode.ignore_compile_internals = None
    tensor = type("Tensor", (), {"tolist": len, "numpy": len})
    plain = tensor.__repr__
    fake: Any = SimpleNamespace(
        utils=SimpleNamespace(_python_dispatch=SimpleNamespace(TorchDispatchMode=mode)),
        Tensor=tensor,
    )
    monkeypatch.setattr(SeenReads, "is_watching", False)
    watch_reads(fake, lambda: None, lambda do, *args: do(*args))
    is_watched = is_new or interpreted == "1"
    assert len(entered) == is_watched
    assert SeenReads.is_watching == is_watched
    assert (tensor.__repr__ is not plain) == is_watched


def test_of_a_guarded_launch_small_floats_are_kept_as_well(tmp_path: Path) -> None:
    recorder = ForeignRecorder(tmp_path, is_guarded=True)
    small, large = torch.arange(8.0), torch.zeros(1 << 15)
    given = {"x_ptr": Held(0x1000, small), "out_ptr": Held(0x2000, large)}
    place = LaunchPlace("cuda:0")
    made = recorder.record_launch(JIT, (*given.values(), 8), {"BLOCK": 64}, (1,), place)
    assert made is not None
    recorder.record_guarded(made, (), given)
    [snapshot] = held_by(recorder)
    [values] = snapshot.values
    assert torch.equal(torch.frombuffer(bytearray(values.data), dtype=torch.float32), small)
