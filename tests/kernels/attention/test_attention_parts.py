"""Each part of the unfused attention against its reference, and the fused one against them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.tiny_gguf import write_tiny
from ops import kernel_launch
from ops.kernel_launch import Array, bits, counts, launch, rows_tensor, tensor

from hypocenter.base.errors import LaunchRejected, UsageError
from hypocenter.base.tensor import Tensor
from hypocenter.device import devices
from hypocenter.device.copies import to_host
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.engine.batch import Batch
from hypocenter.engine.runner import load_runner
from hypocenter.kernels.attention import attention
from hypocenter.kernels.attention import unfused as parts
from hypocenter.model.facts.architecture import Architecture, Rope
from hypocenter.model.facts.families import FAMILIES
from hypocenter.model.facts.layer_shapes import LayerShape
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.layers.unfused import AttentionArguments, UnfusedAttention
from hypocenter.settings.config import EngineConfig
from hypocenter.verify import bounds

EPS = 2.0**-24
DEVICE = "sim:mi300x"
# keys and tokens of the longer sequence, query heads, KV heads, head_dim
SHAPES = [(1, 1, 1, 1, 2), (3, 3, 3, 1, 20), (127, 2, 6, 2, 64), (129, 3, 5, 5, 129)]
BLOCK_SIZE, MAX_BLOCKS = 16, 10
MAX_CONTEXT = BLOCK_SIZE * MAX_BLOCKS
SHORT_KEYS = 5


@pytest.fixture(autouse=True)
def sim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "device", devices.open_device(DEVICE))


@dataclass
class _Case:
    """Block tables of three rows: none, a sequence of num_keys, one of 5; tokens of both.

    What no sequence owns is NaN in the cache and -1 in the tables.
    """

    num_keys: int
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "f32"
    k: Array = field(init=False)
    v: Array = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.num_keys)
        self.lengths = [0, self.num_keys, SHORT_KEYS]
        self.rows = np.array([1] * self.num_tokens + [2], np.int32)
        last = np.arange(self.num_keys - self.num_tokens, self.num_keys)
        self.positions = np.array([*last, SHORT_KEYS - 1], np.int32)
        self.tables = np.full((3, MAX_BLOCKS), -1, np.int32)
        free = iter(rng.permutation(2 * MAX_BLOCKS).tolist())
        pages = (2 * MAX_BLOCKS, self.num_kv_heads, BLOCK_SIZE, self.head_dim)
        self.k, self.v = np.full((2, *pages), np.nan, np.float32)
        for row, length in enumerate(self.lengths):
            for start in range(0, length, BLOCK_SIZE):
                block, count = next(free), min(BLOCK_SIZE, length - start)
                self.tables[row, start // BLOCK_SIZE] = block
                shape = (2, self.num_kv_heads, count, self.head_dim)
                values = rng.standard_normal(shape).astype(np.float16)
                self.k[block, :, :count], self.v[block, :, :count] = values
        self.q = rng.standard_normal(
            (len(self.rows), self.num_heads, self.head_dim), dtype=np.float32
        )

    @property
    def batch(self) -> int:
        return len(self.rows)

    def cache(self, name: str) -> Tensor:
        if name == "k":
            pages = self.k.swapaxes(2, 3)
        else:
            pages = np.full((*self.v.shape[:3], -(-self.head_dim // 16) * 16), np.nan, np.float32)
            pages[..., : self.head_dim] = self.v
        if self.dtype == "f16":
            return tensor(name, np.ascontiguousarray(pages.astype(np.float16)).view(np.uint16))
        return tensor(name, np.ascontiguousarray(pages))

    def on_device(self) -> parts.Rows:
        lengths = np.array(self.lengths, np.int32)
        return parts.Rows(tensor("rows", self.rows), tensor("lengths", lengths), counts(self.batch))

    def of(self, row: int, pages: Array) -> Array:
        """What the reference makes of one sequence: [heads, keys, dim]."""
        table, num_keys = self.tables[row], self.lengths[row]
        return parts.expand_reference(pages, table, num_keys, self.num_heads)

    def scores(self) -> Array:
        """Random scores [batch, heads, max_context]; NaN beyond each token's sequence."""
        rng = np.random.default_rng(8)
        shape = (self.batch, self.num_heads, MAX_CONTEXT)
        values = 5 * rng.standard_normal(shape, dtype=np.float32)
        for token, row in enumerate(self.rows):
            values[token, :, self.lengths[row] :] = np.nan
        return values

    def each(self, values: Array) -> list[tuple[int, Array]]:
        """(token, its row [1, heads, keys]) of values [batch, heads, max_context]."""
        return [
            (token, values[token : token + 1, :, : self.lengths[row]])
            for token, row in enumerate(self.rows)
        ]


def _empty(name: str, *shape: int) -> Tensor:
    return tensor(name, np.full(shape, np.nan, np.float32))


@pytest.fixture(params=SHAPES, ids=str)
def case(request: pytest.FixtureRequest) -> _Case:
    return _Case(*request.param)


def test_context_lengths(case: _Case) -> None:
    rows, positions = case.on_device(), tensor("positions", case.positions)
    launch(lambda p: parts.context_lengths(p, rows, positions, max_context=MAX_CONTEXT), case.batch)
    expected = parts.context_lengths_reference(case.rows, case.positions, 3)
    assert to_host(rows.lengths).tolist() == expected.tolist() == case.lengths


def test_context_lengths_of_more_tokens_than_a_program_takes_at_once() -> None:
    rng = np.random.default_rng(0)
    sequence_rows = rng.integers(0, 3, 600, np.int32)
    positions = (np.arange(600) // 7).astype(np.int32)
    positions[-1] = 99  # not live
    rows = parts.Rows(tensor("r", sequence_rows), tensor("n", np.zeros(4, np.int32)), counts(599))
    place = tensor("positions", positions)
    launch(lambda p: parts.context_lengths(p, rows, place, max_context=100), 600)
    expected = parts.context_lengths_reference(sequence_rows[:599], positions[:599], 4)
    assert (to_host(rows.lengths) == expected).all()


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.tier("sim", fast=lambda case: case.shape in SHAPES[:2])
def test_expand_and_transpose(shape: tuple[int, int, int, int, int], dtype: str) -> None:
    case = _Case(*shape, dtype=dtype)
    rows, tables = case.on_device(), tensor("tables", case.tables)
    size = (3, case.num_heads, MAX_CONTEXT, case.head_dim)
    keys, values = _empty("keys", *size), _empty("values", *size)
    turned = _empty("turned", *size[:2], case.head_dim, MAX_CONTEXT)

    def op(plan: PlanBuilder) -> None:
        parts.expand_keys(plan, case.cache("k"), tables, rows.lengths, keys)
        parts.expand_values(plan, case.cache("v"), tables, rows.lengths, values)
        parts.transpose(plan, keys, rows.lengths, turned)

    launch(op, case.batch)
    k, v, k_turned = to_host(keys), to_host(values), to_host(turned)
    for row, length in enumerate(case.lengths):
        exact = case.of(row, case.k)
        np.testing.assert_array_equal(k[row, :, :length], exact)
        np.testing.assert_array_equal(v[row, :, :length], case.of(row, case.v))
        np.testing.assert_array_equal(
            k_turned[row, :, :, :length], parts.transpose_reference(exact)
        )
        assert np.isnan(k[row, :, length:]).all()
        assert np.isnan(v[row, :, length:]).all()
        assert np.isnan(k_turned[row, :, :, length:]).all()


def _turned_keys(case: _Case) -> Array:
    keys = np.full((3, case.num_heads, case.head_dim, MAX_CONTEXT), np.nan, np.float32)
    for row, length in enumerate(case.lengths):
        keys[row, :, :, :length] = case.of(row, case.k).swapaxes(1, 2)
    return keys


def test_scores(case: _Case) -> None:
    keys, out = _turned_keys(case), _empty("scores", case.batch, case.num_heads, MAX_CONTEXT)
    q = rows_tensor("q", case.q.reshape(case.batch, -1), fill=np.nan)
    rows, placed = case.on_device(), tensor("keys", keys)
    launch(lambda p: parts.scores(p, q, placed, rows, out), case.batch)
    for token, got in case.each(to_host(out)):
        own = keys[case.rows[token], :, :, : got.shape[-1]]
        query = case.q[token : token + 1]
        exact = parts.scores_reference(query, own)
        size = parts.scores_reference(np.abs(query), np.abs(own))
        bound = (math.log2(case.head_dim) + 4) * EPS
        assert np.max(np.abs(got - exact) / size) <= bound
        short = parts.scores_reference(query[..., :-1], own[:, :-1])
        assert np.max(np.abs(short - exact) / size) > 10 * bound
    assert np.isnan(to_host(out)[-1, :, SHORT_KEYS:]).all()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_scale_scores(case: _Case, softcap: float) -> None:
    before, rows = case.scores(), case.on_device()
    out = tensor("scores", before)
    launch(lambda p: parts.scale_scores(p, out, rows, scale=0.3, softcap=softcap), case.batch)
    after = to_host(out)
    for (_, start), (_, got) in zip(case.each(before), case.each(after), strict=True):
        exact = parts.scale_scores_reference(start, 0.3, softcap)
        # tanh(x) as 2 / (1 + exp(-2 x)) - 1 has absolute errors of its parts, each at most 2.
        assert np.max(np.abs(got - exact)) <= 8 * EPS * max(np.abs(exact).max(), 2 * softcap)
    assert (np.isnan(after) == np.isnan(before)).all()


@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_mask(case: _Case, window: int) -> None:
    before, rows, positions = case.scores(), case.on_device(), tensor("p", case.positions)
    out = tensor("scores", before)
    launch(lambda p: parts.mask(p, out, rows, positions, window=window), case.batch)
    after = to_host(out)
    for (token, start), (_, got) in zip(case.each(before), case.each(after), strict=True):
        own = case.positions[token : token + 1]
        np.testing.assert_array_equal(got, parts.mask_reference(start, own, window))
    assert (np.isnan(after) == np.isnan(before)).all()


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (160, 1, 3, 3, 2)], ids=str)
def test_softmax(shape: tuple[int, int, int, int, int], has_sinks: bool) -> None:
    case = _Case(*shape)
    before, rows = case.scores(), case.on_device()
    before += 200  # exp(200) is more than f32 holds
    before[:, 0, 1:2] = -np.inf  # masked, where the sequence has a second key
    for token, row in enumerate(case.rows):
        before[token, :, case.lengths[row] :] = np.nan
    out = tensor("scores", before)
    sinks = 200 + np.arange(case.num_heads, dtype=np.float32) if has_sinks else None
    placed = None if sinks is None else tensor("sinks", sinks)
    launch(lambda p: parts.softmax(p, out, rows, sinks=placed), case.batch)
    for (_, start), (_, got) in zip(case.each(before), case.each(to_host(out)), strict=True):
        exact = parts.softmax_reference(start, sinks)
        assert (got[exact == 0] == 0).all()
        kept = exact > 0
        error = np.max(np.abs(got[kept] - exact[kept]) / exact[kept])
        assert error <= _softmax_bound(start)


def _softmax_bound(scores: Array) -> float:
    """Relative: s - top is rounded once, which exp turns into |s - top| eps, above and below."""
    finite = scores[np.isfinite(scores)]
    return float(2 * np.ptp(finite) + math.log2(finite.size + 1) + 12) * EPS


def test_weighted_sum(case: _Case) -> None:
    rng = np.random.default_rng(9)
    weights = np.abs(case.scores())
    values = np.full((3, case.num_heads, MAX_CONTEXT, case.head_dim), np.nan, np.float32)
    for row, length in enumerate(case.lengths):
        shape = (case.num_heads, length, case.head_dim)
        values[row, :, :length] = rng.standard_normal(shape)
    rows = case.on_device()
    wide = case.num_heads * case.head_dim
    out = rows_tensor("out", np.full((case.batch, wide), np.nan, np.float32))
    placed = tensor("weights", weights), tensor("values", values)
    launch(lambda p: parts.weighted_sum(p, *placed, rows, out), case.batch)
    got = to_host(out)[:, :wide].reshape(case.q.shape)
    for token, own in case.each(weights):
        seen = values[case.rows[token], :, : own.shape[-1]]
        exact = parts.weighted_sum_reference(own, seen)
        size = parts.weighted_sum_reference(own, np.abs(seen))
        bound = (math.log2(own.shape[-1]) + 4) * EPS
        assert np.max(np.abs(got[token] - exact) / size) <= bound
    assert (to_host(out)[:, wide:] == 0).all()


def test_dead_rows_stay_as_they_are(case: _Case) -> None:
    before, rows = case.scores(), case.on_device()
    rows = parts.Rows(rows.sequence_rows, rows.lengths, counts(case.batch - 1))
    out, positions = tensor("scores", before), tensor("positions", case.positions)
    summed = rows_tensor("out", np.full((case.batch, 256 * 3), 7, np.float32))
    values = tensor("v", np.ones((3, case.num_heads, MAX_CONTEXT, case.head_dim), np.float32))
    keys = tensor("k", np.ones((3, case.num_heads, case.head_dim, MAX_CONTEXT), np.float32))

    def op(plan: PlanBuilder) -> None:
        parts.scores(plan, summed, keys, rows, out)
        parts.scale_scores(plan, out, rows, scale=2.0)
        parts.mask(plan, out, rows, positions, window=1)
        parts.softmax(plan, out, rows)
        parts.weighted_sum(plan, out, values, rows, summed)

    launch(op, case.batch)
    assert (bits(to_host(out)[-1]) == bits(before[-1])).all()
    assert (to_host(summed)[-1] == 7).all()


@pytest.mark.parametrize(
    ("window", "softcap", "dtype"),
    [(0, 0.0, "f32"), (2, 0.0, "f16"), (0, 1.5, "f16"), (100, 1.5, "f32")],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.tier("sim", fast=lambda case: case.shape in SHAPES[:2])
def test_fused_attention_agrees_with_its_parts(
    shape: tuple[int, int, int, int, int], window: int, softcap: float, dtype: str
) -> None:
    case = _Case(*shape, dtype=dtype)
    scale = case.head_dim**-0.5
    got = _attended(case, scale, window, softcap)
    for row in (1, 2):
        own = case.rows == row
        k, v = case.of(row, case.k), case.of(row, case.v)
        pair = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
        exact = attention.reference(case.q[own], *pair, scale, window, softcap)
        bound = _attention_bound(case.q[own], k, v, scale, softcap)
        right, off = bounds.of_attention(
            case.q[own], *pair, bounds.Scoring(scale, window, softcap), is_f16=dtype == "f16"
        )
        assert np.max(np.abs(got["parts"][own] - exact)) <= bound
        assert (np.abs(got["fused"][own] - right) <= off + bound).all()
        if case.lengths[row] > 1 and window != 1:
            short = pair[0][:-1], pair[1][:-1]
            wrong = attention.reference(case.q[own][-1:], *short, scale, window, softcap)
            assert np.max(np.abs(wrong - exact[-1:])) > 10 * bound


def _attention_bound(q: Array, k: Array, v: Array, scale: float, softcap: float) -> float:
    """Of |out - exact|, in f32, in whatever order it is summed.

    A score is off by the product's bound and by tanh's (8 eps of the cap); a weight, relatively, by
    twice that and what softmax adds; the weighted sum by its own, on values of at most max |v|.
    """
    sizes = scale * parts.scores_reference(np.abs(q), np.abs(k).swapaxes(1, 2))
    exact = parts.scale_scores_reference(parts.scores_reference(q, k.swapaxes(1, 2)), scale, 0.0)
    score = (math.log2(k.shape[-1]) + 6) * EPS * sizes.max() + 8 * EPS * softcap
    weight = 2 * score + _softmax_bound(exact)
    return float((weight + (math.log2(k.shape[1]) + 4) * EPS) * np.abs(v).max())


def _attended(case: _Case, scale: float, window: int, softcap: float) -> dict[str, Array]:
    """[batch, heads, head_dim] of the fused op and of the parts, through the decoder's buffers."""
    wide = case.num_heads * case.head_dim
    arch = replace(_FACTS, layers=(LayerShape(1, case.head_dim, 64),), num_heads=case.num_heads)
    unfused = UnfusedAttention.allocate(arch, case.batch, 3, MAX_CONTEXT, device=DEVICE)
    q = rows_tensor("q", case.q.reshape(case.batch, -1))
    live, rows = counts(case.batch), tensor("rows", case.rows)
    positions, tables = tensor("positions", case.positions), tensor("tables", case.tables)
    inputs = (q, case.cache("k"), case.cache("v"), tables, rows, positions)
    outs = {
        kind: rows_tensor(kind, np.full((case.batch, wide), np.nan, np.float32))
        for kind in ("fused", "parts")
    }
    plan = PlanBuilder(case.batch, DEVICE)
    attention.attention(
        plan, *inputs, outs["fused"], live, num_heads=case.num_heads, scale=scale, window=window,
        softcap=softcap,
    )  # fmt: skip
    unfused.measure(plan, rows, positions, live)
    given = AttentionArguments(*inputs, outs["parts"], live, scale, window, softcap)
    unfused.attend(plan, given)
    checked = Plan(plan, outs["parts"])
    checked.set_mode("checked")
    checked.run()
    return {kind: to_host(out)[:, :wide].reshape(case.q.shape) for kind, out in outs.items()}


_FACTS = Architecture(
    name="llama", family=FAMILIES["llama"], layers=(LayerShape(1, 2, 64),), width=64, num_heads=1,
    vocab_size=8, context_length=MAX_CONTEXT, norm_eps=1e-5, rope=Rope(base=1e4, dim=2),
    local_rope=Rope(base=1e4, dim=2), attn_scale=1.0, attn_softcap=0.0, final_softcap=0.0,
)  # fmt: skip


def _logits(model: Path, num_steps: int = 3, **settings: Any) -> tuple[Array, set[str]]:
    """Logits of a prompt in up to three steps, beside another sequence, and what ran."""
    config = EngineConfig(
        device=DEVICE, context_length=64, max_batch_tokens=8, max_batch_requests=2, **settings
    )
    with open_gguf(model) as file:
        runner = load_runner(file, config)
    ids = np.random.default_rng(1).integers(0, 7, 21).astype(np.int32)
    tables = np.array([[3, 0, -1, -1], [2, 1, -1, -1]], np.int32)
    logits = []
    for start, stop in ((0, 7), (7, 14), (14, 21))[:num_steps]:
        positions = np.concatenate([np.arange(start, stop), [start // 7]]).astype(np.int32)
        rows = np.array([0] * 7 + [1], np.int32)
        slots = tables[rows, positions // 16] * 16 + positions % 16
        tokens = np.append(ids[start:stop], np.int32(5))
        wanted = np.arange(8, dtype=np.int32)
        step = Batch(tokens, positions, slots.astype(np.int32), rows, tables, wanted)
        logits.append(to_host(runner.run(step), 8))
    return np.concatenate(logits), set(runner.route().kernels)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("gemma2", {"attn_logit_softcapping": 5.0, "attention.sliding_window": 4}),
        ("olmo2", {"attention.sliding_window": 4}),
    ],
)
@pytest.mark.tier("sim")
def test_a_whole_model_gives_the_same_logits(
    tmp_path: Path, family: str, more: dict[str, float]
) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", family, metadata=more, num_layers=2)
    fused, fused_kernels = _logits(model)
    unfused, kernels = _logits(model, attention="parts", launch_mode="checked")
    assert kernels - fused_kernels == {
        "context_lengths", "expand", "transpose", "scores", "scale_scores", "mask", "softmax",
        "weighted_sum", "rope", "kv_write",
    }  # fmt: skip
    assert fused_kernels - kernels == {"attention", "rope_write"}
    # Two layers on sums of some twenty numbers; neither route is closer to the truth.
    assert np.max(np.abs(unfused - fused)) <= 64 * EPS * np.abs(fused).max()


@pytest.mark.tier("sim")
def test_a_guarded_run_of_the_parts_gives_the_same_bits(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf")
    plain, _ = _logits(model, 1, attention="parts")
    guarded, _ = _logits(model, 1, attention="parts", launch_mode="guarded")
    assert (bits(plain) == bits(guarded)).all()


def test_parts_on_the_cpu_are_refused() -> None:
    with pytest.raises(UsageError, match="attention is 'parts', but parts run on GPU"):
        EngineConfig(device="cpu", attention="parts")
    with pytest.raises(UsageError, match="attention is 'flash', but must be one of fused, parts"):
        EngineConfig(attention="flash", device=DEVICE)
    with pytest.raises(UsageError, match="attention is 'parts', but parts run on GPU"):
        UnfusedAttention.allocate(_FACTS, 1, 1, 16, device="cpu")


def test_arguments_that_disagree_are_refused_by_name() -> None:
    case = _Case(*SHAPES[1])
    rows, tables = case.on_device(), tensor("tables", case.tables)
    scores = _empty("scores", case.batch, 3, MAX_CONTEXT)
    keys, turned = _empty("keys", 3, 3, 64, 20), _empty("turned", 3, 3, 64, 20)
    far, short = _empty("far", 3, 3, MAX_CONTEXT + 1, 20), _empty("short", 2, 3, 64, 20)
    odd, fewer = _empty("odd", 3, 3, 20, 64), _empty("fewer", 3, 3, 64, 10)
    big, wide = _empty("big", 3, 3, 64, 40), _empty("wide", 3, 3, MAX_CONTEXT, 30)
    narrow = rows_tensor("narrow", np.zeros((case.batch, 2), np.float32))
    many = _empty("many", 3, 3, 30, MAX_CONTEXT)
    pair = _Case(3, 3, 2, 2, 20).cache("k")
    k, v, n = case.cache("k"), case.cache("v"), rows.lengths
    refused = [
        (lambda p: parts.expand_keys(p, k, tables, n, far), "must reach over the context"),
        (lambda p: parts.expand_keys(p, k, tables, n, fewer), r"fewer. has 10 along axis 3"),
        (lambda p: parts.expand_keys(p, pair, tables, n, keys), "must share KV heads evenly"),
        (lambda p: parts.expand_values(p, v, tables, n, big), "a value must fit its row"),
        (lambda p: parts.transpose(p, keys, n, turned), r"turned. has 64 along axis 2"),
        (lambda p: parts.transpose(p, short, n, short), "lengths has 3|short. has 64"),
        (lambda p: parts.scores(p, narrow, many, rows, scores), r"q .narrow. has 64 along"),
        (lambda p: parts.scores(p, narrow, odd, rows, scores), "scores has 160 along axis 2"),
        (lambda p: parts.scale_scores(p, scores, rows, scale=0.0), "scale is 0.0"),
        (lambda p: parts.scale_scores(p, scores, rows, scale=1.0, softcap=-1.0), "softcap is"),
        (lambda p: parts.mask(p, scores, rows, n, window=0), r"positions .lengths. has 3"),
        (lambda p: parts.mask(p, scores, rows, rows.sequence_rows, window=-1), "window is -1"),
        (lambda p: parts.softmax(p, _empty("long", 9, 3, 2), rows), r"sequence_rows .rows. has 4"),
        (lambda p: parts.weighted_sum(p, scores, wide, rows, narrow), r"out .narrow. has 64"),
    ]
    for op, message in refused:
        with pytest.raises(LaunchRejected, match=message):
            launch(op, case.batch)


def test_a_wrong_length_is_refused_in_checked_mode() -> None:
    case = _Case(*SHAPES[1])
    lengths = tensor("lengths", np.array([0, 3, MAX_CONTEXT + 1], np.int32))
    rows = parts.Rows(tensor("rows", case.rows), lengths, counts(case.batch))
    plan = PlanBuilder(case.batch, DEVICE)
    parts.softmax(plan, tensor("scores", case.scores()), rows)
    checked = Plan(plan, lengths)
    checked.set_mode("checked")
    with pytest.raises(LaunchRejected, match=r"lengths\[2\] = 161, but the context has 161"):
        checked.run()
