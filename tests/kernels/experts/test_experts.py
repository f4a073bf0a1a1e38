"""Mixtures of experts op by op: against plain references, and every bit against a single weight."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_forms import use_form
from ops.kernel_launch import (
    bits,
    counts,
    launch,
    random_rows,
    rows_tensor,
    tensor,
    vector_tensor,
    weight_tensor,
)

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.tensor import WEIGHT_TYPES, DType, Tensor
from hypocenter.device.copies import to_device, to_host
from hypocenter.kernels.experts import choice as choices
from hypocenter.kernels.experts import experts as experts_op
from hypocenter.kernels.experts import grouping, mixing
from hypocenter.kernels.experts.choice import ExpertChoice
from hypocenter.kernels.experts.experts import experts_gate_codes, experts_linear
from hypocenter.kernels.experts.experts_table import ExpertsShape, ExpertsTable
from hypocenter.kernels.experts.grouping import group
from hypocenter.kernels.experts.mixing import mix
from hypocenter.kernels.experts.routing import route
from hypocenter.kernels.linear import linear, quantise
from hypocenter.kernels.linear.operands import Operands, Product
from hypocenter.kernels.linear.quantise import gather_operands, prepare_operands
from hypocenter.kernels.rowwise.activation import GATES, gate_codes
from hypocenter.kernels.weights import block_types, packing
from hypocenter.kernels.weights.row_groups import padded_rows

Array = np.ndarray[Any, Any]
EPS = 2.0**-24
NUM_EXPERTS, NUM_USED = 7, 3


@pytest.fixture(params=["one thread", "many threads", "sim:mi300x"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_form(request.param, monkeypatch)


def new_table(
    num_tokens: int, num_experts: int = NUM_EXPERTS, num_used: int = NUM_USED
) -> ExpertsTable:
    shape = ExpertsShape(num_tokens, num_experts, num_used, kernel_launch.device)
    table = ExpertsTable.allocate(shape).first(num_tokens)
    for name in ("ids", "experts", "firsts", "sizes", "sources", "places", "ends"):
        one = getattr(table, name)
        to_device(one, np.full(one.shape, 9999, np.int32))  # nothing may be left of it
    return table


def random_ids(num_tokens: int, num_experts: int = NUM_EXPERTS, num_used: int = NUM_USED) -> Array:
    """Some experts are taken by many, and one by nobody."""
    rng = np.random.default_rng(num_tokens)
    weights = np.arange(num_experts) ** 2 + 0.0
    rows = [
        rng.choice(num_experts, num_used, replace=False, p=weights / weights.sum())
        for _ in range(num_tokens)
    ]
    return np.array(rows, np.int32)


def grouped(
    ids: Array, num_live: int | None = None, num_experts: int = NUM_EXPERTS
) -> ExpertsTable:
    """The table of given choices."""
    table = new_table(len(ids), num_experts, ids.shape[1])
    to_device(table.ids, ids)
    live = counts(len(ids) if num_live is None else num_live)
    launch(lambda p: group(p, table, live), len(ids))
    return table


def groups_of(table: ExpertsTable) -> list[tuple[int, int, int]]:
    found = int(to_host(table.num_groups)[0])
    three = (to_host(one)[:found] for one in (table.experts, table.firsts, table.sizes))
    return [(int(e), int(f), int(s)) for e, f, s in zip(*three, strict=True) if s]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize(
    ("has_bias", "has_gate", "has_factors"),
    [(False, False, False), (True, True, False), (False, False, True)],
)
@pytest.mark.parametrize(("num_experts", "num_used"), [(7, 3), (64, 8), (130, 1), (5, 5)])
@pytest.mark.tier("sim", fast=lambda case: case.num_experts in (7, 130))
def test_route(
    scores: str,
    normalises: bool,
    has_bias: bool,
    has_gate: bool,
    has_factors: bool,
    num_experts: int,
    num_used: int,
) -> None:
    rng, num_tokens = np.random.default_rng(num_experts), 9
    chosen = ExpertChoice(num_experts, num_used, scores, normalises, 1.7, has_gate)
    logits = rng.standard_normal((num_tokens, num_experts + 1)).astype(np.float32) * 2
    bias = rng.standard_normal(num_experts).astype(np.float32) if has_bias else None
    table = new_table(num_tokens, num_experts, num_used)
    given = rows_tensor("logits", logits, np.nan)  # nothing behind them is looked at
    factors = rng.uniform(0.5, 2, num_experts).astype(np.float32) if has_factors else None
    of_choice = vector_tensor("bias", bias) if bias is not None else None
    of_weights = vector_tensor("factors", factors) if factors is not None else None
    live = counts(num_tokens - 1)
    launch(
        lambda p: route(p, given, chosen, table, live, bias=of_choice, factors=of_weights),
        num_tokens,
    )
    ids, weights = choices.reference(logits[:-1], chosen, bias, factors)
    np.testing.assert_array_equal(to_host(table.ids)[:-1], ids)
    np.testing.assert_allclose(to_host(table.weights)[:-1], weights, rtol=2e-6, atol=1e-9)
    assert (to_host(table.ids)[-1] == 9999).all(), "a row that is not live is left alone"


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "num_used", "num_groups", "num_groups_used"),
    [(12, 3, 4, 2), (40, 6, 8, 3), (6, 4, 3, 2)],
)
def test_experts_are_of_the_best_groups(
    num_experts: int, num_used: int, num_groups: int, num_groups_used: int, *, has_bias: bool,
    scores: str,
) -> None:  # fmt: skip
    rng, num_tokens = np.random.default_rng(num_experts), 17
    limits: dict[str, Any] = {"num_groups": num_groups, "num_groups_used": num_groups_used}
    chosen = ExpertChoice(num_experts, num_used, scores, scale=1.7, **limits)
    logits = rng.standard_normal((num_tokens, num_experts)).astype(np.float32)
    bias = rng.uniform(0, 0.05, num_experts).astype(np.float32) if has_bias else None
    of_choice = vector_tensor("bias", bias) if bias is not None else None
    table, given = new_table(num_tokens, num_experts, num_used), rows_tensor("logits", logits)
    launch(lambda p: route(p, given, chosen, table, counts(num_tokens), bias=of_choice), num_tokens)
    ids, weights = choices.reference(logits, chosen, bias)
    np.testing.assert_array_equal(to_host(table.ids), ids)
    np.testing.assert_allclose(to_host(table.weights), weights, rtol=2e-6, atol=1e-9)
    freely, _ = choices.reference(logits, ExpertChoice(num_experts, num_used, scores), bias)
    assert (freely != ids).any(), "groups leave out what would be taken"


def test_groups_that_are_alike_are_taken_in_order() -> None:
    chosen = ExpertChoice(8, 3, "sigmoid", num_groups=4, num_groups_used=2)
    logits = np.zeros((2, 8), np.float32)
    logits[1, [5, 6, 7]] = 1
    table, given = new_table(2, 8, 3), rows_tensor("logits", logits)
    launch(lambda p: route(p, given, chosen, table, counts(2)), 2)
    assert to_host(table.ids).tolist() == [[0, 1, 2], [5, 6, 7]]


@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
def test_groups_without_numbers_have_experts_that_exist(wrong: float) -> None:
    chosen = ExpertChoice(8, 3, "sigmoid", num_groups=4, num_groups_used=2)
    logits = np.full((2, 8), wrong, np.float32)
    logits[1, 1:] = 0
    table, given = new_table(2, 8, 3), rows_tensor("logits", logits)
    launch(lambda p: route(p, given, chosen, table, counts(2)), 2)
    assert [len({*row}) for row in to_host(table.ids).tolist()] == [3, 3]
    assert (to_host(table.ids) < 8).all()
    assert np.isnan(to_host(table.weights)[:, :-1]).all()


def test_equal_scores_are_taken_in_order() -> None:
    table, chosen = new_table(2), ExpertChoice(NUM_EXPERTS, NUM_USED)
    logits = np.zeros((2, NUM_EXPERTS), np.float32)
    logits[1, [2, 5]] = 1
    given = rows_tensor("logits", logits)
    launch(lambda p: route(p, given, chosen, table, counts(2)), 2)
    assert to_host(table.ids).tolist() == [[0, 1, 2], [2, 5, 0]]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_take_experts_that_exist(scores: str, wrong: float) -> None:
    """And weights that are NaN, so that the token's request hears of it, and no other."""
    table, chosen = new_table(3), ExpertChoice(NUM_EXPERTS, NUM_USED, scores)
    logits = np.random.default_rng(0).standard_normal((3, NUM_EXPERTS)).astype(np.float32)
    logits[0, 4], logits[1] = wrong, wrong
    given = rows_tensor("logits", logits)
    launch(lambda p: route(p, given, chosen, table, counts(3)), 3)
    ids, weights = to_host(table.ids), to_host(table.weights)
    assert ((ids >= 0) & (ids < NUM_EXPERTS)).all()
    assert [len({*row}) for row in ids.tolist()] == [NUM_USED] * 3
    assert np.isnan(weights[:2, :-1]).all()
    assert np.isfinite(weights[2]).all()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 21, 70, 300])
@pytest.mark.parametrize(("num_experts", "num_used"), [(7, 3), (2, 1), (40, 8)])
@pytest.mark.tier("sim", fast=lambda case: case.num_experts == 7 or case.num_tokens == 21)
def test_group(num_tokens: int, num_experts: int, num_used: int) -> None:
    ids = random_ids(num_tokens, num_experts, num_used)
    for num_live in {num_tokens, num_tokens // 2}:
        table = grouped(ids, num_live, num_experts)
        shape = table.shape
        groups, places, sources = grouping.reference(
            ids[:num_live], shape.alignment, shape.group_rows
        )
        assert groups_of(table) == groups
        np.testing.assert_array_equal(to_host(table.places)[:num_live], places)
        assert to_host(table.counts).tolist() == [len(sources)] * 2
        made = to_host(table.sources)
        np.testing.assert_array_equal(made[: len(sources)][sources >= 0], sources[sources >= 0])
        assert ((made >= 0) & (made < num_tokens)).all(), "each row is some token's"
        for one in (table.experts, table.firsts, table.sizes):
            assert (to_host(one) < 9999).all(), "each group says whether it is one"


def test_a_table_holds_whatever_its_tokens_take() -> None:
    """Smaller buckets use a larger one's buffers, and the worst choice of experts fits."""
    for device in ("cpu", "cuda"):
        for num_experts, num_used in ((4, 2), (8, 8), (128, 8), (7, 3)):
            whole = ExpertsShape(600, num_experts, num_used, device)
            for num_tokens in (1, 2, 3, 4, 8, 9, 16, 63, 64, 256, 257, 600):
                shape = whole.of(num_tokens)
                assert shape.num_groups <= whole.most_groups
                assert shape.num_rows <= whole.num_rows
                assert shape.num_rows % shape.alignment == 0
                ids = np.arange(num_tokens * num_used).reshape(num_tokens, -1) % num_experts
                groups, _, sources = grouping.reference(ids, shape.alignment, shape.group_rows)
                assert len(sources) <= shape.num_rows
                assert len(groups) <= shape.num_groups


def stack_of(
    dtype: DType, num_outputs: int, num_columns: int, seed: int = 0
) -> tuple[Tensor, Array]:
    """A stack of random experts, packed, and its GGUF bytes [num_experts, num_outputs, bytes]."""
    raw = random_rows(dtype, NUM_EXPERTS * num_outputs, num_columns, seed)
    device = kernel_launch.device
    packed = packing.pack(packing.stack(raw, NUM_EXPERTS), dtype, num_columns, device=device)
    shape = (NUM_EXPERTS, num_outputs, num_columns)
    made = packing.place("stack", "test", packed, device=device, shape=shape)
    return made, raw.reshape(NUM_EXPERTS, num_outputs, -1)


def operands_of(table: ExpertsTable, x: Tensor, weight: Tensor) -> Operands:
    """What products of the sorted rows x with a weight read."""
    made, live = empty_operands(table, weight), table.counts
    launch(lambda p: prepare_operands(p, x, [weight], made, live), table.shape.num_rows)
    return made


def empty_operands(table: ExpertsTable, weight: Tensor) -> Operands:
    shape, width = table.shape, weight.data.num_columns
    made = Operands.allocate([weight.dtype], shape.num_rows, width, device=shape.device)
    return made.first(shape.num_rows, tile=shape.tile)


def sorted_rows(table: ExpertsTable, num_columns: int) -> Array:
    """Random activations in each row of a group; nothing sensible between two groups."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((table.shape.num_rows, num_columns)).astype(np.float32)
    x *= np.exp2(rng.integers(-9, 9, x.shape)).astype(np.float32)
    between = np.ones(len(x), bool)
    for _, first, size in groups_of(table):
        between[first : first + size] = False
    x[between] = np.nan
    return x


COLUMNS = [(dtype, 512 if dtype.is_quantised else 131) for dtype in WEIGHT_TYPES]
#: Types whose products with experts are compiled in the fast tier, which takes seconds each.
FEW_TYPES = (DType.Q4_K, DType.F16)


def is_in_short_grid(case: SimpleNamespace) -> bool:
    if case.device == "one thread":
        return case.dtype in FEW_TYPES
    if case.device == "sim:mi300x":  # where one of many tokens takes seconds
        return case.dtype in FEW_TYPES and case.num_tokens in (1, 5)
    return case.dtype in FEW_TYPES and case.num_tokens in (1, 5, 70)


@pytest.mark.parametrize(("dtype", "num_columns"), COLUMNS)
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 70, 300])
@pytest.mark.tier("sim", fast=is_in_short_grid)
def test_experts_linear_gives_the_bits_of_each_expert_alone(
    dtype: DType, num_columns: int, num_tokens: int
) -> None:
    """Whatever the company, on codes and on floats; so the reference of `linear` holds for it."""
    num_outputs, is_biased = 70, num_tokens not in (2, 300)  # each expert is padded
    table = grouped(random_ids(num_tokens))
    weight, raw = stack_of(dtype, num_outputs, num_columns)
    x = sorted_rows(table, num_columns)
    given = rows_tensor("x", x)
    out = rows_tensor("out", np.full((len(x), num_outputs), 77, np.float32))
    operands = operands_of(table, given, weight)
    biases = np.random.default_rng(6).standard_normal((NUM_EXPERTS, num_outputs))
    biases = biases.astype(np.float32) if is_biased else 0 * biases
    padded = np.pad(biases, ((0, 0), (0, padded_rows(num_outputs) - num_outputs)))
    bias = tensor("bias", padded.ravel()) if is_biased else None
    launch(
        lambda p: experts_linear(p, given, [Product(weight, out, bias)], table, operands),
        num_tokens,
    )
    found = to_host(out)[:, :num_outputs]
    seen = np.zeros(len(x), bool)
    weights = block_types.dequantise(raw.reshape(-1, raw.shape[2]), dtype, num_columns)
    exact = experts_op.reference(
        np.nan_to_num(x), weights.reshape(NUM_EXPERTS, num_outputs, -1), groups_of(table), biases
    )
    for expert, first, size in groups_of(table):
        rows = slice(first, first + size)
        alone = rows_tensor("alone", np.zeros((size, num_outputs), np.float32))
        own, few = weight_tensor(dtype, raw[expert], num_columns), rows_tensor("x", x[rows])
        live, own_bias = counts(size), vector_tensor("bias", biases[expert]) if is_biased else None
        launch(
            partial(linear.linear, x=few, weight=own, out=alone, counts=live, bias=own_bias), size
        )
        assert (bits(found[rows]) == bits(to_host(alone)[:, :num_outputs])).all(), expert
        seen[rows] = True
    assert (found[~seen] == 77).all(), "rows of no group are left alone"
    scale = np.abs(np.nan_to_num(x)).max(axis=1) * np.abs(weights).max() * num_columns
    assert (np.abs(found - exact)[seen] <= scale[seen, None] * 0.02).all()


def test_an_expert_that_nobody_takes_is_not_read(device: str) -> None:
    ids = np.array([[1, 2], [2, 5]], np.int32)
    table = grouped(ids)
    assert [expert for expert, _, _ in groups_of(table)] == [1, 2, 5]
    assert [size for _, _, size in groups_of(table)] == [1, 2, 1]


def is_of_few_gates(case: Any) -> bool:
    return case.dtype is DType.Q4_K and case.kind == "silu" and case.num_tokens in (1, 5, 70)


@pytest.mark.parametrize("dtype", [DType.Q4_K, DType.Q8_0, DType.F16])
@pytest.mark.parametrize("num_tokens", [1, 2, 70])
@pytest.mark.tier("sim", fast=lambda case: case.dtype is DType.Q4_K and case.num_tokens == 1)
def test_two_weights_of_the_same_rows_give_the_bits_of_each(
    device: str, dtype: DType, num_tokens: int
) -> None:
    """In one launch where rows are few and both are codes."""
    num_columns, widths = 512, (70, 150)
    table = grouped(random_ids(num_tokens))
    x = rows_tensor("x", np.nan_to_num(sorted_rows(table, num_columns)))
    num_rows = table.shape.num_rows
    products = []
    for seed, width in enumerate(widths):
        weight, _ = stack_of(dtype, width, num_columns, seed)
        biases = np.arange(NUM_EXPERTS * padded_rows(width), dtype=np.float32)
        out = rows_tensor("out", np.zeros((num_rows, width), np.float32))
        products.append(Product(weight, out, tensor("bias", biases)))
    operands = operands_of(table, x, products[0].weight)
    num_launches = launch(lambda p: experts_linear(p, x, products, table, operands), num_tokens)
    is_one = device != "cpu" and dtype.is_quantised and num_tokens <= 2
    assert num_launches == (1 if is_one else 2)
    for product in products:
        alone = replace(product, out=rows_tensor("alone", 0 * to_host(product.out)))
        launch(
            partial(experts_linear, x=x, products=[alone], table=table, operands=operands),
            num_tokens,
        )
        for _, first, size in groups_of(table):
            rows = slice(first, first + size)
            assert (bits(to_host(product.out)[rows]) == bits(to_host(alone.out)[rows])).all()


def test_one_token_needs_no_table_that_is_made_anew(device: str) -> None:
    """With each choice a group of its own the results have the bits that sorted groups give."""
    width, num_columns, ids = 70, 512, random_ids(1)[:, ::-1].copy()
    weight, _ = stack_of(DType.Q4_K, width, num_columns)
    hidden = np.random.default_rng(3).standard_normal((1, num_columns)).astype(np.float32)
    found = []
    for is_fixed in (False, True):
        table = grouped(ids)
        if is_fixed and device != "cpu":
            table = table.of_one_token()
            assert to_host(table.experts).tolist() == ids[0].tolist()
        to_device(table.weights, np.arange(1, NUM_USED + 2, dtype=np.float32)[None])
        x, made = rows_tensor("hidden", hidden), empty_operands(table, weight)
        sorted_x = rows_tensor("sorted", np.zeros((table.shape.num_rows, num_columns), np.float32))
        out = rows_tensor("out", np.zeros((table.shape.num_rows, width), np.float32))
        total = rows_tensor("total", np.zeros((1, width), np.float32))

        def of_token(p: Any, of: Any = (table, x, made, sorted_x, out, total)) -> None:
            table, x, made, sorted_x, out, total = of
            gather_operands(p, x, table.sources, [weight], made, table.counts, sorted_x)
            experts_linear(p, sorted_x, [Product(weight, out)], table, made)
            mix(p, total, out, table, counts(1), width=width)

        launch(of_token, 1)
        found.append(bits(to_host(total)[:, :width]))
    assert (found[0] == found[1]).all()
    assert found[0].any()


@pytest.mark.parametrize("dtype", [DType.Q4_K, DType.F16, DType.BF16, DType.F32])
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
@pytest.mark.tier("sim", fast=lambda case: case.dtype in FEW_TYPES)
def test_what_experts_read_is_made_of_rows_where_they_lie(
    device: str, dtype: DType, num_tokens: int
) -> None:
    """With the bits that gathering them first gives."""
    table, width = grouped(random_ids(num_tokens)), 512
    weight, _ = stack_of(dtype, 70, width)
    values = np.random.default_rng(9).standard_normal((num_tokens, width)).astype(np.float32)
    hidden = rows_tensor("hidden", values)
    room = rows_tensor("room", np.full((table.shape.num_rows, width), 5, np.float32))
    made = empty_operands(table, weight)
    launch(
        lambda p: gather_operands(p, hidden, table.sources, [weight], made, table.counts, room),
        table.shape.num_rows,
    )
    gathered = rows_tensor("gathered", values[to_host(table.sources)])
    apart = operands_of(table, gathered, weight)
    live = to_host(table.counts)[0]
    if dtype is DType.F32:
        assert (to_host(room)[:live] == to_host(gathered)[:live]).all()
    for field in fields(Operands):
        one, other = getattr(made, field.name), getattr(apart, field.name)
        assert (one is None) == (other is None)
        if one is not None and device != "cpu":
            assert (bits(to_host(one)[:live]) == bits(to_host(other)[:live])).all(), field.name
        elif one is not None:
            assert (bits(to_host(one)) == bits(to_host(other))).all(), field.name


@pytest.mark.parametrize("dtype", [DType.Q8_0, DType.Q4_0, DType.Q4_K, DType.Q6_K])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 21, 70])
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.tier("sim", fast=is_of_few_gates)
def test_experts_gate_codes_is_the_products_and_their_gate(
    device: str, dtype: DType, num_tokens: int, kind: str
) -> None:
    if device != "cpu":
        return  # there products and gate are launches of their own
    width, num_columns = 96, 512
    table = grouped(random_ids(num_tokens))
    parts = [stack_of(dtype, width, num_columns, seed) for seed in (1, 2)]
    raws = [packing.stack(raw.reshape(-1, raw.shape[2]), NUM_EXPERTS) for _, raw in parts]
    packed = packing.pack_by_turns(raws, dtype, num_columns)
    shape = (NUM_EXPERTS, 2 * padded_rows(width), num_columns)
    both = packing.place("both", "test", packed, shape=shape)
    x = rows_tensor("x", np.nan_to_num(sorted_rows(table, num_columns)))
    operands = operands_of(table, x, both)
    outs = [rows_tensor("out", np.zeros((x.shape[0], width), np.float32)) for _ in parts]

    def room() -> Operands:
        made = Operands.allocate([dtype], table.shape.num_rows, width, device="cpu")
        return made.first(table.shape.num_rows, tile=table.shape.tile)

    apart, at_once = room(), room()

    def in_parts(p: Any) -> None:
        for (weight, _), out in zip(parts, outs, strict=True):
            experts_linear(p, x, [Product(weight, out)], table, operands)
        gate_codes(p, outs[0], outs[1], kind, apart, table.counts, width=width)

    launch(in_parts, num_tokens)

    def joined(p: Any) -> None:
        experts_gate_codes(p, operands, both, kind, at_once, table, width=width)

    launch(joined, num_tokens)
    rows = np.concatenate([np.arange(f, f + s) for _, f, s in groups_of(table)])
    for name, made in apart.written.items():
        other = at_once.written[name]
        assert made is not None
        assert other is not None
        wanted, found = (by_row(to_host(one), name)[rows] for one in (made, other))
        np.testing.assert_array_equal(bits(found), bits(wanted))
        assert wanted.any()


def by_row(tiled: Array, name: str) -> Array:
    """[tiles, groups, ..., tile, ...] to [rows, groups, ...]."""
    rows = np.moveaxis(tiled, -2 if name == "codes" else -1, 1)
    return rows.reshape(-1, *rows.shape[2:])


@pytest.mark.parametrize("width", [16, 70, 300])
@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize(("num_tokens", "accumulate"), [(1, True), (6, True), (6, False)])
def test_mix(width: int, has_shared: bool, num_tokens: int, accumulate: bool) -> None:
    rng = np.random.default_rng(8)
    table = grouped(random_ids(num_tokens))
    weights = rng.standard_normal((num_tokens, NUM_USED + 1)).astype(np.float32)
    to_device(table.weights, weights)
    x = rng.standard_normal((num_tokens, width)).astype(np.float32)
    rows = sorted_rows(table, width)
    shared = rng.standard_normal((num_tokens, width)).astype(np.float32) if has_shared else None
    given = rows_tensor("x", x if accumulate else np.full_like(x, np.nan))
    of_all = rows_tensor("shared", shared) if shared is not None else None
    expert_rows = rows_tensor("rows", rows)
    live = counts(num_tokens)
    launch(
        lambda p: mix(
            p, given, expert_rows, table, live, width=width, shared=of_all, accumulate=accumulate
        ),
        num_tokens,
    )
    x = x if accumulate else np.zeros_like(x)
    places = to_host(table.places)
    exact = mixing.reference(x, rows, places, weights.astype(np.float64), shared)
    size = np.abs(x) + (np.abs(rows)[places] * np.abs(weights)[:, :-1, None]).sum(axis=1)
    size += 0 if shared is None else np.abs(shared * weights[:, -1:])
    error = np.abs(to_host(given)[:, :width] - exact) / size
    assert np.max(error) <= (NUM_USED + 3) * EPS


@pytest.mark.tier("sim", fast=lambda case: case.device != "sim:mi300x")
def test_a_token_of_a_mixture_does_not_depend_on_its_company() -> None:
    """The whole way from the logits of a router, alone and among many."""
    width, inner, dtype = 256, 128, DType.Q8_0
    first, second = stack_of(dtype, inner, width, 1)[0], stack_of(dtype, width, inner, 2)[0]
    rng = np.random.default_rng(4)
    x = rng.standard_normal((70, width)).astype(np.float32)
    logits = rng.standard_normal((70, NUM_EXPERTS)).astype(np.float32)

    def run(rows: slice) -> Array:
        own = x[rows]
        table, live = new_table(len(own)), counts(len(own))
        scores, out = rows_tensor("logits", logits[rows]), rows_tensor("x", own)
        launch(
            lambda p: route(p, scores, ExpertChoice(NUM_EXPERTS, NUM_USED), table, live), len(own)
        )
        launch(lambda p: group(p, table, live), len(own))
        of_rows = rows_tensor("rows", own[to_host(table.sources)])
        middle = rows_tensor("middle", np.zeros((table.shape.num_rows, inner), np.float32))
        made = operands_of(table, of_rows, first)
        launch(
            lambda p: experts_linear(p, of_rows, [Product(first, middle)], table, made), len(own)
        )
        again = operands_of(table, middle, second)
        launch(
            lambda p: experts_linear(p, middle, [Product(second, of_rows)], table, again), len(own)
        )
        launch(lambda p: mix(p, out, of_rows, table, live, width=width), len(own))
        return to_host(out)

    together = run(slice(0, 70))
    for start, stop in ((0, 1), (2, 5), (3, 20)):
        assert (bits(run(slice(start, stop))) == bits(together[start:stop])).all(), (start, stop)


def test_what_does_not_fit_is_refused() -> None:
    table = grouped(random_ids(5))
    weight, _ = stack_of(DType.F32, 70, 64)
    x = rows_tensor("x", np.zeros((table.shape.num_rows, 64), np.float32))
    out = rows_tensor("out", np.zeros((table.shape.num_rows, 70), np.float32))
    made = operands_of(table, x, weight)

    def refused(match: str, **changes: Tensor) -> None:
        given: dict[str, Any] = {"x": x, "out": out} | changes
        products = [Product(weight, given["out"])]
        with pytest.raises(LaunchRejected, match=match):
            launch(lambda p: experts_linear(p, given["x"], products, table, made), 5)

    refused("experts: out .* must be", out=x)
    refused("x .* num_columns", x=rows_tensor("x", np.zeros((x.shape[0], 0), np.float32)))
    live, few = counts(5), replace(table, sources=tensor("few", np.zeros(3, np.int32)))
    with pytest.raises(LaunchRejected, match="the sorted rows must hold each choice"):
        launch(lambda p: group(p, few, live), 5)
    scores = rows_tensor("scores", np.zeros((5, NUM_EXPERTS), np.float32))
    with pytest.raises(LaunchRejected, match="a token cannot take more experts than there are"):
        launch(lambda p: route(p, scores, ExpertChoice(2, NUM_USED), table, live), 5)


@pytest.mark.parametrize(
    ("num_groups", "num_groups_used", "text"),
    [
        (3, 1, "groups must share experts evenly"),
        (4, 5, "num_groups_used is 5, but must be 1 to num_groups"),
        (4, 1, "a token cannot take more experts than its groups have"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    num_groups: int, num_groups_used: int, text: str
) -> None:
    limits: dict[str, Any] = {"num_groups": num_groups, "num_groups_used": num_groups_used}
    chosen = ExpertChoice(8, NUM_USED, **limits)
    table, scores = new_table(2), rows_tensor("scores", np.zeros((2, 8), np.float32))
    with pytest.raises(LaunchRejected, match=text):
        launch(partial(route, scores=scores, choice=chosen, table=table, counts=counts(2)), 2)


def test_a_checked_launch_refuses_an_expert_that_is_not_there() -> None:
    table = grouped(random_ids(5))
    weight, _ = stack_of(DType.F32, 70, 64)
    x = rows_tensor("x", np.zeros((table.shape.num_rows, 64), np.float32))
    out = rows_tensor("out", np.zeros((table.shape.num_rows, 70), np.float32))
    wrong = to_host(table.experts).copy()
    wrong[0] = NUM_EXPERTS
    to_device(table.experts, wrong)
    facts = {"weight": weight, "out": out, "bias": None, "x": x} | experts_op._arguments_of(table)
    with pytest.raises(LaunchRejected, match=r"experts\[0\] = 7, but the experts has 7"):
        experts_op.FLOATS.check_values(to_host, **facts)
    stale = random_ids(5)
    stale[3, 1] = -1
    to_device(table.ids, stale)
    given = {
        "ids": table.ids, "experts": table.experts, "firsts": table.firsts, "sizes": table.sizes,
        "sources": table.sources, "places": table.places, "sorted_counts": table.counts,
        "found": table.num_groups, "counts": counts(5), "num_experts": NUM_EXPERTS,
        "alignment": table.shape.alignment,
    }  # fmt: skip
    with pytest.raises(LaunchRejected, match=r"ids\[3, 1\] = -1"):
        grouping.GROUP.check_values(to_host, **given)


def test_no_weight_is_larger_than_its_score_says() -> None:
    """The reference itself: weights of a token add up to the scale where they are normalised."""
    logits = np.random.default_rng(1).standard_normal((20, NUM_EXPERTS))
    _, weights = choices.reference(logits, ExpertChoice(NUM_EXPERTS, NUM_USED, scale=2.5))
    np.testing.assert_allclose(weights[:, :-1].sum(axis=1), 2.5)
    assert math.isclose(weights[0, -1], 1.0)
    assert quantise.TINY > 0
