"""What may never reach a kernel: eleven kinds of bad input, each refused before the launch.

One row or more for each; every row fails when the check behind it is taken out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ops import kernel_launch

pytest.importorskip("torch")
from models.tiny_gguf import write_tiny
from ops.kernel_launch import counts, rows_tensor, tensor
from pretended.fake_torch import FakeJit, FakeTorch, RuntimeReport
from test_limits import H200

from hypocenter.base.errors import BadModelFile, HypoError, LaunchRejected, UsageError
from hypocenter.base.tensor import Allocation, DType, Tensor
from hypocenter.device import copies, devices, limits, memory
from hypocenter.device.gpu import torch_gpu
from hypocenter.device.gpu.torch_gpu import TorchGpu, open_gpu
from hypocenter.device.launch import run
from hypocenter.device.plan import PlanBuilder
from hypocenter.device.sim.sim import open_sim
from hypocenter.kernels.attention import rope
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf

SIM, OTHER = "sim:h200", "sim:mi300x"

#: The list of the issue, in its order.
KINDS = (
    "position buffer of 2-byte elements",
    "null",
    "zero or odd dimension",
    "rope_base 0",
    "index beyond its extent",
    "freed tensor",
    "tensor on another device",
    "non-contiguous view",
    "misaligned pointer",
    "missing code object for the architecture",
    "no GPU at all",
)


@pytest.fixture(autouse=True)
def sims(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devices, "_backends", {})
    monkeypatch.setattr(kernel_launch, "device", SIM)
    devices.use_backend(open_sim(SIM))
    devices.use_backend(open_sim(OTHER))
    yield
    limits.present_gpu.cache_clear()


# -- arguments of a launch -------------------------------------------------------------------------


@dataclass
class Rope:
    """Right arguments of rope, until a row changes one."""

    x: Any
    positions: Any
    cos: Any
    num_heads: int = 1
    head_dim: int = 64

    @classmethod
    def right(cls) -> Rope:
        return cls(
            rows_tensor("x", np.ones((3, 64), np.float32)),
            tensor("positions", np.array([0, 1, 2], np.int32)),
            tensor("cos", np.ones((8, 32), np.float32)),
        )

    def plan(self) -> PlanBuilder:
        builder = PlanBuilder(3, SIM)
        sin = tensor("sin", np.zeros((8, 32), np.float32))
        rope.rotate(
            builder, self.x, self.positions, (self.cos, sin), counts(3),
            num_heads=self.num_heads, head_dim=self.head_dim, style="neox",
        )  # fmt: skip
        return builder


def at(tensor: Tensor, **facts: Any) -> Tensor:
    """The same tensor in an allocation of which one fact is another."""
    old = tensor.allocation
    known: dict[str, Any] = {
        "device": old.device, "num_bytes": old.num_bytes, "address": old.address, **facts
    }  # fmt: skip
    return replace(tensor, allocation=Allocation(old.id, site="here", **known))


def two_bytes(case: Rope) -> None:
    case.positions = memory.allocate("positions", "step", DType.I16, (3,), device=SIM)


def half_the_bytes(case: Rope) -> None:
    case.positions = at(case.positions, num_bytes=6)


def no_tensor(case: Rope) -> None:
    case.positions = None


def null_pointer(case: Rope) -> None:
    case.cos = at(case.cos, address=0)


def no_columns(case: Rope) -> None:
    case.head_dim = 0


def odd_columns(case: Rope) -> None:
    case.head_dim = 63


def no_heads(case: Rope) -> None:
    case.num_heads = 0


def freed(case: Rope) -> None:
    memory.free(case.cos)


def elsewhere(case: Rope) -> None:
    case.cos = memory.allocate("cos", "model", DType.F32, (8, 32), device=OTHER)


def at_home(case: Rope) -> None:
    case.cos = memory.allocate("cos", "model", DType.F32, (8, 32))


def every_other_row(case: Rope) -> None:
    whole = tensor("cos", np.ones((16, 32), np.float32))
    case.cos = replace(whole, shape=(8, 32), strides=(64, 1))


def transposed(case: Rope) -> None:
    case.cos = replace(case.cos, strides=(1, 8))


def misaligned(case: Rope) -> None:
    case.positions = at(case.positions, address=case.positions.allocation.address + 2)


ARGUMENTS: list[tuple[str, Callable[[Rope], None], str]] = [
    (KINDS[0], two_bytes, r"positions is i16, but it is read as i32"),
    (KINDS[0], half_the_bytes, r"positions reaches to byte 12, but its allocation has 6"),
    (KINDS[1], no_tensor, r"positions is null"),
    (KINDS[1], null_pointer, r"cos is null: its allocation has no address"),
    (KINDS[2], no_columns, r"head_dim is 0, but must be even and above 0"),
    (KINDS[2], odd_columns, r"head_dim is 63, but must be even and above 0"),
    (KINDS[2], no_heads, r"num_heads is 0, but must be above 0"),
    (KINDS[5], freed, r"cos was freed at .*test_bad_input\.py:\d+"),
    (KINDS[6], elsewhere, r"cos is on sim:mi300x, the others on sim:h200"),
    (KINDS[6], at_home, r"cos is on cpu, the others on sim:h200"),
    (KINDS[7], every_other_row, r"cos has strides \(64, 1\), but must be contiguous"),
    (KINDS[7], transposed, r"cos has strides \(1, 8\), but must be contiguous"),
    (KINDS[8], misaligned, r"positions lies at 0x\w+, but must be aligned to 4 bytes"),
]


@pytest.mark.parametrize(
    ("plant", "says"), [row[1:] for row in ARGUMENTS], ids=[row[1].__name__ for row in ARGUMENTS]
)
def test_a_wrong_argument(plant: Callable[[Rope], None], says: str) -> None:
    case = Rope.right()
    assert len(case.plan().launches) == 1  # right, until now
    plant(case)
    with pytest.raises(LaunchRejected, match=f"^rope: {says}"):
        case.plan()


@pytest.mark.parametrize("plant", [freed, elsewhere])
def test_an_argument_that_went_wrong_after_the_plan_was_made(plant: Callable[[Rope], None]) -> None:
    case = Rope.right()
    (launch,) = case.plan().launches
    if plant is freed:
        plant(case)
    else:
        launch.tensors["cos"].allocation.device = OTHER
    launch.set_mode("checked")
    with pytest.raises(LaunchRejected, match=r"cos (was freed|is on sim:mi300x)"):
        run([launch])


@pytest.mark.parametrize("position", [-1, 8, 1 << 30])
def test_an_index_beyond_its_extent(position: int) -> None:
    case = Rope.right()
    (launch,) = case.plan().launches
    launch.set_mode("checked")
    run([launch])
    assert (copies.to_host(case.x) == 1).all()
    copies.to_device(case.positions, np.array([0, position, 2], np.int32))
    copies.to_device(case.x, np.full((3, 64), 7, np.float32))
    with pytest.raises(LaunchRejected, match=rf"^rope: positions\[1\] = {position}, but the table"):
        run([launch])
    assert (copies.to_host(case.x) == 7).all()


# -- what is known before there are arguments ------------------------------------------------------


@pytest.mark.parametrize("base", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rope_base_that_turns_nothing(base: float, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", metadata={"rope.freq_base": base})
    with open_gguf(path) as file, pytest.raises(BadModelFile, match=r"rope\.freq_base is"):
        read_architecture(file)
    with pytest.raises(LaunchRejected, match=r"rope: rope_base is .*, but must be above 0"):
        rope.tables(8, 64, base)


def opened_on(monkeypatch: pytest.MonkeyPatch, fake: FakeTorch, **properties: Any) -> TorchGpu:
    """The first GPU of a torch that reports these properties."""
    monkeypatch.setitem(sys.modules, "torch", fake)
    found = SimpleNamespace(**H200 | properties)
    monkeypatch.setattr(torch_gpu, "present_gpu", lambda: limits.from_driver(found))
    return open_gpu("cuda")


def test_a_gpu_that_no_kernel_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened_on(monkeypatch, FakeTorch()).limits.arch == "sm_90"
    says = r"Tesla V100 is sm_70, but kernels are built for .*gfx942.*sm_90"
    with pytest.raises(HypoError, match=says):
        opened_on(monkeypatch, FakeTorch(), name="Tesla V100", major=7)


def test_a_kernel_without_code_for_the_gpu() -> None:
    fake = FakeTorch(vendor="hip")
    device = TorchGpu("hip", fake, 0, limits.TABLE["gfx942"], environ={})
    ran: list[Any] = []
    launch = device.launcher(FakeJit(fake.cuda, ran.append, "rope_kernel"))
    fake.cuda.faults["launch"] = RuntimeReport("no kernel image is available", 209)
    with pytest.raises(LaunchRejected, match=r"rope_kernel: .*hipErrorNoBinaryForGpu \(209\)"):
        launch(1, grid=(4,))
    assert ran == []


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_no_gpu_at_all(monkeypatch: pytest.MonkeyPatch, vendor: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(vendor=vendor, num_gpus=0))
    with pytest.raises(UsageError, match=rf"no GPU {vendor}: torch sees none .*check the driver"):
        devices.open_device(vendor)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=rf"{vendor} needs torch, which is not installed"):
        devices.open_device(vendor)


#: Every kind and the tests that plant it.
COVERED = {kind for kind, *_ in ARGUMENTS} | {
    "rope_base 0",  # test_a_rope_base_that_turns_nothing
    "index beyond its extent",  # test_an_index_beyond_its_extent
    "missing code object for the architecture",  # test_a_gpu_that_no_…, test_a_kernel_without_…
    "no GPU at all",  # test_no_gpu_at_all
}


def test_no_kind_is_left_out() -> None:
    assert set(KINDS) == COVERED
