"""The table of GPU limits, what a driver says of the GPU at hand, and the check before a launch."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hypocenter.base.errors import HypoError, LaunchRejected, UsageError
from hypocenter.device.limits import (
    PRODUCTS,
    TABLE,
    check_launch,
    from_driver,
    launch_check,
    named_gpu,
    present_gpu,
)

KIB = 1024

H200 = {
    "name": "NVIDIA H200", "major": 9, "minor": 0, "gcnArchName": "NVIDIA H200", "warp_size": 32,
    "multi_processor_count": 132, "total_memory": 150_000_000_000,
    "shared_memory_per_block": 48 * KIB, "shared_memory_per_block_optin": 227 * KIB,
    "shared_memory_per_multiprocessor": 228 * KIB, "max_threads_per_multi_processor": 2048,
}  # fmt: skip
MI300X = {
    "name": "AMD Instinct MI300X", "major": 9, "minor": 4, "warp_size": 64,
    "gcnArchName": "gfx942:sramecc+:xnack-", "multi_processor_count": 304,
    "total_memory": 206_000_000_000, "max_threads_per_multi_processor": 2048,
}  # fmt: skip
#: What the CUDA driver of an H200 answers.
ATTRIBUTES = {
    1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2**31 - 1, 6: 65535, 7: 65535, 106: 32, 111: 1024,
}  # fmt: skip


def test_the_table_holds_the_ten_architectures() -> None:
    assert list(TABLE) == [
        "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201",
        "sm_80", "sm_89", "sm_90", "sm_100", "sm_120",
    ]  # fmt: skip
    limits = {arch: gpu.shared_limit_bytes // KIB for arch, gpu in TABLE.items()}
    assert limits == {
        "gfx90a": 64, "gfx942": 64, "gfx950": 160, "gfx1100": 64, "gfx1201": 64,
        "sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99,
    }  # fmt: skip


@pytest.mark.parametrize("gpu", TABLE.values(), ids=TABLE.keys())
def test_an_entry_contradicts_nothing(gpu: Any) -> None:
    assert gpu.wavefront == (64 if gpu.arch.startswith("gfx9") else 32)
    assert gpu.backend == ("hip" if gpu.arch.startswith("gfx") else "cuda")
    assert gpu.shared_default_bytes <= gpu.shared_limit_bytes
    reserved = gpu.shared_limit_bytes + gpu.shared_reserved_bytes
    assert reserved <= gpu.shared_per_processor_bytes
    assert max(gpu.max_block_dims) == gpu.max_threads_per_block
    # A block of the largest size fits on one processor.
    num_waves = gpu.max_threads_per_block // gpu.wavefront
    assert num_waves <= gpu.max_waves_per_simd * gpu.num_simds
    assert gpu.registers_per_simd % gpu.register_step == 0
    assert gpu.memory_bytes >= 16 << 30
    with pytest.raises(dataclasses.FrozenInstanceError):
        gpu.wavefront = 1


def test_products_are_found_by_name() -> None:
    assert {name: PRODUCTS[name] for name in ("mi300x", "h200", "rx7900xtx")} == {
        "mi300x": "gfx942", "h200": "sm_90", "rx7900xtx": "gfx1100",
    }  # fmt: skip
    assert named_gpu("MI300X") is named_gpu("gfx942") is TABLE["gfx942"]
    assert named_gpu("RX 7900 XTX").arch == "gfx1100"
    assert (TABLE["gfx942"].num_processors, TABLE["sm_90"].num_processors) == (304, 132)


@pytest.mark.parametrize(("name", "hint"), [
    ("gfx943", "did you mean gfx942?"), ("h20", "did you mean h200?"), ("zx81", "known are gfx90a"),
])  # fmt: skip
def test_an_unknown_name_gets_a_hint(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"no GPU architecture or product '{name}'.*{hint}"):
        named_gpu(name)


def test_what_the_driver_says_replaces_the_table() -> None:
    properties = SimpleNamespace(**H200 | {"multi_processor_count": 114})
    gpu = from_driver(properties, (ATTRIBUTES | {106: 31}).get)
    assert (gpu.arch, gpu.product, gpu.num_processors) == ("sm_90", "NVIDIA H200", 114)
    assert (gpu.memory_bytes, gpu.max_blocks_per_processor) == (150_000_000_000, 31)
    assert gpu.max_block_dims == (1024, 1024, 64)


def test_amd_is_known_by_its_gcn_name_and_has_fewer_properties() -> None:
    gpu = from_driver(SimpleNamespace(**MI300X))
    expected = dataclasses.replace(
        TABLE["gfx942"], product="AMD Instinct MI300X", memory_bytes=206_000_000_000
    )
    assert gpu == expected


def test_zeros_of_a_driver_give_one_warning_and_the_tables_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    zeros = H200 | {"warp_size": 0, "total_memory": 0, "shared_memory_per_block_optin": 0}
    with caplog.at_level(logging.WARNING):
        gpu = from_driver(SimpleNamespace(**zeros), (ATTRIBUTES | {3: 0, 4: 0}).get)
    table = TABLE["sm_90"]
    assert (gpu.wavefront, gpu.memory_bytes) == (32, table.memory_bytes)
    assert (gpu.shared_limit_bytes, gpu.max_block_dims) == (227 * KIB, (1024, 1024, 64))
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert message.startswith("NVIDIA H200: the driver reports 0 for max_block_dims (taking (1024,")
    for field in ("memory_bytes", "shared_limit_bytes", "wavefront"):
        assert f"{field} (taking " in message


def test_a_good_driver_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    from_driver(SimpleNamespace(**H200), ATTRIBUTES.get)
    assert not caplog.records


def test_attributes_that_the_driver_does_not_know_come_from_the_table() -> None:
    gpu = from_driver(SimpleNamespace(**H200), lambda _: None)
    assert gpu.max_grid_dims == TABLE["sm_90"].max_grid_dims


def test_a_gpu_that_is_not_in_the_table_is_refused() -> None:
    old = SimpleNamespace(**H200 | {"name": "Tesla V100", "major": 7})
    with pytest.raises(HypoError, match=r"Tesla V100 is sm_70, but kernels are built for gfx90a"):
        from_driver(old)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    import torch

    cuda = SimpleNamespace(available=True, num_asked=0)

    def properties(_: int) -> SimpleNamespace:
        cuda.num_asked += 1
        return SimpleNamespace(**MI300X)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda.available)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    present_gpu.cache_clear()
    yield cuda
    present_gpu.cache_clear()


def test_the_present_gpu_is_asked_once(fake_cuda: SimpleNamespace) -> None:
    gpu = present_gpu()
    assert gpu is not None
    assert gpu.arch == "gfx942"
    assert present_gpu() is gpu
    assert fake_cuda.num_asked == 1


class FakeLibcuda:
    """The two functions of the CUDA driver that are called, for a driver that knows ATTRIBUTES."""

    def __init__(self, status: int = 0) -> None:
        self.status = status

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number + 7
        return self.status

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        assert device.value == 7
        value._obj.value = ATTRIBUTES.get(attribute, 0)
        return 0 if attribute in ATTRIBUTES else 1


def test_cuda_is_asked_for_what_torch_does_not_tell(
    fake_cuda: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**H200))
    monkeypatch.setitem(ATTRIBUTES, 5, 123456)
    monkeypatch.delitem(ATTRIBUTES, 106)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeLibcuda())
    gpu = present_gpu()
    assert gpu is not None
    assert gpu.max_grid_dims == (123456, 65535, 65535)
    assert gpu.max_blocks_per_processor == TABLE["sm_90"].max_blocks_per_processor
    assert not caplog.records  # not known is not 0
    present_gpu.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeLibcuda(status=101))
    with pytest.raises(HypoError, match=r"cuDeviceGet\(0\) failed with CUDA error 101"):
        present_gpu()


def test_no_gpu_is_none(fake_cuda: SimpleNamespace) -> None:
    fake_cuda.available = False
    assert present_gpu() is None


#: Each refused launch differs from a good one in one thing: grid, warps, shared memory, message.
REFUSED = [
    ("sm_90", (0,), 4, 0, r"grid\[0\] is 0, but must be from 1 to 2147483647; do not launch"),
    ("sm_90", (4, -1), 4, 0, r"grid\[1\] is -1, but must be from 1 to 65535"),
    ("sm_90", (2**31,), 4, 0, r"grid\[0\] is 2147483648, but H200 \(sm_90\) has at most"),
    ("sm_90", (1, 65536), 4, 0, r"grid\[1\] is 65536, but .* has at most 65535; use grid\[0\]"),
    ("gfx942", (1, 1, 65536), 4, 0, r"grid\[2\] is 65536, but MI300X \(gfx942\)"),
    ("sm_90", (65535, 65535, 1), 4, 0, r"has 4294836225 programs, but at most 2147483647 can be"),
    ("sm_90", (32768, 65535, 2), 4, 0, r"has 4294901760 programs.*split the launch"),
    ("sm_90", (np.int32(40000), np.int32(60000)), 4, 0, r"has 2400000000 programs"),
    ("sm_90", (1.5,), 4, 0, r"grid\[0\] is 1\.5, but must be a whole number"),
    ("sm_90", (), 4, 0, r"grid \(\) has 0 dimensions, but a grid has 1 to 3"),
    ("sm_90", (1, 1, 1, 1), 4, 0, r"has 4 dimensions"),
    ("sm_90", (1,), 33, 0, r"a block has 1056 threads \(33 warps x 32\), but .* takes 1 to 1024"),
    ("gfx942", (1,), 17, 0, r"a block has 1088 threads \(17 warps x 64\)"),
    ("sm_90", (1,), 0, 0, r"a block has 0 threads"),
    ("gfx942", (2**23,), 8, 0, r"grid\[0\] x threads is 4294967296, but .* at most 4294967295"),
    ("sm_89", (1,), 4, 99 * KIB + 1, r"needs 101377 bytes of shared memory, but RTX 4090 \(sm_89\) "
     r"has 101376; use smaller tiles"),
    ("gfx1100", (1,), 4, 65537, r"needs 65537 bytes of shared memory, but .* has 65536"),
    ("gfx950", (1,), 4, 160 * KIB + 1, r"has 163840"),
]  # fmt: skip
ALLOWED = [
    ("sm_90", (2**31 - 1,), 4, 227 * KIB),
    ("sm_90", (1, 65535), 32, 0),
    ("sm_90", (32767, 65535), 1, 0),
    ("sm_90", (1, 1, 65535), 4, 0),
    ("gfx942", (2**23 - 1,), 8, 64 * KIB),
    ("gfx942", (1,), 16, 0),
    ("gfx950", (1, 1, 1), 16, 160 * KIB),
    ("sm_90", (np.int64(3), np.int32(2)), 4, 0),
    ("sm_90", (np.int32(30000), np.int32(60000), np.int32(1)), 4, 0),
]


@pytest.mark.parametrize(("arch", "grid", "num_warps", "shared_bytes", "message"), REFUSED)
def test_a_launch_beyond_the_limits_is_refused(
    arch: str, grid: tuple[int, ...], num_warps: int, shared_bytes: int, message: str
) -> None:
    with pytest.raises(LaunchRejected, match=message) as caught:
        check_launch(TABLE[arch], "rope", grid, num_warps, shared_bytes)
    assert caught.value.kernel == "rope"
    assert str(caught.value).startswith("rope: ")


@pytest.mark.parametrize(("arch", "grid", "num_warps", "shared_bytes"), ALLOWED)
def test_a_launch_at_the_limits_is_let_through(
    arch: str, grid: tuple[int, ...], num_warps: int, shared_bytes: int
) -> None:
    launch_check(TABLE[arch])("rope", grid, num_warps, shared_bytes)
