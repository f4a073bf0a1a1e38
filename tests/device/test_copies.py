"""Copies between host and device: what is refused before it begins, and what a log tells of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_launch import counts, rows_tensor, tensor

from hypocenter.base.errors import CopyRejected, DeviceFault
from hypocenter.base.refusals import FreedTensor
from hypocenter.base.tensor import Allocation, DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.device.launch import run
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.device.sim.sim import SimGpu, open_sim
from hypocenter.device.stream_order import AddressRange, StreamClocks, Writes
from hypocenter.kernels.rowwise import activation
from hypocenter.record import recorder, ring
from hypocenter.record.events import Rejected

SIM, OTHER = "sim:h200", "sim:mi300x"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimGpu:
    monkeypatch.setattr(devices, "_backends", {})
    monkeypatch.setattr(kernel_launch, "device", SIM)
    devices.use_backend(open_sim(OTHER))
    made = open_sim(SIM)
    devices.use_backend(made)
    return made


@pytest.fixture
def record(gpu: SimGpu) -> Iterator[recorder.Recorder]:
    recorder.close_recorder()
    found = recorder.open_recorder()
    assert isinstance(found, recorder.Recorder)
    yield found
    recorder.close_recorder()


def ids(count: int = 4) -> Tensor:
    return tensor("ids", np.arange(count, dtype=np.int32))


def at(tensor: Tensor, **facts: Any) -> Tensor:
    """The same tensor in an allocation of which one fact is another."""
    old = tensor.allocation
    known: dict[str, Any] = {
        "device": old.device, "num_bytes": old.num_bytes, "address": old.address, **facts
    }  # fmt: skip
    return replace(tensor, allocation=Allocation(old.id, site="here.py:5", **known))


def freed(made: Tensor) -> Tensor:
    memory.free(made)
    return made


def packed() -> Tensor:
    return kernel_launch.weight_tensor(
        DType.Q8_0, kernel_launch.random_rows(DType.Q8_0, 1, 32), 32
    )  # fmt: skip


#: A tensor that no copy may touch, whichever way it goes, and what is said of it.
WRONG: list[tuple[str, Callable[[], Tensor], str]] = [
    ("freed", lambda: freed(ids()), r"was freed at .*test_copies\.py:\d+; copy it before that"),
    ("null", lambda: at(ids(), address=0),
     r"is null: its allocation, made at here\.py:5, has no address for 16 bytes; allocate"),
    ("beyond", lambda: at(ids(), num_bytes=8),
     r"reaches from byte 0 to byte 16, but its allocation, made at here\.py:5, has 8; allocate"),
    ("beyond by its offset", lambda: replace(ids(), offset=1),
     r"reaches from byte 4 to byte 20, but its allocation, made at .*, has 16"),
    ("before", lambda: replace(ids(), offset=-1), r"reaches from byte -4 to byte 12"),
    ("misaligned", lambda: at(ids(), address=ids().address + 2),
     r"lies at 0x\w+, but I32 needs a multiple of 4; begin at a whole element"),
    ("strided", lambda: replace(ids(), shape=(2,), strides=(2,)),
     r"has strides \(2,\), but a copy takes contiguous tensors"),
    ("packed", packed, r"is Q8_0, or a packed weight, but a copy takes plain elements of F32"),
    ("not open", lambda: at(ids(), device="hip:1"),
     r"is on hip:1, which is not open here \(open: cpu, sim:mi300x, sim:h200\); open_device it"),
    ("of another device", lambda: at(ids(), device=OTHER),
     r"is taken to be on sim:mi300x, but lies at 0x\w+, which is memory of sim:h200; copy it by"),
    ("of the host", lambda: at(ids(), address=ids().address + (1 << 50)),
     r"is taken to be on sim:h200, but lies at 0x\w+, where nothing of sim:h200 begins"),
]  # fmt: skip


def values_for(tensor: Tensor) -> np.ndarray[Any, Any]:
    return np.zeros(tensor.shape, copies.NUMPY_TYPES.get(tensor.dtype, np.float32))


@pytest.mark.parametrize("way", ["out", "in", "pinned"])
@pytest.mark.parametrize(("make", "says"), [row[1:] for row in WRONG], ids=[r[0] for r in WRONG])
def test_a_copy_that_cannot_be_right_is_not_begun(
    gpu: SimGpu, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Tensor], says: str, way: str
) -> None:
    wrong = make()
    buffer = memory.allocate_pinned("staging", "test", DType.I32, (4,), device=SIM)
    begun: list[str] = []
    for call in ("copy_out", "copy_in"):
        monkeypatch.setattr(SimGpu, call, lambda *given, _call=call, **_: begun.append(_call))
    copy: Callable[[], object] = {
        "out": lambda: copies.to_host(wrong),
        "in": lambda: copies.to_device(wrong, values_for(wrong)),
        "pinned": lambda: copies.copy_in_pinned(wrong, buffer),
    }[way]
    with pytest.raises(CopyRejected, match=rf"copy of {wrong.name} \(test\): {says}") as caught:
        copy()
    assert begun == []
    assert (caught.value.tensor, caught.value.owner) == (wrong.name, "test")
    assert copies.peek(wrong) is None


def test_no_tensor_at_all() -> None:
    nothing: Any = None
    for copy in (copies.to_host, lambda one: copies.to_device(one, np.zeros(1, np.float32))):
        with pytest.raises(CopyRejected, match="copy of a tensor: is null"):
            copy(nothing)


def test_a_refusal_is_in_the_record(record: recorder.Recorder) -> None:
    with pytest.raises(CopyRejected):
        copies.to_host(freed(ids()))
    run = ring.read_run(record.folder)
    (refused,) = (event for event in run.events if isinstance(event, Rejected))
    assert (refused.kernel, refused.tensor) == ("", "ids")
    assert isinstance(refused.refusal, FreedTensor)
    looked = {check.name: check.num_runs for check in run.checks}
    assert looked["host copies"] >= 2


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (np.zeros(3, np.int32), r"shape \(4,\), 16 bytes, into \(3,\), 12 bytes; make it np.empty"),
        (np.zeros((2, 2), np.int32), r"shape \(4,\), 16 bytes, into \(2, 2\), 16 bytes"),
        (np.zeros(4, np.int64), r"I32 into int64; make it int32"),
        (np.zeros(8, np.int32)[::2], "not contiguous or not writable"),
        (np.frombuffer(bytes(16), np.int32), "not contiguous or not writable"),
        ([0, 0, 0, 0], r"into \[0, 0, 0, 0\], which is no array of the host"),
    ],
)
@pytest.mark.parametrize("device", [SIM, "cpu"])
def test_a_destination_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, device: str, out: Any, says: str
) -> None:
    monkeypatch.setattr(kernel_launch, "device", device)
    with pytest.raises(CopyRejected, match=rf"copy of ids \(test\): .*{says}"):
        copies.to_host(ids(), out=out)


@pytest.mark.parametrize("device", [SIM, "cpu"])
def test_a_destination_that_fits(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(kernel_launch, "device", device)
    out = np.zeros(3, np.int32)
    assert copies.to_host(ids(), 3, out=out) is out
    assert out.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (np.zeros(5, np.int32), r"shape \(5,\) into \(4,\); give less"),
        (np.zeros((1, 4), np.int32), r"shape \(1, 4\) into \(4,\)"),
        (np.zeros(4, np.int16), "int16 values for I32; give them as int32"),
        ([1, 2], r"\[1, 2\] is no array of the host"),
    ],
)
@pytest.mark.parametrize("device", [SIM, "cpu"])
def test_values_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, device: str, values: Any, says: str
) -> None:
    monkeypatch.setattr(kernel_launch, "device", device)
    made = ids()
    with pytest.raises(CopyRejected, match=rf"copy of ids \(test\): {says}"):
        copies.to_device(made, values)
    with pytest.raises(CopyRejected, match="is no array of the host"):
        copies.to_device(made, made)  # type: ignore[arg-type]
    assert copies.to_host(made).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("device", [SIM, "cpu"])
def test_sizes_that_are_no_sizes(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(kernel_launch, "device", device)
    for num_rows in (-1, 5):
        with pytest.raises(CopyRejected, match=rf"{num_rows} rows, but it has 4; ask for 0 to"):
            copies.to_host(ids(), num_rows)
    assert copies.to_host(ids(), 0).shape == (0,)
    empty = memory.allocate("empty", "test", DType.F32, (0, 64), device=device)
    assert copies.to_host(empty).shape == (0, 64)
    copies.to_device(empty, np.zeros((0, 64), np.float32))


@pytest.mark.parametrize("device", [SIM, "cpu"])
def test_rows_that_are_not_there(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(kernel_launch, "device", device)
    made = ids()
    for start, stop in ((-1, 2), (3, 2), (2, 5)):
        with pytest.raises(CopyRejected, match=rf"ids .*rows {start}:{stop}, but it has 4"):
            memory.rows(made, start, stop)
    assert copies.to_host(memory.rows(made, 3, 4)).tolist() == [3]


def test_stretches_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "device", "cpu")
    made = ids(6)
    for start, stop in ((-1, 3), (3, 7), (7, 11)):
        with pytest.raises(CopyRejected, match=rf"ids .*elements {start}:{stop}, but it has 6"):
            memory.stretch(made, (2, 2), start)
    assert copies.to_host(memory.stretch(made, (2, 2), 2)).tolist() == [[2, 3], [4, 5]]


def test_copies_between_the_wrong_sides() -> None:
    gpus, buffer = ids(), memory.allocate_pinned("staging", "test", DType.I32, (4,), device=SIM)
    for target, source in ((gpus, ids()), (buffer, buffer)):
        with pytest.raises(CopyRejected, match="give a pinned one of the host for a GPU's"):
            copies.copy_in_pinned(target, source)
    with pytest.raises(CopyRejected, match="make them alike"):
        copies.copy_in_pinned(ids(3), buffer)


# -- order -----------------------------------------------------------------------------------------


def doubled() -> tuple[Plan, Tensor]:
    """A plan of one launch that doubles x."""
    builder, x = PlanBuilder(1, SIM), rows_tensor("x", np.ones((1, 64), np.float32))
    activation.scale(builder, x, 2.0, counts(1))
    devices.synchronise(SIM)
    return Plan(builder, x), x


UNWAITED = (
    r"copy of x \(test\): is still being written by scale in stream side, which stream default has "
    r"not waited for; record_event there and wait_event here, or synchronise\('sim:h200'\)"
)


@pytest.mark.parametrize("by", ["plan", "launch"])
def test_a_tensor_that_another_stream_still_writes(by: str) -> None:
    plan, x = doubled()
    with devices.stream(SIM, "side"):
        plan.run() if by == "plan" else run(plan.launches)
    with pytest.raises(CopyRejected, match=UNWAITED):
        copies.to_host(x)
    assert copies.to_host(ids()).tolist() == [0, 1, 2, 3]  # nobody writes that one


def test_a_copy_in_of_another_stream_counts_where_it_writes() -> None:
    whole = memory.allocate("x", "test", DType.F32, (4, 64), device=SIM)
    devices.synchronise(SIM)
    with devices.stream(SIM, "side"):
        copies.to_device(memory.rows(whole, 2, 4), np.ones((1, 64), np.float32))
    assert copies.to_host(whole, 2).sum() == 0
    assert copies.to_host(memory.rows(whole, 3, 4)).sum() == 0
    for view in (whole, memory.rows(whole, 2, 3)):
        with pytest.raises(CopyRejected, match="written by a copy to the device in stream side"):
            copies.to_host(view)


def waits_for_event(x: Tensor) -> None:
    with devices.stream(SIM, "side"):
        event = devices.record_event(SIM)
    devices.wait_event(SIM, event)


def waits_for_a_stream_that_waited(x: Tensor) -> None:
    with devices.stream(SIM, "side"):
        first = devices.record_event(SIM)
    with devices.stream(SIM, "third"):
        devices.wait_event(SIM, first)
        second = devices.record_event(SIM)
    devices.wait_event(SIM, second)


def waits_for_all(x: Tensor) -> None:
    devices.synchronise(SIM)


def reads_it_there_first(x: Tensor) -> None:
    with devices.stream(SIM, "side"):
        copies.to_host(x)


@pytest.mark.parametrize(
    "wait", [waits_for_event, waits_for_a_stream_that_waited, waits_for_all, reads_it_there_first]
)
def test_what_was_waited_for_is_copied(wait: Callable[[Tensor], None]) -> None:
    plan, x = doubled()
    with devices.stream(SIM, "side"):
        plan.run()
    wait(x)
    assert (copies.to_host(x) == 2).all()


def test_an_event_from_before_the_launch_is_no_wait() -> None:
    plan, x = doubled()
    with devices.stream(SIM, "side"):
        event = devices.record_event(SIM)
        plan.run()
    devices.wait_event(SIM, event)
    devices.wait_event(SIM, devices.DeviceEvent(99, SIM, event.handle))  # one that nobody recorded
    with pytest.raises(CopyRejected, match=UNWAITED):
        copies.to_host(x)


def test_the_default_stream_is_waited_for_by_others_too() -> None:
    plan, x = doubled()
    plan.run()
    with (
        devices.stream(SIM, "side"),
        pytest.raises(CopyRejected, match="in stream default, which stream side has not waited"),
    ):
        copies.to_host(x)
    assert (copies.to_host(x) == 2).all()


def test_whoever_looks_on_is_not_refused() -> None:
    plan, x = doubled()
    with devices.stream(SIM, "side"):
        plan.run()
    seen = copies.peek(x)
    assert seen is not None
    assert (seen == 2).all()


def test_without_checks_the_device_is_asked(record: recorder.Recorder) -> None:
    plan, x = doubled()
    with devices.stream(SIM, "side"):
        plan.run()
    copies.arm_copies(False)
    try:
        assert (copies.to_host(x) == 2).all()
        with pytest.raises(DeviceFault, match="invalid argument"):
            copies.to_host(at(x, address=1 << 20))
        assert not _is_armed(record)
    finally:
        copies.arm_copies(True)
    assert _is_armed(record)


def _is_armed(record: recorder.Recorder) -> bool:
    checks = ring.read_run(record.folder).checks
    return next(check.armed for check in checks if check.name == "host copies")


def test_what_was_waited_for_is_forgotten() -> None:
    order, x = StreamClocks(), ids()
    writes = [Writes(stretches=(AddressRange(x.allocation.id, x.address, x.address + 4, str(i)),))
              for i in range(5000)]  # fmt: skip
    for one in writes:
        order.wrote(one, "side")
    assert order.missing_wait(x, 4, "") == ("4999", "side")
    assert len(order._writes) == 4096
    assert order.num_pending("side") == 5000
    order.host_waited(order.record_event("side"))
    assert order.missing_wait(x, 4, "") is None
    assert not order._writes
    assert order.num_pending("side") == 0


# -- the lines of a log ----------------------------------------------------------------------------


def test_a_copy_is_told_before_and_after(
    gpu: SimGpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ids()
    seen: list[list[str]] = []
    original = gpu.copy_out

    def spied(*given: Any) -> Any:
        seen.append(list(caplog.messages))
        return original(*given)

    monkeypatch.setattr(gpu, "copy_out", spied)
    with caplog.at_level(logging.DEBUG, "hypocenter.copies"):
        copies.to_device(made, np.ones(4, np.int32))
        copies.to_host(made)
    before_in, after_in, before, after = caplog.messages
    src = f"src={made.address:#x}"
    assert re.fullmatch(
        rf"\[H2D\] ids \(test\) before: src=0x\w+, dst={made.address:#x}, bytes=16, "
        "stream=default, sync=staged, in stream order",
        before_in,
    )
    assert after_in == before_in.replace(" before: ", " after: ")
    assert before == (
        f"[D2H] ids (test) before: {src}, bytes=16, stream=default, sync=waits for 2 before it"
    )
    assert re.fullmatch(
        rf"\[D2H\] ids \(test\) after: {src}, dst=0x\w+, bytes=16, stream=default, "
        "sync=waited for",
        after,
    )
    assert seen == [[before_in, after_in, before]]  # it stood there before the copy began


def test_streams_and_pinned_buffers_are_told(caplog: pytest.LogCaptureFixture) -> None:
    made, buffer = ids(), memory.allocate_pinned("staging", "test", DType.I32, (4,), device=SIM)
    copies.fill_pinned(buffer, np.arange(4, dtype=np.int32))
    with caplog.at_level(logging.DEBUG, "hypocenter.copies"), devices.stream(SIM, "side"):
        copies.copy_in_pinned(made, buffer)
    assert f"src={buffer.address:#x}, dst={made.address:#x}, bytes=16, stream=side, sync=pinned, " \
        "read when the stream gets there" in caplog.messages[0]  # fmt: skip


def test_a_failure_and_a_refusal_are_told(
    gpu: SimGpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ids()

    def fails(*given: Any) -> Any:
        raise DeviceFault(SIM, "copy_out", "an illegal memory access", is_asynchronous=True)

    monkeypatch.setattr(gpu, "copy_out", fails)
    with caplog.at_level(logging.DEBUG, "hypocenter.copies"):
        with pytest.raises(DeviceFault):
            copies.to_host(made)
        with pytest.raises(CopyRejected):
            copies.to_host(made, 9)
    assert re.match(
        rf"\[D2H\] ids \(test\) FAILED: src={made.address:#x}, bytes=16, stream=default, "
        r"sync=waits for \d before it: DeviceFault: sim:h200: an illegal memory access \(reported",
        caplog.messages[1],
    )
    assert caplog.messages[2] == (
        "[COPY] ids (test) REFUSED: 9 rows, but it has 4; ask for 0 to that many"
    )


def test_nothing_is_told_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hypocenter"):
        copies.to_host(ids())
    assert not [record for record in caplog.records if record.name == "hypocenter.copies"]
