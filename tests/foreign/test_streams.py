"""What a torch program's streams use without order, and what they use with it."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from numbers_seen import native_ops, seen_natively
from pretended import pretend_streams
from pretended.pretend_streams import PretendGpu, Stream

from hypocenter.foreign import caller
from hypocenter.foreign.streams.kernel_uses import uses_of
from hypocenter.record.order_events import Disorder

LINES = Path(__file__).read_text().splitlines()


@pytest.fixture(params=["in Python", pytest.param("natively", marks=pytest.mark.tier("sim"))])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendGpu]:
    """Each program is seen both ways, and the same is found."""
    whose = caller._whose
    monkeypatch.setattr(
        caller,
        "_whose",
        lambda file: caller._Whose.NOBODYS if file == pretend_streams.__file__ else whose(file),
    )
    if request.param == "in Python":
        with PretendGpu() as made:
            yield made
        return
    with seen_natively(), PretendGpu(native_ops()) as made:
        yield made


def line_of(site: str) -> str:
    """What stands at file:line of this file."""
    file, _, line = site.rpartition(":")
    assert file == __file__
    return LINES[int(line) - 1].strip()


def kinds(gpu: PretendGpu) -> list[Disorder]:
    return [one.kind for one in gpu.found]


@pytest.mark.parametrize("waits", [False, True])
def test_another_stream_reads_what_was_just_written(gpu: PretendGpu, waits: bool) -> None:
    side = Stream(gpu)
    x = gpu.on_gpu(torch.zeros(64))
    gpu.default.synchronize()
    x.add_(1)
    if waits:
        side.wait_stream(gpu.default)
    with gpu.stream(side):
        y = x * 2
    gpu.default.wait_stream(side)
    assert y.sum().item() == 128
    if waits:
        assert gpu.found == []
        return
    [found] = gpu.found
    assert found.kind is Disorder.WAIT
    assert (line_of(found.first.site), found.first.is_write) == ("x.add_(1)", True)
    assert (line_of(found.second.site), found.second.is_write) == ("y = x * 2", False)
    assert found.tensor == "x"
    assert (found.first.stream_name, found.second.stream_name) == (
        "torch.cuda.default_stream()",
        "side",
    )
    assert found.is_whole
    assert not found.is_cut


@pytest.mark.parametrize("waits", [False, True])
def test_a_result_is_read_before_the_other_stream_has_written_it(
    gpu: PretendGpu, waits: bool
) -> None:
    side, x = Stream(gpu), gpu.on_gpu(torch.ones(64))
    side.wait_stream(gpu.default)
    with gpu.stream(side):
        y = x * 2
        done = side.record_event()
    if waits:
        gpu.default.wait_event(done)
    assert (y + 1).shape == (64,)
    assert kinds(gpu) == ([] if waits else [Disorder.WAIT])


def test_parts_of_one_tensor_in_streams_of_their_own(gpu: PretendGpu) -> None:
    streams = [Stream(gpu) for _ in range(4)]
    x = gpu.on_gpu(torch.ones(16, 16))
    out = torch.empty_like(x)
    for number, stream in enumerate(streams):
        stream.wait_stream(gpu.default)
        with gpu.stream(stream):
            out[:, 4 * number : 4 * number + 4].copy_(x[:, 4 * number : 4 * number + 4] * 2)
    for stream in streams:
        gpu.default.wait_stream(stream)
    assert out.sum().item() == 512
    assert gpu.found == []


def test_parts_that_overlap(gpu: PretendGpu) -> None:
    side = Stream(gpu)
    out = torch.empty_like(gpu.on_gpu(torch.ones(16, 16)))
    side.wait_stream(gpu.default)
    out[:, :9].fill_(1)
    with gpu.stream(side):
        out[:, 8:].fill_(2)
    assert kinds(gpu) == [Disorder.WAIT]


@pytest.mark.parametrize("way", ["nothing", "record_stream", "wait", "keep"])
def test_memory_is_freed_while_another_stream_reads_it(gpu: PretendGpu, way: str) -> None:
    side = Stream(gpu)
    x: Any = gpu.on_gpu(torch.ones(1024))
    side.wait_stream(gpu.default)
    with gpu.stream(side):
        y = x * 2
    if way == "record_stream":
        gpu.watch._keep_for(x, side)
    kept = x if way == "keep" else None
    del x
    if way == "wait":
        gpu.default.wait_stream(side)
    z = gpu.on_gpu(torch.ones(1024))
    gpu.default.wait_stream(side)
    assert (y + z).shape == (1024,)
    if way != "nothing":
        assert gpu.found == []
        return
    assert kept is None
    [found] = gpu.found
    assert found.kind is Disorder.REUSED
    assert line_of(found.first.site) == "y = x * 2"
    assert line_of(found.freed) == "del x"
    assert line_of(found.second.site) == "z = gpu.on_gpu(torch.ones(1024))"


@pytest.mark.parametrize("waits", [False, True])
def test_a_pinned_buffer_is_rewritten_while_it_is_copied(gpu: PretendGpu, waits: bool) -> None:
    buffer = gpu.pinned(torch.zeros(64))
    x = torch.empty_like(gpu.on_gpu(torch.zeros(64)))
    for step in range(2):
        buffer.fill_(step)
        x.copy_(buffer, non_blocking=True)
        if waits:
            gpu.default.synchronize()
    assert kinds(gpu) == ([] if waits else [Disorder.HOST_WRITE])
    if not waits:
        assert line_of(gpu.found[0].second.site) == "buffer.fill_(step)"


@pytest.mark.parametrize("way", ["nothing", "wait", "pageable", "blocking"])
def test_the_host_reads_what_is_still_copied_to_it(gpu: PretendGpu, way: str) -> None:
    x = gpu.on_gpu(torch.ones(64))
    there = torch.zeros(64)
    host = there if way == "pageable" else gpu.pinned(there)
    host.copy_(x, non_blocking=way != "blocking")
    if way == "wait":
        gpu.default.synchronize()
    assert host.sum() == 64
    assert kinds(gpu) == ([Disorder.HOST_READ] if way == "nothing" else [])


def test_a_number_that_is_asked_for_is_waited_for(gpu: PretendGpu) -> None:
    side, x = Stream(gpu), gpu.on_gpu(torch.ones(64))
    x.add_(1)
    assert x[0].item() == 2
    with gpu.stream(side):
        x.mul_(2)
    assert gpu.found == []


def test_a_view_uses_nothing_and_an_alias_is_the_same_memory(gpu: PretendGpu) -> None:
    side, x = Stream(gpu), gpu.on_gpu(torch.ones(64))
    x.add_(1)
    alias = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))  # type: ignore[attr-defined]
    gpu.mark(alias)
    with gpu.stream(side):
        part = alias.view(8, 8)[2:]
        assert gpu.found == []
        part.mul_(2)
    assert kinds(gpu) == [Disorder.WAIT]


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_graph_uses_it_uses_when_it_is_replayed(gpu: PretendGpu, waits: bool) -> None:
    side, x = Stream(gpu), gpu.on_gpu(torch.ones(64))
    gpu.default.synchronize()

    class Graph:
        """Stands for torch's."""

    graph = Graph()
    gpu.watch.capture_begins(graph)
    with gpu.stream(side):
        y = x * 2
    gpu.watch.capture_ends()
    assert gpu.found == []
    x.copy_(gpu.on_gpu(torch.zeros(64)))
    if waits:
        side.wait_stream(gpu.default)
    with gpu.stream(side):
        gpu.watch.note_replay(graph, None)
    assert kinds(gpu) == ([] if waits else [Disorder.WAIT])
    assert y.shape == (64,)


@triton.jit
def put(x_ptr, at, value):  # type: ignore[no-untyped-def]
    tl.store(x_ptr + at, value)


@triton.jit
def mixed(x_ptr, y_ptr, z_ptr, w_ptr, d_ptr, n):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 64)
    x = tl.load(x_ptr + at, mask=at < n)
    out = y_ptr
    out += at
    tl.store(out, x)
    put(z_ptr, tl.load(w_ptr), x)
    rows = tl.make_tensor_descriptor(d_ptr, [n], [1], [64])
    rows.store([0], rows.load([0]) + x)


@pytest.mark.parametrize("way", ["nothing", "wait", "other memory"])
def test_the_host_rewrites_what_a_kernel_reads_directly(gpu: PretendGpu, way: str) -> None:
    # No copy stands between: the kernel reads the host's pinned memory itself.
    table, out = gpu.pinned(torch.zeros(64)), gpu.on_gpu(torch.zeros(64))
    given = {"x_ptr": table, "y_ptr": out}
    gpu.watch.launch(mixed, given, 1, f"{__file__}:1", None)
    if way == "wait":
        gpu.default.synchronize()
    written = gpu.pinned(torch.zeros(64)) if way == "other memory" else table
    written.fill_(2)
    if way != "nothing":
        assert gpu.found == []
        return
    [found] = gpu.found
    assert (found.kind, found.first.what) == (Disorder.HOST_WRITE, "mixed")
    assert (found.first.argument, found.first.is_write) == ("x_ptr", False)
    assert line_of(found.second.site) == "written.fill_(2)"


def test_what_a_kernel_reads_and_writes_by_its_text() -> None:
    found = {name: used for name, used in uses_of(mixed).items() if name.endswith("_ptr")}
    assert found == {
        "x_ptr": (True, False),
        "y_ptr": (False, True),
        "z_ptr": (False, True),
        "w_ptr": (True, False),
        "d_ptr": (True, True),
    }
