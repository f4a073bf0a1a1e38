"""rope_write beside its parts: the same bits in q and in the cache, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.tiny_gguf import write_tiny
from ops import kernel_launch
from ops.kernel_launch import Array, bits, counts, launch, rows_tensor, tensor, transposed

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.device.copies import to_host
from hypocenter.device.launch import run
from hypocenter.device.plan import PlanBuilder
from hypocenter.engine.runner import load_runner
from hypocenter.kernels.attention import kv_write, rope, rope_write
from hypocenter.kernels.attention.rope_write import HeadNorms
from hypocenter.kernels.rowwise.norm import rms_norm
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.layers.step_buffers import KVPages
from hypocenter.settings.config import EngineConfig

NUM_BLOCKS, BLOCK_SIZE, NUM_POSITIONS = 5, 16, 512


@pytest.fixture(autouse=True, params=["sim:mi300x", "cpu"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "device", devices.open_device(request.param))


@dataclass
class Case:
    """Right arguments of rope_write, until a test changes one; every call makes the same numbers.

    Rows are wider than heads are, and what lies behind them, and in the cache, is NaN.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    slots: Tensor
    table: tuple[Tensor, Tensor]
    k_cache: Tensor
    v_cache: Tensor
    counts: Tensor
    num_heads: int
    head_dim: int
    style: str
    norms: HeadNorms | None = None

    @classmethod
    def right(
        cls, *, num_tokens: int = 3, num_live: int | None = None, num_heads: int = 6,
        num_kv_heads: int = 3, head_dim: int = 20, rope_dim: int = 12, style: str = "normal",
        is_f16: bool = False, lay: Callable[[str, Array], Tensor] = tensor,
    ) -> Case:  # fmt: skip
        rng = np.random.default_rng(11)

        def heads(name: str, num: int) -> Tensor:
            values = rng.standard_normal((num_tokens, num * head_dim)).astype(np.float32)
            return rows_tensor(name, values, fill=np.nan)

        def pages(name: str, *shape: int) -> Tensor:
            empty = np.full((NUM_BLOCKS, num_kv_heads, *shape), np.nan, np.float32)
            return lay(name, empty.astype(np.float16).view(np.uint16) if is_f16 else empty)

        positions = rng.integers(0, NUM_POSITIONS, num_tokens).astype(np.int32)
        slots = rng.permutation(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens].astype(np.int32)
        cos, sin = rope.tables(NUM_POSITIONS, rope_dim, 10000.0)
        return cls(
            q=heads("q", num_heads),
            k=heads("k", num_kv_heads),
            v=heads("v", num_kv_heads),
            positions=tensor("positions", positions),
            slots=tensor("slots", slots),
            table=(tensor("cos", cos), tensor("sin", sin)),
            k_cache=pages("k_cache", head_dim, BLOCK_SIZE),
            v_cache=pages("v_cache", BLOCK_SIZE, -(-head_dim // 16) * 16),
            counts=counts(num_tokens if num_live is None else num_live),
            num_heads=num_heads,
            head_dim=head_dim,
            style=style,
        )

    def together(self, plan: PlanBuilder) -> None:
        rope_write.rope_write(
            plan, self.q, self.k, self.v, self.positions, self.slots, self.table, self.k_cache,
            self.v_cache, self.counts, num_heads=self.num_heads, head_dim=self.head_dim,
            style=self.style, norms=self.norms,
        )  # fmt: skip

    def one_by_one(self, plan: PlanBuilder) -> None:
        for x, num_heads in ((self.q, self.num_heads), (self.k, self.k_cache.shape[1])):
            norms = self.norms or HeadNorms(None, None, 1.0)
            norm = norms.q if x is self.q else norms.k
            if norm is not None:
                rms_norm(
                    plan, x, norm, norms.eps, x, self.counts,
                    width=self.head_dim, num_heads=num_heads,
                )  # fmt: skip
            rope.rotate(
                plan, x, self.positions, self.table, self.counts,
                num_heads=num_heads, head_dim=self.head_dim, style=self.style,
            )  # fmt: skip
        kv_write.kv_write(plan, self.k, self.v, self.slots, self.k_cache, self.v_cache, self.counts)

    def planned(self) -> PlanBuilder:
        plan = PlanBuilder(self.q.shape[0], kernel_launch.device)
        self.together(plan)
        return plan


def exactly(x: Tensor) -> Array:
    """The contents of a tensor as integers."""
    values = to_host(x)
    return values if values.dtype == np.uint16 else bits(values)


FORMS = [
    pytest.param({"num_tokens": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "rope_dim": 2},
                 id="least"),
    pytest.param({"num_tokens": 1, "head_dim": 64, "rope_dim": 64}, id="one token"),
    pytest.param({}, id="some columns stay"),
    pytest.param({"head_dim": 20, "rope_dim": 20}, id="all columns turn"),
    pytest.param({"num_tokens": 7, "num_live": 3, "num_heads": 5, "num_kv_heads": 5},
                 id="some rows are live"),
    pytest.param({"num_live": 0}, id="no row is live"),
]  # fmt: skip


@pytest.mark.parametrize("style", ["normal", "neox"])
@pytest.mark.parametrize("is_f16", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.tier("sim", fast=lambda case: case.is_f16 == (case.style == "neox"))
def test_it_comes_to_the_bits_of_its_parts(form: dict[str, Any], is_f16: bool, style: str) -> None:
    fused, parts, before = (Case.right(**form, is_f16=is_f16, style=style) for _ in range(3))
    launch(fused.together, fused.q.shape[0])
    launch(parts.one_by_one, parts.q.shape[0])
    for name in ("q", "k_cache", "v_cache"):
        np.testing.assert_array_equal(exactly(getattr(fused, name)), exactly(getattr(parts, name)))
        changed = exactly(getattr(fused, name)) != exactly(getattr(before, name))
        assert changed.any() == (form.get("num_live") != 0)
    for name in ("k", "v"):
        np.testing.assert_array_equal(exactly(getattr(fused, name)), exactly(getattr(before, name)))


@pytest.mark.parametrize("normed", ["q", "k", "qk"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.tier("sim", fast=lambda case: case.normed == "qk")
def test_heads_are_normed_in_it_as_before_it(form: dict[str, Any], normed: str) -> None:
    """By one launch on a GPU; what does not turn is normed as well."""
    cases = [Case.right(**form, style="neox") for _ in range(3)]
    fused, parts, plain = cases
    rng, head_dim = np.random.default_rng(4), fused.head_dim
    weights = [tensor(name, rng.uniform(0.5, 2, head_dim).astype(np.float32)) for name in "qk"]
    q, k = (w if name in normed else None for name, w in zip("qk", weights, strict=True))
    fused.norms = parts.norms = HeadNorms(q, k, 1e-5)
    num_launches = launch(fused.together, fused.q.shape[0])
    assert num_launches == (1 + len(normed) if kernel_launch.device == "cpu" else 1)
    for case in (parts, plain):
        launch(case.one_by_one, case.q.shape[0])
    for name, part in (("q", "q"), ("k_cache", "k"), ("v_cache", "")):
        found, wanted, other = (exactly(getattr(case, name)) for case in cases)
        np.testing.assert_array_equal(found, wanted)
        is_normed = bool(part) and part in normed and form.get("num_live") != 0
        assert (found != other).any() == is_normed


def test_a_norm_that_is_too_short_is_refused() -> None:
    case = Case.right()
    case.norms = HeadNorms(None, tensor("k_norm", np.ones(19, np.float32)), 1e-5)
    with pytest.raises(LaunchRejected, match=r"k_norm.* must be at least (width|head_dim) = 20"):
        case.planned()


@pytest.mark.parametrize("place", ["cpu"], indirect=True)
@pytest.mark.parametrize("is_f16", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.tier("sim", fast=lambda case: "num_tokens" in case.form)
def test_pages_of_a_cpu_may_lie_in_either_order(form: dict[str, Any], is_f16: bool) -> None:
    wanted = Case.right(**form, is_f16=is_f16)
    launch(wanted.together, wanted.q.shape[0])
    fused, parts = (Case.right(**form, is_f16=is_f16, lay=transposed) for _ in range(2))
    launch(fused.together, fused.q.shape[0])
    launch(parts.one_by_one, parts.q.shape[0])
    for name in ("k_cache", "v_cache"):
        for found in (fused, parts):
            np.testing.assert_array_equal(
                exactly(getattr(found, name)), exactly(getattr(wanted, name))
            )


def test_other_orders_are_refused() -> None:
    """A page of a CPU is whole; of a GPU, so is the cache."""
    case = Case.right()
    cache, on_cpu = case.k_cache, kernel_launch.device == "cpu"
    assert cache.strides == (960, 320, 16, 1)
    wanted = "contiguous along its last two axes" if on_cpu else "contiguous"
    for strides, is_refused in (((320, 1600, 16, 1), not on_cpu), ((960, 320, 15, 1), True)):
        case.k_cache = replace(cache, strides=strides)
        for together in (case.together, case.one_by_one):
            plan = PlanBuilder(case.q.shape[0], kernel_launch.device)
            if is_refused:
                with pytest.raises(LaunchRejected, match=rf"strides .*, but must be {wanted}$"):
                    together(plan)
            else:
                together(plan)


def test_pages_of_a_head_lie_together_on_a_cpu(tmp_path: Path) -> None:
    with open_gguf(write_tiny(tmp_path / "tiny.gguf")) as file:
        arch = read_architecture(file)
    arch = replace(arch, layers=(replace(arch.layers[0], num_kv_heads=3),))
    pages = KVPages.allocate(arch, 5, BLOCK_SIZE, DType.F16, device=kernel_launch.device)
    for cache in (*pages.keys, *pages.values):
        page, width = cache.shape[2] * cache.shape[3], cache.shape[3]
        outer = (page, 5 * page) if kernel_launch.device == "cpu" else (3 * page, page)
        assert cache.strides == (*outer, width, 1)
        assert re.search(r"step_buffers\.py:\d+$", cache.allocation.site)


def wide_heads(case: Case) -> None:
    case.num_heads = 99


def no_heads(case: Case) -> None:
    case.num_heads = 0


def other_head_dim(case: Case) -> None:
    case.head_dim = 18


def odd_head_dim(case: Case) -> None:
    case.head_dim = 19


def wide_table(case: Case) -> None:
    cos, sin = rope.tables(NUM_POSITIONS, 22, 10000.0)
    case.table = tensor("cos", cos), tensor("sin", sin)


def short_sin(case: Case) -> None:
    case.table = case.table[0], tensor("sin", to_host(case.table[1])[:-1])


def few_positions(case: Case) -> None:
    case.positions = tensor("positions", np.zeros(2, np.int32))


def few_slots(case: Case) -> None:
    case.slots = tensor("slots", np.zeros(2, np.int32))


def two_byte_slots(case: Case) -> None:
    case.slots = memory.allocate("slots", "step", DType.I16, (3,), device=kernel_launch.device)


def few_rows_of_v(case: Case) -> None:
    case.v = rows_tensor("v", np.zeros((2, 60), np.float32))


def narrow_k(case: Case) -> None:
    case.k = tensor("k", np.zeros((3, 59), np.float32))


def other_pages(case: Case) -> None:
    case.v_cache = tensor("v_cache", np.zeros((NUM_BLOCKS, 2, BLOCK_SIZE, 32), np.float32))


def unpadded_values(case: Case) -> None:
    case.v_cache = tensor("v_cache", np.zeros((NUM_BLOCKS, 3, BLOCK_SIZE, 20), np.float32))


def k_in_q(case: Case) -> None:
    case.k = replace(case.q, name="k")


def v_in_q(case: Case) -> None:
    case.v = replace(case.q, name="v")


def freed(case: Case) -> None:
    memory.free(case.v_cache)


def other_style(case: Case) -> None:
    case.style = "spiral"


REFUSED: list[tuple[Callable[[Case], None], str]] = [
    (wide_heads, r"q has 128 along axis 1, but must be at least num_heads \* head_dim = 1980"),
    (no_heads, "num_heads is 0, but must be above 0"),
    (other_head_dim, "k_cache has 20 along axis 2, but must be head_dim = 18"),
    (odd_head_dim, "head_dim is 19, but must be even and above 0"),
    (wide_table, "half = 11, head_dim = 20, but the table must turn 1 to head_dim / 2 pairs"),
    (short_sin, "sin has 511 along axis 0, but must be num_positions = 512"),
    (few_positions, "positions has 2 along axis 0, but must be at least num_tokens = 3"),
    (few_slots, "slots has 2 along axis 0, but must be at least num_tokens = 3"),
    (two_byte_slots, "slots is i16, but it is read as i32"),
    (few_rows_of_v, "v has 2 along axis 0, but must be num_tokens = 3"),
    (narrow_k, r"k has 59 along axis 1, but must be at least num_kv_heads \* head_dim = 60"),
    (other_pages, "v_cache has 2 along axis 1, but must be num_kv_heads = 3"),
    (unpadded_values, "value_pitch = 20, head_dim = 20, but values are written as whole vectors"),
    (k_in_q, "q and k share memory, but the one is written while the other is read"),
    (v_in_q, "q and v share memory, but the one is written while the other is read"),
    (freed, r"v_cache was freed at .*test_rope_write\.py:\d+"),
    (other_style, "style is 'spiral', but must be normal or neox"),
]


@pytest.mark.parametrize(("plant", "says"), REFUSED, ids=[row[0].__name__ for row in REFUSED])
def test_what_parts_refuse_it_refuses(plant: Callable[[Case], None], says: str) -> None:
    case = Case.right()
    assert len(case.planned().launches) == 1
    plant(case)
    with pytest.raises(LaunchRejected, match=f"^rope_write: {says}"):
        case.planned()


INDICES = [
    ("positions", [0, -1, 2], r"positions\[1\] = -1, but the table has 512"),
    ("positions", [0, 1, 512], r"positions\[2\] = 512, but the table has 512"),
    ("slots", [0, 80, 2], r"slots\[1\] = 80, but the cache has 80"),
    ("slots", [3, 1, 3], r"slots\[2\] = 3, but an entry before has the same value"),
    ("counts", [4, 0], r"counts\[0\] = 4, but a step of that size has 4"),
]


@pytest.mark.parametrize(("name", "values", "says"), INDICES)
def test_an_index_is_refused_before_anything_is_written(
    name: str, values: list[int], says: str
) -> None:
    case, before = Case.right(), Case.right()
    (prepared,) = case.planned().launches
    prepared.set_mode("checked")
    copies.to_device(getattr(case, name), np.array(values, np.int32))
    with pytest.raises(LaunchRejected, match=f"^rope_write: {says}"):
        run([prepared])
    for written in ("q", "k_cache", "v_cache"):
        np.testing.assert_array_equal(
            exactly(getattr(case, written)), exactly(getattr(before, written))
        )


def test_indices_of_rows_that_are_not_live_may_be_anything() -> None:
    case, right = Case.right(num_live=1), Case.right(num_live=1)
    (prepared,) = case.planned().launches
    prepared.set_mode("checked")
    for name in ("positions", "slots"):
        values = to_host(getattr(case, name)).copy()
        values[1:] = -7
        copies.to_device(getattr(case, name), values)
    run([prepared])
    launch(right.together, right.q.shape[0])
    for written in ("q", "k_cache", "v_cache"):
        np.testing.assert_array_equal(
            exactly(getattr(case, written)), exactly(getattr(right, written))
        )


@pytest.mark.parametrize(
    ("device", "attention", "rope_dim", "kernels"),
    [
        ("sim:h200", "fused", 10, ["rope_write"]),
        ("sim:h200", "fused", 4, ["rope_write"]),
        ("sim:h200", "fused", 0, ["kv_write"]),
        ("sim:h200", "parts", 10, ["rope", "rope", "kv_write"]),
        ("sim:h200", "parts", 0, ["kv_write"]),
        ("cpu", "fused", 10, ["rope_write"]),
        ("cpu", "fused", 0, ["kv_write"]),
    ],
)
def test_a_layer_runs_it_where_it_can(
    device: str, attention: str, rope_dim: int, kernels: list[str], tmp_path: Path
) -> None:
    dimensions = {"rope.dimension_count": rope_dim}
    model = write_tiny(tmp_path / "tiny.gguf", metadata=dimensions)
    with open_gguf(model) as file:
        runner = load_runner(file, EngineConfig(device=device, attention=attention))
    ran = [one.kernel for one in runner._decoder.plan(2, 1).launches]
    assert [name for name in ran if name.startswith(("rope", "kv_write"))] == kernels
