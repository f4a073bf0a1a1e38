"""Codes or, on a GPU, halves that a kernel makes along with what it computes: every bit as its
parts make them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_launch import (
    counts,
    launch,
    rows_tensor,
    tensor,
    vector_tensor,
    weight_tensor,
)

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention import attention as attention_op
from hypocenter.kernels.attention.attention import TileScratch, attention
from hypocenter.kernels.linear import quantise as quantise_op
from hypocenter.kernels.linear.linear import linear_several
from hypocenter.kernels.linear.linear_gate import linear_gate_codes
from hypocenter.kernels.linear.operands import Operands, Product, reads_operands_alone
from hypocenter.kernels.linear.quantise import quantise
from hypocenter.kernels.rowwise import activation, norm
from hypocenter.kernels.rowwise.activation import activate, activate_codes, gate, gate_codes
from hypocenter.kernels.rowwise.layer_norm import layer_norm, layer_norm_codes
from hypocenter.kernels.rowwise.norm import rms_norm, rms_norm_codes
from hypocenter.kernels.weights.packing import pack_by_turns, place

Array = np.ndarray[Any, Any]
SIM = "sim:mi300x"
KINDS = {DType.F32: np.float32, DType.I32: np.int32, DType.F16: np.uint16}


@pytest.fixture(autouse=True, params=[SIM, "cpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kernel_launch, "device", devices.open_device(request.param))
    return str(request.param)


def room(num_rows: int, width: int) -> Operands:
    """For codes, or halves and fragments: what was there before must not be left."""
    device = kernel_launch.device
    into = Operands.allocate([DType.Q4_0], num_rows, width, device=device).first(num_rows)
    if into.halves is not None:
        fragments = tensor("fragments", np.zeros(into.halves.shape, np.uint16))
        into = dataclasses.replace(into, fragments=fragments)
    for one in into.written.values():
        assert one is not None
        copies.to_device(one, np.full(one.shape, 77, KINDS[one.dtype]))
    return into


def same(parts: Operands, at_once: Operands, width: int, num_live: int) -> None:
    """Equal in the rows that are live, to the end of the last unit; else untouched."""
    for name, written in parts.written.items():
        other = at_once.written[name]
        assert written is not None
        assert other is not None
        found, wanted = copies.to_host(other), copies.to_host(written)
        if kernel_launch.device == "cpu":  # where rows lie in tiles
            np.testing.assert_array_equal(bits_of(found), bits_of(wanted))
            assert (bits_of(wanted) != bits_of(np.array(77, wanted.dtype))).any() == (num_live > 0)
            continue
        filled = -(-width // 128) * 128
        if name != "row_scales":
            assert (found[:, filled:] == 77).all()
            found, wanted = found[:, :filled], wanted[:, :filled]
        np.testing.assert_array_equal(bits_of(found[:num_live]), bits_of(wanted[:num_live]))
        assert not num_live or not (found[:num_live] == 77).all(axis=0).any()
        assert (found[num_live:] == 77).all()


def bits_of(values: Array) -> Array:
    return values.view({2: np.uint16, 4: np.uint32}[values.itemsize])


def both(
    num_rows: int,
    width: int,
    num_live: int,
    parts: Callable[[PlanBuilder, Operands], None],
    at_once: Callable[[PlanBuilder, Operands], None],
) -> None:
    first, second = room(num_rows, width), room(num_rows, width)
    launch(lambda p: parts(p, first), num_rows)
    launch(lambda p: at_once(p, second), num_rows)
    same(first, second, width, num_live)


def numbers(*shape: int) -> Array:
    """Random, among them rows of zeros, huge and undefined ones."""
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(shape) * 3).astype(np.float32)
    if shape[0] > 2:
        x[0], x[1, 0], x[2, -1] = 0, np.nan, np.inf
    return x


def is_in_short_grid(case: SimpleNamespace) -> bool:
    """A simulated GPU takes 128 turns for the only column of each row."""
    is_quick = case.device == "cpu" or case.num_rows == 1
    return bool(case.width == 1100 or (case.width == 1 and is_quick))


@pytest.mark.parametrize(("num_rows", "num_live"), [(1, 1), (3, 3), (5, 4), (19, 17), (2, 0)])
@pytest.mark.parametrize("width", [1, 64, 130, 1100])
@pytest.mark.tier("sim", fast=lambda case: case.width in (64, 1100))
def test_codes_of_a_norm(num_rows: int, num_live: int, width: int) -> None:
    x, live = rows_tensor("x", numbers(num_rows, width), np.nan), counts(0, num_live)
    weight = vector_tensor("w", numbers(1, width)[0])
    hidden = rows_tensor("hidden", np.zeros((num_rows, width), np.float32))

    def parts(plan: PlanBuilder, into: Operands) -> None:
        rms_norm(plan, x, weight, 1e-5, hidden, live, width=width, count=1)
        quantise(plan, hidden, width, into, live, count=1)

    def at_once(plan: PlanBuilder, into: Operands) -> None:
        rms_norm_codes(plan, x, weight, 1e-5, into, live, width=width, count=1)

    both(num_rows, width, num_live, parts, at_once)


@pytest.mark.parametrize(("num_rows", "num_live"), [(1, 1), (3, 3), (19, 17), (2, 0)])
@pytest.mark.parametrize("width", [1, 130, 1100])
@pytest.mark.tier("sim", fast=is_in_short_grid)
def test_codes_of_a_layer_norm(num_rows: int, num_live: int, width: int) -> None:
    x, live = rows_tensor("x", numbers(num_rows, width), np.nan), counts(0, num_live)
    weight, bias = (vector_tensor(name, numbers(1, width)[0]) for name in ("w", "b"))
    hidden = rows_tensor("hidden", np.zeros((num_rows, width), np.float32))

    def parts(plan: PlanBuilder, into: Operands) -> None:
        layer_norm(plan, x, weight, bias, 1e-5, hidden, live, width=width, count=1)
        quantise(plan, hidden, width, into, live, count=1)

    def at_once(plan: PlanBuilder, into: Operands) -> None:
        layer_norm_codes(plan, x, weight, bias, 1e-5, into, live, width=width, count=1)

    both(num_rows, width, num_live, parts, at_once)


@pytest.mark.parametrize("kind", ["gelu", "relu2"])
@pytest.mark.parametrize(("num_rows", "num_live"), [(1, 1), (5, 4), (19, 17), (2, 0)])
@pytest.mark.parametrize("width", [1, 130, 1100])
@pytest.mark.tier("sim", fast=is_in_short_grid)
def test_codes_of_an_activation(num_rows: int, num_live: int, width: int, kind: str) -> None:
    given, live = numbers(num_rows, width), counts(num_live)
    x = rows_tensor("x", given, float("nan"))  # beyond the width nothing is looked at

    def parts(plan: PlanBuilder, into: Operands) -> None:
        other = rows_tensor("x", given)
        activate(plan, other, kind, live)
        quantise(plan, other, width, into, live)

    def at_once(plan: PlanBuilder, into: Operands) -> None:
        activate_codes(plan, x, kind, into, live, width=width)

    both(num_rows, width, num_live, parts, at_once)


@pytest.mark.parametrize("kind", activation.GATES)
@pytest.mark.parametrize(("num_rows", "num_live"), [(1, 1), (5, 4), (19, 17), (2, 0)])
@pytest.mark.parametrize("width", [1, 130, 1100])
@pytest.mark.tier("sim", fast=is_in_short_grid)
def test_codes_of_a_gate(num_rows: int, num_live: int, width: int, kind: str) -> None:
    opened, up = numbers(num_rows, width), numbers(num_rows, width)[:, ::-1].copy()
    fill, live = float("nan"), counts(num_live)  # beyond the width nothing is looked at
    x, ups = rows_tensor("gate", opened, fill), rows_tensor("up", up, fill)

    def parts(plan: PlanBuilder, into: Operands) -> None:
        other = rows_tensor("gate", opened)
        gate(plan, other, ups, kind, live)
        quantise(plan, other, width, into, live)

    def at_once(plan: PlanBuilder, into: Operands) -> None:
        gate_codes(plan, x, ups, kind, into, live, width=width)

    both(num_rows, width, num_live, parts, at_once)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("kind", activation.GATES)
@pytest.mark.parametrize(("num_rows", "num_live"), [(1, 1), (5, 4), (19, 17), (40, 39), (2, 0)])
@pytest.mark.parametrize("dtype", [DType.Q8_0, DType.Q4_0, DType.Q4_K, DType.Q6_K])
@pytest.mark.parametrize("width", [1, 96, 130, 320])
@pytest.mark.tier("sim", fast=lambda case: case.dtype is DType.Q8_0 and case.width != 320)
def test_codes_of_a_gate_of_products(
    num_rows: int, num_live: int, width: int, kind: str, dtype: DType
) -> None:
    num_columns = 512
    raws = [kernel_launch.random_rows(dtype, width, num_columns, seed) for seed in (1, 2)]
    weights = [weight_tensor(dtype, raw, num_columns) for raw in raws]
    joined = place("both", "test", pack_by_turns(raws, dtype, num_columns))
    x, live = rows_tensor("x", numbers(num_rows, num_columns)), counts(num_live)
    of_x = room(num_rows, num_columns)

    def parts(plan: PlanBuilder, into: Operands) -> None:
        outs = [rows_tensor("out", np.zeros((num_rows, width), np.float32)) for _ in weights]
        products = list(map(Product, weights, outs))
        linear_several(plan, x, products, live, of_x)
        gate_codes(plan, outs[0], outs[1], kind, into, live, width=width)

    def at_once(plan: PlanBuilder, into: Operands) -> None:
        quantise(plan, x, num_columns, of_x, live)
        linear_gate_codes(plan, of_x, joined, kind, into, live, width=width)

    both(num_rows, width, num_live, parts, at_once)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 64), (1, 1, 128), (6, 3, 32), (2, 2, 96), (5, 1, 80)]
)
@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.tier(
    "sim",
    fast=lambda case: (
        case.device == "cpu"
        or (case.num_tokens == 1 and case.heads < 5)
        or (case.heads == 1 and not case.is_split)
    ),
)
def test_codes_of_attention(
    heads: int, kv_heads: int, head_dim: int, num_tokens: int, is_split: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The fold makes them of heads that fill groups and units; others, and prompts, by a part.

    On the CPU the keys of tokens are split where they fill more than a tile.
    """
    monkeypatch.setattr(attention_op, "num_threads", lambda: 17)  # or pairs are not cut
    first = 600 if is_split and kernel_launch.device == "cpu" else 70
    rng, num_blocks, width = np.random.default_rng(4), first // 16 + 2, heads * head_dim
    keys = rng.standard_normal((num_blocks, kv_heads, head_dim, 16)).astype(np.float32)
    pitch = -(-head_dim // 16) * 16
    values = rng.standard_normal((num_blocks, kv_heads, 16, pitch)).astype(np.float32)
    if kernel_launch.device != "cpu" and num_tokens == 1:  # a cache of f16 gives results of f16
        halves = [one.astype(np.float16).view(np.uint16) for one in (keys, values)]
        k_cache, v_cache = tensor("k_cache", halves[0]), tensor("v_cache", halves[1])
    else:
        k_cache, v_cache = tensor("k_cache", keys), tensor("v_cache", values)
    q = rows_tensor("q", rng.standard_normal((num_tokens, width)).astype(np.float32))
    tables = tensor("tables", np.arange(num_blocks, dtype=np.int32)[None])
    rows = tensor("rows", np.zeros(num_tokens, np.int32))
    positions = tensor("positions", (first + np.arange(num_tokens)).astype(np.int32))
    out = rows_tensor("out", np.full((num_tokens, width), 5, np.float32))
    live, partial = counts(num_tokens), None
    if is_split and kernel_launch.device != "cpu":
        partial = TileScratch.allocate(k_cache, v_cache, num_tokens, heads, num_blocks, device=SIM)

    def attend(plan: PlanBuilder, into: Operands | None) -> None:
        attention(
            plan, q, k_cache, v_cache, tables, rows, positions, out, live, num_heads=heads,
            scale=0.1, partial=partial, codes=into,
        )  # fmt: skip

    def parts(plan: PlanBuilder, into: Operands) -> None:
        attend(plan, None)
        quantise(plan, out, width, into, live, is_plain=k_cache.dtype is DType.F16)

    both(num_tokens, width, num_tokens, parts, attend)


def test_codes_are_all_that_is_read_where_every_weight_is_of_blocks() -> None:
    raw = kernel_launch.random_rows(DType.Q4_0, 2, 64)
    blocks = weight_tensor(DType.Q4_0, raw, 64)
    floats = weight_tensor(DType.F32, np.zeros((2, 256), np.uint8), 64)
    halves = dataclasses.replace(floats, dtype=DType.F16)
    for device in ("cpu", SIM):
        assert reads_operands_alone([blocks, blocks], device)
        assert not reads_operands_alone([blocks, floats], device)
        assert reads_operands_alone([blocks, halves], device) == (device != "cpu")


def test_what_cannot_hold_the_codes_is_refused(device: str) -> None:
    plan, live, into = PlanBuilder(2, device), counts(2), room(2, 1024)
    is_short = (
        "groups of the result must" if device == "cpu" else "a row of the result must hold it"
    )
    x: Tensor = rows_tensor("x", numbers(2, 1088))
    weight = vector_tensor("w", numbers(1, 1088)[0])
    with pytest.raises(LaunchRejected, match=is_short):
        rms_norm_codes(plan, x, weight, 1e-5, into, live, width=1088)
    with pytest.raises(LaunchRejected, match=is_short):
        gate_codes(plan, x, x, "silu", into, live, width=1088)
    with pytest.raises(LaunchRejected, match="width is 1100"):
        gate_codes(plan, x, x, "silu", room(2, 2048), live, width=1100)
    with pytest.raises(LaunchRejected, match="kind is 'relu'"):
        gate_codes(plan, x, x, "relu", into, live, width=64)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_joined_weight_that_does_not_fit_is_refused() -> None:
    raws = [kernel_launch.random_rows(DType.Q4_0, 130, 64, seed) for seed in (1, 2)]
    joined = place("both", "test", pack_by_turns(raws, DType.Q4_0, 64))
    plan, live, x, into = PlanBuilder(2), counts(2), room(2, 64), room(2, 130)
    linear_gate_codes(plan, x, joined, "silu", into, live, width=129)
    for width in (0, 128, 193):
        with pytest.raises(LaunchRejected, match=f"width is {width}, but must be that of the gate"):
            linear_gate_codes(plan, x, joined, "silu", into, live, width=width)
    with pytest.raises(LaunchRejected, match="the groups of the result must hold a row"):
        linear_gate_codes(plan, x, joined, "silu", room(2, 128), live, width=130)
    with pytest.raises(LaunchRejected, match=r"gated_codes.*codes"):
        linear_gate_codes(plan, into, joined, "silu", into, live, width=130)
    with pytest.raises(LaunchRejected, match="kind is 'relu'"):
        linear_gate_codes(plan, x, joined, "relu", into, live, width=130)


@pytest.mark.parametrize("device", [SIM], indirect=True)
@pytest.mark.parametrize("num_rows", [1, 9])
def test_contracts_say_how_far_rounded_rows_are_filled(num_rows: int) -> None:
    """Room is for the widest operand; what a narrower one leaves is no unwritten output."""
    narrow, wide = 130, 3000
    for contract, facts in (
        (norm.ROUNDED, {"width": narrow}),
        (activation.GATE_ROUND, {"width": narrow}),
        (quantise_op.SCALED, {"width": narrow}),
        (attention_op.FOLD_ROUND, {"num_heads": 6, "value_dim": 32}),
    ):
        written = {
            name: one for name, one in room(num_rows, wide).written.items() if one is not None
        }
        shapes = {name: one.shape for name, one in written.items()}
        for name in ("rounded", "fragments"):
            assert contract.shape_of(name, shapes, facts) == (num_rows, 256), (
                contract.kernel,
                name,
            )
