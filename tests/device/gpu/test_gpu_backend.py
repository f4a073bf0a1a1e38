"""The GPU backend: against a torch whose GPU is host memory, and on a real GPU where there is one.

Tests marked `gpu` need the real one; `scripts/gpu` runs them.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from repository import SUPPORT

torch = pytest.importorskip("torch")
from ops.kernel_launch import random_rows  # noqa: E402
from pretended.fake_torch import FakeJit, FakeTorch, RuntimeReport  # noqa: E402

from hypocenter.base.errors import DeviceFault, LaunchRejected, OutOfMemory, UsageError  # noqa: E402
from hypocenter.base.tensor import DType  # noqa: E402
from hypocenter.device import devices, limits  # noqa: E402
from hypocenter.device.gpu import torch_gpu as gpu_module  # noqa: E402
from hypocenter.device.gpu.errors import error_name, runtime_fault  # noqa: E402
from hypocenter.device.gpu.staging import BUFFER_BYTES  # noqa: E402
from hypocenter.device.gpu.torch_gpu import PINNED_BYTES, TorchGpu, open_gpu  # noqa: E402
from hypocenter.device.graph import Graph  # noqa: E402
from hypocenter.device.limits import TABLE  # noqa: E402
from hypocenter.kernels.weights import packing  # noqa: E402
from hypocenter.settings.environment import launch_blocking  # noqa: E402

ILLEGAL = "an illegal memory access was encountered"


def opened(
    fake: FakeTorch, name: str = "cuda", environ: Mapping[str, str] | None = None, **keywords: Any
) -> TorchGpu:
    index = int(name.partition(":")[2] or 0)
    arch = "gfx942" if name.startswith("hip") else "sm_90"
    return TorchGpu(name, fake, index, TABLE[arch], environ=environ or {}, **keywords)


def add(x: Any, y: Any) -> None:
    x += y


def as_bytes(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint8)


def floats(data: np.ndarray) -> list[float]:
    found: list[float] = data.view(np.float32).tolist()
    return found


def two_floats(device: TorchGpu) -> tuple[int, int, tuple[Any, Any]]:
    """Addresses of 1 and 10, and both as arguments of a launch."""
    x, y = device.allocate(4), device.allocate(4)
    device.copy_in(x, as_bytes(1))
    device.copy_in(y, as_bytes(10))
    return x, y, (device.argument(x, DType.F32, 1), device.argument(y, DType.F32, 1))


# Memory.


@pytest.mark.parametrize("num_bytes", [1, 127, PINNED_BYTES, PINNED_BYTES + 1])
def test_bytes_come_back(num_bytes: int) -> None:
    fake = FakeTorch()
    device = opened(fake)
    address = device.allocate(num_bytes)
    assert address % 256 == 0
    data = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    device.copy_in(address, data)
    assert (device.copy_out(address, num_bytes) == data).all()
    # Both ways through pinned memory, or there through buffers and back without any.
    expected = 2 * num_bytes if num_bytes <= PINNED_BYTES else BUFFER_BYTES
    assert fake.cuda.num_pinned_bytes == expected


def test_a_copy_in_takes_what_it_was_given_at_once() -> None:
    device = opened(FakeTorch())
    address, data = device.allocate(4), as_bytes(1)
    device.copy_in(address, data)
    data[:] = 0
    assert floats(device.copy_out(address, 4)) == [1]


@pytest.mark.parametrize("num_bytes", [16, PINNED_BYTES + 16])
def test_memory_that_cannot_be_written_is_copied_without_a_warning(num_bytes: int) -> None:
    device, data = opened(FakeTorch()), np.ones(num_bytes, np.uint8)
    data.setflags(write=False)
    address = device.allocate(num_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.copy_in(address, data)
    assert device.copy_out(address, num_bytes).all()


@pytest.fixture
def used() -> Iterator[TorchGpu]:
    device = opened(FakeTorch())
    devices.use_backend(device)
    yield device
    devices._backends.pop("cuda")


def test_a_weight_is_packed_on_the_device_and_lies_there_as_the_host_packs_it(
    used: TorchGpu,
) -> None:
    raw = random_rows(DType.Q4_K, 70, 512)[1:]  # not at the start of its memory
    raw.setflags(write=False)
    packed = packing.pack(raw, DType.Q4_K, 512, device="cuda")
    assert isinstance(packed.parts[0], torch.Tensor)
    placed = packing.place("weight", "test", packed, device="cuda")
    expected = packing.pack(raw, DType.Q4_K, 512, device="cuda", on_host=True)
    for part, wanted in zip(placed.data.parts[:3], expected.parts[:3], strict=True):
        assert part.num_bytes == wanted.nbytes
        assert used.copy_out(part.address, part.num_bytes).tobytes() == wanted.tobytes()


def test_what_a_device_has_no_room_to_pack_is_told_as_such() -> None:
    device = opened(FakeTorch(room=64))
    with pytest.raises(OutOfMemory):
        device.compute(lambda: device.scratch(np.zeros(65, np.uint8)), 65)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16, DType.I32, DType.I64,
                                   DType.I16, DType.U8, DType.I8])  # fmt: skip
def test_an_argument_is_a_typed_view_from_any_address_inside(dtype: DType) -> None:
    device = opened(FakeTorch())
    address = device.allocate(256)
    device.copy_in(address, np.arange(256, dtype=np.uint8))
    start = 3 * dtype.block_bytes
    view = device.argument(address + start, dtype, 5)
    assert (view.data_ptr(), view.numel()) == (address + start, 5)
    expected = np.arange(start, start + 5 * dtype.block_bytes, dtype=np.uint8)
    assert (view.view(torch.uint8).numpy() == expected).all()
    names = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint"}
    kind = dtype.name.lower().rstrip("0123456789")
    assert str(view.dtype) == f"torch.{names[kind]}{8 * dtype.block_bytes}"


def test_an_address_is_found_in_its_own_allocation_among_many() -> None:
    device = opened(FakeTorch())
    addresses = [device.allocate(1000) for _ in range(20)]
    for address in addresses:
        assert device.base_of(address + 999) == address
        with pytest.raises(UsageError, match=r"100 bytes at .* ends 99 bytes on"):
            device.argument(address + 901, DType.U8, 100)
    device.free(addresses[7])
    with pytest.raises(UsageError, match=r"lies in no allocation; was it freed"):
        device.copy_out(addresses[7], 1)
    with pytest.raises(UsageError, match="where no allocation begins"):
        device.free(addresses[7])


def test_an_empty_argument_may_stand_at_either_end() -> None:
    # The minima of a weight that has none are the last part of its allocation.
    device = opened(FakeTorch())
    address, empty = device.allocate(256), device.allocate(0)
    for at in (address, address + 256, empty):
        assert device.argument(at, DType.F16, 0).numel() == 0
    assert empty not in (0, address)
    with pytest.raises(UsageError, match="lies in no allocation"):
        device.argument(address + 256, DType.U8, 1)


def test_an_argument_of_a_type_or_address_that_no_kernel_takes_is_refused() -> None:
    device = opened(FakeTorch())
    address = device.allocate(64)
    with pytest.raises(UsageError, match=r"not aligned to the 4 bytes of F32"):
        device.argument(address + 2, DType.F32, 1)
    with pytest.raises(UsageError, match=r"Q4_0 is no type that a kernel takes; .* F32, F16"):
        device.argument(address, DType.Q4_0, 32)


def test_no_room_is_said_with_figures() -> None:
    with pytest.raises(OutOfMemory) as caught:
        opened(FakeTorch(room=1000)).allocate(5000)
    error = caught.value
    assert (error.num_bytes, error.num_used, error.limit_bytes) == (5000, (1 << 30) - 1000, 1 << 30)
    assert "cuda: 4.88 KiB asked for" in str(error)


# Opening.


def open_with(monkeypatch: pytest.MonkeyPatch, fake: Any, name: str) -> TorchGpu:
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(gpu_module, "present_gpu", lambda: TABLE["sm_90"])
    return open_gpu(name)


@pytest.mark.parametrize(
    ("name", "vendor", "shown"),
    [("cuda", "cuda", "cuda"), ("cuda:0", "cuda", "cuda"), ("cuda:1", "cuda", "cuda:1"),
     ("hip", "hip", "hip"), ("hip:1", "hip", "hip:1")],
)  # fmt: skip
def test_open(monkeypatch: pytest.MonkeyPatch, name: str, vendor: str, shown: str) -> None:
    fake = FakeTorch(vendor=vendor, num_gpus=2)
    device = open_with(monkeypatch, fake, name)
    assert device.name == shown
    # Before the limits are asked for, which are those of the current GPU.
    assert fake.cuda.calls == [("set_device", int(name[-1] == "1"))]


@pytest.mark.parametrize(
    ("name", "fake", "says"),
    [
        ("gpu", FakeTorch(), "device is 'gpu', but must be cuda, cuda:1, hip"),
        ("cuda:-1", FakeTorch(), "device is 'cuda:-1'"),
        ("cuda:x", FakeTorch(), "device is 'cuda:x'"),
        ("cuda", None, "needs torch, which is not installed: pip install torch"),
        ("hip", FakeTorch(), "needs torch's AMD (HIP) build, but torch "),
        ("cuda", FakeTorch(vendor="hip"), "is the AMD (HIP) build; install the other one, or use"),
        ("cuda", FakeTorch(vendor="cpu"), "is the CPU build; install the other one, or use device"),
        ("cuda:1", FakeTorch(), "no GPU cuda:1: torch sees 1, cuda:0"),
        ("hip:9", FakeTorch(vendor="hip", num_gpus=4), "torch sees 4, hip:0 to hip:3"),
        ("hip", FakeTorch(vendor="hip", num_gpus=0), "driver and HIP_VISIBLE_DEVICES"),
    ],
)
def test_a_gpu_that_cannot_be_had_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, fake: Any, says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        open_with(monkeypatch, fake, name)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_torchs_own_reason_for_no_gpu_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTorch(num_gpus=0)

    def is_available() -> bool:
        warnings.warn("CUDA initialization: driver is too old\nmore", stacklevel=1)
        return False

    monkeypatch.setattr(fake.cuda, "is_available", is_available)
    with pytest.raises(UsageError, match=r"none \(CUDA initialization: driver is too old\); check"):
        open_with(monkeypatch, fake, "cuda")


# Launches.


def test_a_launch_adds_nothing_but_the_warmup_flag() -> None:
    fake = FakeTorch()
    device, jit = opened(fake), FakeJit(fake.cuda, lambda *args: None)
    launch = device.launcher(jit)
    fake.cuda.calls.clear()
    launch(1, 2.5, grid=(3, 4), num_warps=2, BLOCK=64)
    assert jit.runs == [
        {"args": (1, 2.5), "grid": (3, 4), "warmup": False, "num_warps": 2, "BLOCK": 64}
    ]
    assert fake.cuda.calls == ["launch"]
    assert jit.pre_run_hooks == []


def test_the_fake_kernel_has_what_a_real_one_has() -> None:
    from specimens.gpu_kernels import scale_kernel

    assert scale_kernel.pre_run_hooks == []
    assert callable(scale_kernel.add_pre_run_hook)
    assert {"grid", "warmup"} <= set(inspect.signature(scale_kernel.run).parameters)
    assert scale_kernel.__name__ == "scale_kernel"


def test_another_gpu_than_the_first_is_made_current_first() -> None:
    fake = FakeTorch(num_gpus=2)
    device = opened(fake, "cuda:1")
    launch = device.launcher(FakeJit(fake.cuda, lambda *args: None))
    fake.cuda.calls.clear()
    launch(grid=(1,))
    assert fake.cuda.calls == [("set_device", 1), "launch"]


@pytest.mark.parametrize(("name", "threads"), [("cuda", 256), ("hip", 512)])
def test_the_launch_line(caplog: pytest.LogCaptureFixture, name: str, threads: int) -> None:
    fake = FakeTorch()
    jit = FakeJit(fake.cuda, lambda *args: fake.cuda.report(caplog.messages[-1]))
    with caplog.at_level(logging.DEBUG, "hypocenter.gpu"):
        launch = opened(fake, name).launcher(jit)
        launch(grid=(140, 2), num_warps=8)
    line = f"Launch: kernel=add_kernel, grid=(140,2,1), block=({threads},1,1), shared=4096 bytes"
    assert caplog.messages == [line]
    assert fake.cuda.calls == ["launch", line]  # the line stood there before the kernel ran
    assert [run["warmup"] for run in jit.runs] == [True, False]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("cuda", RuntimeError("Triton Error [CUDA]: invalid argument"), "cudaErrorInvalidValue"),
        ("hip", RuntimeError("Triton Error [HIP]:  Code: 1, Messsage: invalid argument"),
         "hipErrorInvalidValue (1)"),
        ("cuda", RuntimeReport("no kernel image is available for execution on the device"),
         "cudaErrorNoKernelImageForDevice (209)"),
        ("hip", RuntimeReport("whatever", 209), "hipErrorNoBinaryForGpu (209): whatever"),
    ],
)  # fmt: skip
def test_a_launch_that_the_runtime_refuses(name: str, error: Exception, says: str) -> None:
    fake = FakeTorch()
    device = opened(fake, name)
    launch = device.launcher(FakeJit(fake.cuda, add, "transpose_kernel"))
    fake.cuda.faults["launch"] = error
    with pytest.raises(LaunchRejected) as caught:
        launch(1, 2, grid=(2800,), num_warps=2)
    threads = 64 if name == "cuda" else 128
    assert str(caught.value).startswith("transpose_kernel: launch failed: ")
    assert says in str(caught.value)
    assert str(caught.value).endswith(f"(grid=(2800,1,1), block=({threads},1,1))")


def test_too_much_shared_memory_is_refused_with_the_limit() -> None:
    from hypocenter.device.triton_lang import triton

    fake = FakeTorch()
    launch = opened(fake).launcher(FakeJit(fake.cuda, add))
    fake.cuda.faults["launch"] = triton.runtime.errors.OutOfResources(
        300000, 232448, "shared memory"
    )
    with pytest.raises(LaunchRejected, match=r"shared memory needs 300000, but H200 has 232448"):
        launch(grid=(1,))


def test_an_address_of_the_host_is_a_refused_launch() -> None:
    fake = FakeTorch()
    launch = opened(fake).launcher(FakeJit(fake.cuda, add))
    fake.cuda.faults["launch"] = ValueError(
        "Pointer argument (at 2) cannot be accessed from Triton (cpu tensor?)"
    )
    with pytest.raises(LaunchRejected) as caught:
        launch(1, 2, grid=(3,))
    assert str(caught.value).startswith("add_kernel: Pointer argument (at 2) cannot be accessed")
    assert str(caught.value).endswith("(grid=(3,1,1), block=(128,1,1))")


def test_another_value_error_of_a_launch_stays_as_it_is() -> None:
    fake = FakeTorch()
    launch = opened(fake).launcher(FakeJit(fake.cuda, add))
    error = fake.cuda.faults["launch"] = ValueError("arange's range must be a power of 2")
    with pytest.raises(ValueError, match="power of 2") as caught:
        launch(1, 2, grid=(3,))
    assert caught.value is error


def test_a_launch_that_finds_an_older_fault_is_not_blamed() -> None:
    fake = FakeTorch()
    launch = opened(fake).launcher(FakeJit(fake.cuda, add))
    fake.cuda.faults["launch"] = RuntimeError(f"Triton Error [CUDA]: {ILLEGAL}")
    with pytest.raises(DeviceFault) as caught:
        launch(1, 2, grid=(1,))
    assert caught.value.is_asynchronous
    assert caught.value.reason == f"cudaErrorIllegalAddress (700): {ILLEGAL}"
    assert "launch of add_kernel (grid=(1,1,1), block=(128,1,1)), caused by a launch before it" in (
        str(caught.value)
    )


def test_an_error_that_is_not_the_runtimes_stays_as_it_is() -> None:
    fake = FakeTorch()
    launch = opened(fake).launcher(FakeJit(fake.cuda, add))
    error = fake.cuda.faults["launch"] = RuntimeError("Global variable X has changed")
    with pytest.raises(RuntimeError) as caught:
        launch(1, 2, grid=(1,))
    assert caught.value is error


@pytest.mark.parametrize("call", ["synchronise", "copy_out", "copy_in", "allocate"])
def test_a_fault_found_later_is_asynchronous(call: str) -> None:
    fake = FakeTorch()
    device = opened(fake)
    address = device.allocate(4)
    calls: dict[str, Callable[[], Any]] = {
        "synchronise": device.synchronise,
        "copy_out": lambda: device.copy_out(address, 4),
        "copy_in": lambda: device.copy_in(address, as_bytes(1)),
        "allocate": lambda: device.allocate(4),
    }
    fake.cuda.faults["synchronize" if call == "synchronise" else "empty"] = RuntimeReport(ILLEGAL)
    with pytest.raises(DeviceFault) as caught:
        calls[call]()
    assert (caught.value.call, caught.value.is_asynchronous) == (call, True)
    assert "cudaErrorIllegalAddress (700)" in caught.value.reason
    assert "For debugging" not in str(caught.value)


def test_a_copy_out_is_waited_for_when_it_is_wanted() -> None:
    fake = FakeTorch()
    device = opened(fake)
    address = device.allocate(4)
    device.copy_in(address, as_bytes(1))
    first, second = device.copy_out_later(address, 4), device.copy_out_later(address, 4)
    assert "event_synchronize" not in fake.cuda.calls
    assert floats(first()) == [1]
    assert fake.cuda.calls.count("event_synchronize") == 1
    fake.cuda.faults["event_synchronize"] = RuntimeReport(ILLEGAL)
    with pytest.raises(DeviceFault) as caught:
        second()
    assert (caught.value.call, caught.value.is_asynchronous) == ("copy_out", True)


def test_an_error_of_the_call_itself_is_blamed_on_it() -> None:
    fake = FakeTorch()
    device = opened(fake)
    fake.cuda.faults["synchronize"] = RuntimeReport("invalid resource handle", 400)
    with pytest.raises(DeviceFault) as caught:
        device.synchronise()
    assert not caught.value.is_asynchronous


# A wait after each launch.


@pytest.mark.parametrize(
    ("name", "value", "is_on"),
    [("HIP_LAUNCH_BLOCKING", "1", True), ("HIP_LAUNCH_BLOCKING", "TRUE", True),
     ("HIP_LAUNCH_BLOCKING", "0", False), ("HIP_LAUNCH_BLOCKING", "", False),
     ("HIP_LAUNCH_BLOCKING", "3", False), ("CUDA_LAUNCH_BLOCKING", "True", True),
     ("CUDA_LAUNCH_BLOCKING", "no", False), ("AMD_SERIALIZE_KERNEL", "3", True),
     ("AMD_SERIALIZE_KERNEL", "1", True), ("AMD_SERIALIZE_KERNEL", "0", False)],
)  # fmt: skip
def test_launch_blocking(name: str, value: str, is_on: bool) -> None:
    assert launch_blocking({name: value}) == (f"{name}={value}" if is_on else None)
    assert (opened(FakeTorch(), environ={name: value}).blocking is not None) == is_on


def test_with_blocking_each_launch_is_waited_for_and_blamed_for_its_fault() -> None:
    fake = FakeTorch()
    device = opened(fake, environ={"HIP_LAUNCH_BLOCKING": "1"})
    x, _, arguments = two_floats(device)
    launch = device.launcher(FakeJit(fake.cuda, add))
    fake.cuda.calls.clear()
    launch(*arguments, grid=(1,))
    assert fake.cuda.calls == ["launch", "synchronize"]
    assert floats(device.copy_out(x, 4)) == [11]
    # The runtime heeds such a variable too, and then reports the fault from the launch itself.
    for call in ("launch", "synchronize"):
        fake.cuda.faults[call] = RuntimeReport(ILLEGAL, 700)
        with pytest.raises(DeviceFault) as caught:
            launch(*arguments, grid=(7,), num_warps=1)
        assert not caught.value.is_asynchronous
        says = "Kernel 'add_kernel' launch failed (grid=(7,1,1), block=(32,1,1))"
        assert says in str(caught.value)


def test_with_blocking_graphs_are_off(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeTorch()
    device = opened(fake, environ={"CUDA_LAUNCH_BLOCKING": "1"})
    x, _, arguments = two_floats(device)
    launch = device.launcher(FakeJit(fake.cuda, add))

    def run() -> None:
        launch(*arguments, grid=(1,))

    graph = device.capture(run)
    assert (graph.num_launches, device.captures) == (0, False)
    graph()
    assert floats(device.copy_out(x, 4)) == [21]
    assert "no graph is captured, because of CUDA_LAUNCH_BLOCKING=1" in caplog.text
    device.free(x)


# Graphs.


def captured(fake: FakeTorch) -> tuple[TorchGpu, int, int, FakeJit, Any]:
    """A device, the addresses of x and y, and the graph of x += y, which has run once."""
    names: dict[int, str] = {}
    device = opened(fake, name_of=names.__getitem__)
    x, y, arguments = two_floats(device)
    names |= {x: "x", y: "y"}
    jit = FakeJit(fake.cuda, add)
    launch = device.launcher(jit)
    return device, x, y, jit, device.capture(lambda: launch(*arguments, grid=(1,)))


def test_a_graph_runs_once_before_and_again_at_each_call() -> None:
    device, x, _, jit, graph = captured(FakeTorch())
    assert floats(device.copy_out(x, 4)) == [11]
    graph()
    graph()
    assert floats(device.copy_out(x, 4)) == [31]
    assert (graph.num_launches, len(jit.runs), jit.pre_run_hooks) == (1, 2, [])


def test_memory_of_a_graph_is_not_freed_before_the_graph_is() -> None:
    device, x, y, _, graph = captured(FakeTorch())
    other = device.allocate(16)
    for address, name in ((x, "x"), (y, "y")):
        with pytest.raises(UsageError, match=rf"free of {name} \(4 bytes at .* by 1 captured"):
            device.free(address)
    device.free(other)
    graph.close()
    device.free(x)
    with pytest.raises(UsageError, match="was closed"):
        graph()


def test_a_graph_that_nobody_has_any_more_holds_nothing() -> None:
    device, x, _, _, graph = captured(FakeTorch())
    with pytest.raises(UsageError, match="captured graph"):
        device.free(x)
    del graph
    gc.collect()
    device.free(x)
    assert x not in device.addresses


def test_views_count_as_the_allocation_that_they_lie_in() -> None:
    fake = FakeTorch()
    device = opened(fake)
    address = device.allocate(64)
    device.copy_in(address, np.zeros(64, np.uint8))
    views = [device.argument(address + at, DType.F32, 1) for at in (16, 32)]
    launch = device.launcher(FakeJit(fake.cuda, add))
    graph = device.capture(lambda: launch(*views, grid=(1,)))
    assert isinstance(graph, Graph)
    assert graph.bases == {address}


@pytest.mark.parametrize("call", ["allocate", "copy_in", "copy_out", "synchronise", "free"])
def test_a_captured_step_only_launches(call: str) -> None:
    fake = FakeTorch()
    device = opened(fake)
    x, _, arguments = two_floats(device)
    jit = FakeJit(fake.cuda, add)
    launch = device.launcher(jit)
    calls: dict[str, Callable[[], Any]] = {
        "allocate": lambda: device.allocate(4),
        "copy_in": lambda: device.copy_in(x, as_bytes(1)),
        "copy_out": lambda: device.copy_out(x, 4),
        "synchronise": device.synchronise,
        "free": lambda: device.free(x),
    }

    def run() -> None:
        launch(*arguments, grid=(1,))
        if fake.cuda.recording is not None:
            calls[call]()

    with pytest.raises(UsageError, match="captured"):
        device.capture(run)
    assert jit.pre_run_hooks == []
    device.capture(lambda: launch(*arguments, grid=(1,)))()  # and the device still works


def test_a_failed_capture_raises_what_failed_and_not_its_aftermath() -> None:
    fake = FakeTorch()
    device = opened(fake)
    _, _, arguments = two_floats(device)
    launch = device.launcher(FakeJit(fake.cuda, add))

    def run() -> None:
        if fake.cuda.recording is not None:
            fake.cuda.faults["launch"] = RuntimeReport("invalid argument", 1)
            fake.cuda.faults["capture_end"] = RuntimeReport("previous error during capture", 901)
        launch(*arguments, grid=(1,))

    with pytest.raises(LaunchRejected, match="cudaErrorInvalidValue"):
        device.capture(run)


def test_a_capture_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing was launched"):
        opened(FakeTorch()).capture(lambda: None)


def test_a_kernel_first_seen_during_the_capture_is_registered_too() -> None:
    fake = FakeTorch()
    device = opened(fake)
    x, y, arguments = two_floats(device)
    graph = device.capture(lambda: device.launcher(FakeJit(fake.cuda, add))(*arguments, grid=(1,)))
    assert isinstance(graph, Graph)
    assert graph.bases == {x, y}


# Names of errors.


@pytest.mark.parametrize(
    ("vendor", "code", "name"),
    [("cuda", 700, "cudaErrorIllegalAddress"), ("hip", 700, "hipErrorIllegalAddress"),
     ("hip", 500, "hipErrorNotFound"), ("cuda", 2, "cudaErrorMemoryAllocation"),
     ("hip", 2, "hipErrorOutOfMemory"), ("cuda", 4711, "cudaError4711")],
)  # fmt: skip
def test_error_names(vendor: str, code: int, name: str) -> None:
    assert error_name(vendor, code) == name


def test_an_unknown_sentence_of_the_runtime_is_an_unknown_error_and_no_silence() -> None:
    fault = runtime_fault("hip", RuntimeError("HIP error: something new"))
    assert fault is not None
    assert str(fault) == "hipErrorUnknown (999): something new"
    fault = runtime_fault("cuda", RuntimeError("CUDA error: uncorrectable ECC error encountered"))
    assert fault is not None
    assert (fault.code, fault.is_found_later) == (214, True)
    assert runtime_fault("cuda", RuntimeError("shape mismatch: out of memory lane")) is None


# On a real GPU.


def _vendor() -> str | None:
    if not torch.cuda.is_available():
        return None
    return "hip" if torch.version.hip else "cuda"


def _real() -> TorchGpu:
    vendor = _vendor()
    assert vendor is not None
    return open_gpu(vendor)


def _scale_launcher(device: TorchGpu) -> Callable[..., None]:
    from specimens.gpu_kernels import scale_kernel

    return device.launcher(scale_kernel)


@pytest.mark.gpu
@pytest.mark.skipif(_vendor() is None, reason="no GPU here; scripts/gpu runs this on one")
class TestRealGpu:
    """Each claim above that the fake can only imitate."""

    def test_limits_are_those_of_the_driver(self) -> None:
        device = _real()
        properties = torch.cuda.get_device_properties(0)
        assert device.limits == limits.present_gpu()
        assert device.limits.product == properties.name
        assert device.limits.memory_bytes == properties.total_memory

    @pytest.mark.parametrize("num_bytes", [1, 4097, PINNED_BYTES, PINNED_BYTES * 9 + 3])
    def test_bytes_come_back(self, num_bytes: int) -> None:
        device = _real()
        address = device.allocate(num_bytes)
        assert address % 256 == 0
        data = np.random.default_rng(1).integers(0, 256, num_bytes, np.uint8)
        device.copy_in(address, data)
        assert (device.copy_out(address, num_bytes) == data).all()
        device.free(address)

    def test_small_copies_in_a_row_do_not_overtake_each_other(self) -> None:
        device = _real()
        launch = _scale_launcher(device)
        x, out = device.allocate(4096), device.allocate(200 * 4096)
        for step in range(200):
            device.copy_in(x, np.full(1024, step, np.float32).view(np.uint8))
            launch(
                device.argument(x, DType.F32, 1024),
                device.argument(out + step * 4096, DType.F32, 1024), 1024, 2.0,
                grid=(1,), BLOCK=1024,
            )  # fmt: skip
        got = device.copy_out(out, 200 * 4096).view(np.float32).reshape(200, 1024)
        assert (got == 2.0 * np.arange(200)[:, None]).all()

    def test_a_graph_repeats_its_launches(self) -> None:
        device = _real()
        launch, x = _scale_launcher(device), device.allocate(4096)
        device.copy_in(x, np.ones(1024, np.float32).view(np.uint8))
        view = device.argument(x, DType.F32, 1024)

        def run() -> None:
            for _ in range(3):
                launch(view, view, 1024, 2.0, grid=(1,), BLOCK=1024)

        graph = device.capture(run)
        assert isinstance(graph, Graph)
        assert graph.num_launches == 3
        graph()
        assert (device.copy_out(x, 4096).view(np.float32) == 64).all()
        with pytest.raises(UsageError, match="captured graph"):
            device.free(x)
        graph.close()
        device.free(x)

    def test_too_much_memory_is_refused_with_figures(self) -> None:
        device = _real()
        with pytest.raises(OutOfMemory) as caught:
            device.allocate(1 << 42)
        total = torch.cuda.get_device_properties(0).total_memory
        assert abs(caught.value.limit_bytes / total - 1) < 0.01

    def test_a_grid_that_is_too_deep_is_refused(self) -> None:
        device = _real()
        launch, x = _scale_launcher(device), device.allocate(4096)
        view = device.argument(x, DType.F32, 1024)
        with pytest.raises(LaunchRejected, match=r"InvalidValue .*grid=\(1,1,1048576\)"):
            launch(view, view, 1024, 2.0, grid=(1, 1, 1 << 20), BLOCK=1024)
        launch(view, view, 1024, 2.0, grid=(1,), BLOCK=1024)
        device.synchronise()
        device.free(x)

    @pytest.mark.parametrize("blocking", ["0", "1"])
    def test_a_fault_is_reported_by_name(self, blocking: str) -> None:
        """In a process of its own: after such a fault its GPU context, or itself, is lost."""
        script = SUPPORT / "gpu_fault.py"
        done = subprocess.run(
            [sys.executable, script, _vendor() or ""], capture_output=True, text=True, timeout=120,
            env={**os.environ, "CUDA_LAUNCH_BLOCKING": blocking},
        )  # fmt: skip
        if done.returncode < 0:
            assert _vendor() == "hip", "only AMD's runtime kills the process"
            return
        assert done.returncode == 0, done.stderr[-2000:]
        is_asynchronous, _, message = done.stdout.strip().partition(" ")
        assert "cudaErrorIllegalAddress (700)" in message
        assert is_asynchronous == str(blocking == "0")
        if blocking == "1":
            assert "Kernel 'wild_kernel' launch failed (grid=(3,1,1)" in message
