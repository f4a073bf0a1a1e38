"""Ops with a state against their references in float64; chunks, company, what lay there before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.kernel_forms import FORMS, use_form
from ops.kernel_launch import bits, counts, launch, rows_tensor, tensor, vector_tensor

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.tensor import Tensor
from hypocenter.device.copies import to_host
from hypocenter.kernels.recurrent import delta_rule, short_conv, ssm_scan
from hypocenter.kernels.recurrent.delta_rule import DeltaHeads
from hypocenter.kernels.recurrent.sequences import Sequences
from hypocenter.kernels.recurrent.ssm_scan import ScanHeads
from hypocenter.kernels.rowwise import gate_norm

EPS = 2.0**-24
MAX_SEQUENCES, NUM_SLOTS = 4, 5
#: Of the FORMS the slow one: of a grid it has a part in the fast tier.
SIM = "sim:mi300x"


@pytest.fixture(params=FORMS, autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_form(request.param, monkeypatch)


def sequences_of(
    spans: list[tuple[int, int, int]],
    sources: list[int] | None = None,
    checkpoints: list[tuple[int, int]] | None = None,
) -> Sequences:
    """Of (slot, first position, number of tokens) each, one behind the other; states are read in
    `sources`, and left in checkpoints (slot, row behind the last token of it), too."""
    slots, starts = np.zeros(MAX_SEQUENCES, np.int32), np.zeros(MAX_SEQUENCES + 1, np.int32)
    read, (kept, stops) = slots.copy(), np.zeros((2, MAX_SEQUENCES), np.int32)
    lengths = [length for _, _, length in spans]
    slots[: len(spans)] = [slot for slot, _, _ in spans]
    starts[1 : len(spans) + 1] = np.cumsum(lengths)
    read[: len(spans)] = slots[: len(spans)] if sources is None else sources
    for at, (slot, stop) in enumerate(checkpoints or []):
        kept[at], stops[at] = slot, stop
    rows = np.repeat(np.arange(len(spans), dtype=np.int32), lengths)
    positions = [np.arange(first, first + length) for _, first, length in spans]
    return Sequences(
        tensor("state_slots", slots),
        tensor("state_sources", read),
        tensor("checkpoint_slots", kept),
        tensor("checkpoint_stops", stops),
        tensor("sequence_starts", starts),
        tensor("sequence_rows", rows),
        tensor("positions", np.concatenate(positions).astype(np.int32)),
        counts(sum(lengths)),
    )


def stale(*shape: int) -> Tensor:
    """A state in which others have left what must not be read."""
    return tensor("state", np.full((NUM_SLOTS, *shape), np.nan, np.float32))


class Conv:
    """A convolution of 70 channels over four tokens."""

    def __init__(self, *, activates: bool = True, has_bias: bool = False) -> None:
        rng, self.activates = np.random.default_rng(0), activates
        self.weight = rng.standard_normal((4, 70)).astype(np.float32)
        wide = np.zeros((4, 128), np.float32)
        wide[:, :70] = self.weight
        self.padded, self.state = tensor("weight", wide), stale(3, 128)
        self.bias = rng.standard_normal(70).astype(np.float32) if has_bias else None
        self.padded_bias = None if self.bias is None else vector_tensor("bias", self.bias)

    def take(self, x: np.ndarray, spans: list[tuple[int, int, int]], **states: Any) -> np.ndarray:
        out = rows_tensor("out", np.full_like(x, np.nan))
        given, where = rows_tensor("x", x), sequences_of(spans, **states)
        launch(
            lambda p: short_conv.short_conv(
                p,
                given,
                self.padded,
                self.state,
                out,
                where,
                bias=self.padded_bias,
                activates=self.activates,
            ),
            len(x),
        )
        return to_host(out)[:, : x.shape[1]]


class Delta:
    """Value heads of so many columns, and key heads of 20, of which there are half as many."""

    def __init__(self, value_dim: int = 70, heads_in_turn: int = 1) -> None:
        rng = np.random.default_rng(1)
        self.heads, self.num_heads, self.key_dim = DeltaHeads(2, value_dim, heads_in_turn), 4, 20
        self.bias = rng.uniform(-1, 1, 4).astype(np.float32)
        self.rates = -rng.uniform(0.05, 2, 4).astype(np.float32)
        self.state = stale(4, self.key_dim, -(-value_dim // 64) * 64)

    def inputs(self, num_tokens: int, seed: int = 2) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        width = 2 * 2 * self.key_dim + 4 * self.heads.value_dim
        shapes = ((num_tokens, width), (num_tokens, 4), (num_tokens, 4))
        return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    def take(
        self, given: list[np.ndarray], spans: list[tuple[int, int, int]], **states: Any
    ) -> np.ndarray:
        num_tokens, width = len(given[0]), self.num_heads * self.heads.value_dim
        out = rows_tensor("out", np.full((num_tokens, width), np.nan, np.float32))
        x, betas, steps = (rows_tensor(name, v) for name, v in zip("xbs", given, strict=True))
        bias, rates = vector_tensor("step_bias", self.bias), vector_tensor("rates", self.rates)
        where = sequences_of(spans, **states)
        launch(
            lambda p: delta_rule.delta_rule(
                p, x, betas, steps, bias, rates, self.state, out, where, heads=self.heads
            ),
            num_tokens,
        )
        return to_host(out)[:, :width]

    def expected(self, given: list[np.ndarray]) -> np.ndarray:
        x, betas, steps = (values.astype(np.float64) for values in given)
        of_key = np.arange(4) // self.heads.heads_in_turn % 2
        keys = 2 * self.key_dim
        q, k, v = np.split(x, [keys, 2 * keys], axis=1)
        q, k = (part.reshape(len(x), 2, -1)[:, of_key] for part in (q, k))
        decay = np.exp(self.rates * np.log1p(np.exp(steps + self.bias)))
        v = v.reshape(len(x), 4, -1)
        out = delta_rule.reference(q, k, v, 1 / (1 + np.exp(-betas)), decay)
        return out.reshape(len(x), -1)


class Scan:
    """Four heads of 70 columns, and states of 20 by head, in so many groups."""

    def __init__(self, num_groups: int = 2, value_dim: int = 70) -> None:
        rng = np.random.default_rng(11)
        self.heads, self.num_heads, self.state_dim = ScanHeads(num_groups, value_dim), 4, 20
        self.bias, self.skips = rng.uniform(-1, 1, (2, 4)).astype(np.float32)
        self.rates = -rng.uniform(0.05, 2, 4).astype(np.float32)
        self.state = stale(4, self.state_dim, -(-value_dim // 64) * 64)

    def inputs(self, num_tokens: int, seed: int = 2) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        width = 4 * self.heads.value_dim + 2 * self.heads.num_groups * self.state_dim
        shapes = ((num_tokens, width), (num_tokens, 4))
        return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    def take(
        self, given: list[np.ndarray], spans: list[tuple[int, int, int]], **states: Any
    ) -> np.ndarray:
        num_tokens, width = len(given[0]), self.num_heads * self.heads.value_dim
        out = rows_tensor("out", np.full((num_tokens, width), np.nan, np.float32))
        x, steps = (rows_tensor(name, v) for name, v in zip("xs", given, strict=True))
        names = ("bias", "rates", "skips")
        bias, rates, skips = (vector_tensor(name, getattr(self, name)) for name in names)
        where = sequences_of(spans, **states)
        launch(
            lambda p: ssm_scan.ssm_scan(
                p, x, steps, bias, rates, skips, self.state, out, where, heads=self.heads
            ),
            num_tokens,
        )
        return to_host(out)[:, :width]

    def expected(self, given: list[np.ndarray]) -> np.ndarray:
        x, steps = (values.astype(np.float64) for values in given)
        num_groups, values = self.heads.num_groups, 4 * self.heads.value_dim
        of_groups = num_groups * self.state_dim
        v, b, c = np.split(x, [values, values + of_groups], axis=1)
        of_head = np.arange(4) // (4 // num_groups)
        b, c = (part.reshape(len(x), num_groups, -1)[:, of_head] for part in (b, c))
        steps = np.log1p(np.exp(steps + self.bias))
        v = v.reshape(len(x), 4, -1)
        return ssm_scan.reference(v, b, c, steps, self.rates, self.skips).reshape(len(x), -1)


@pytest.mark.parametrize(("activates", "has_bias"), [(True, False), (False, False), (True, True)])
def test_short_conv(activates: bool, has_bias: bool) -> None:
    x = np.random.default_rng(3).standard_normal((9, 70)).astype(np.float32)
    model = Conv(activates=activates, has_bias=has_bias)
    expected = short_conv.reference(x, model.weight, model.bias, activates=activates)
    found = model.take(x, [(2, 0, 9)])
    assert np.abs(found - expected).max() < 32 * EPS * np.abs(expected).max()


@pytest.mark.parametrize(("value_dim", "heads_in_turn"), [(70, 1), (16, 2)])
def test_delta_rule(value_dim: int, heads_in_turn: int) -> None:
    model = Delta(value_dim, heads_in_turn)
    given = model.inputs(23)
    expected = model.expected(given)
    # Errors of a step decay with the state; each has as many terms as a key has elements.
    bound = 23 * model.key_dim * EPS * np.abs(expected).max()
    assert np.abs(model.take(given, [(3, 0, 23)]) - expected).max() < bound


@pytest.mark.parametrize(("num_groups", "value_dim"), [(1, 70), (2, 16), (4, 70)])
def test_ssm_scan(num_groups: int, value_dim: int) -> None:
    model = Scan(num_groups, value_dim)
    given = model.inputs(23)
    expected = model.expected(given)
    bound = 23 * model.state_dim * EPS * np.abs(expected).max()
    assert np.abs(model.take(given, [(3, 0, 23)]) - expected).max() < bound


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.tier("sim", fast=lambda case: case.chunk == 5 or case.device != SIM)
def test_chunks_of_a_convolution(chunk: int) -> None:
    """Shorter ones than it reads tokens, too."""
    x = np.random.default_rng(4).standard_normal((11, 70)).astype(np.float32)
    whole, model = Conv().take(x, [(0, 0, 11)]), Conv()
    for start in range(0, 11, chunk):
        part = x[start : start + chunk]
        found = model.take(part, [(4, start, len(part))])
        assert (bits(found) == bits(whole[start : start + chunk])).all(), start


@pytest.mark.parametrize("net", [Delta, Scan])
@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.tier("sim", fast=lambda case: case.device != SIM)
def test_chunks_of_a_recurrence(chunk: int, net: type[Delta | Scan]) -> None:
    """On a simulated GPU `test_company` goes on from a state, too."""
    whole, model = net(), net()
    given = model.inputs(11)
    expected = whole.take(given, [(0, 0, 11)])
    for start in range(0, 11, chunk):
        part = [values[start : start + chunk] for values in given]
        found = model.take(part, [(4, start, len(part[0]))])
        assert (bits(found) == bits(expected[start : start + chunk])).all(), start


@pytest.mark.parametrize("net", [Delta, Scan])
def test_company(net: type[Delta | Scan]) -> None:
    """Sequences of other lengths in other slots; one of them goes on where it stood."""
    model, lengths, given = net(), [3, 4, 1], net().inputs(8)
    alone = [
        net().take([values[stop - n : stop] for values in given], [(0, 0, n)])
        for n, stop in zip(lengths, np.cumsum(lengths), strict=True)
    ]
    together = model.take(given, [(4, 0, 3), (0, 0, 4), (2, 0, 1)])
    assert (bits(together) == bits(np.concatenate(alone))).all()
    more = model.inputs(3, seed=5)
    again = net()
    again.take([values[3:7] for values in given], [(1, 0, 4)])
    expected = again.take([values[1:] for values in more], [(1, 4, 2)])
    found = model.take(more, [(4, 0, 1), (0, 4, 2)])
    assert (bits(found[1:]) == bits(expected)).all()


@pytest.mark.parametrize("net", [Delta, Scan])
@pytest.mark.parametrize("saved", [1, 2, 6])
@pytest.mark.tier("sim", fast=lambda case: case.saved == 2 or case.device != SIM)
def test_a_checkpoint_is_the_state_behind_a_token(saved: int, net: type[Delta | Scan]) -> None:
    """Others go on from it in slots of their own, one after the other and one over its maker's."""
    x = np.random.default_rng(6).standard_normal((7, 70)).astype(np.float32)
    conv, delta = Conv(), net()
    given = delta.inputs(7)
    whole = conv.take(x, [(0, 0, 7)]), delta.take(given, [(0, 0, 7)])
    spans, checkpoints = [(2, 0, 2), (1, 0, 6)], [(0, 0), (3, 2 + saved)]
    together = [np.concatenate([values[:2], values[:6]]) for values in (x, *given)]
    conv.take(together[0], spans, checkpoints=checkpoints)
    delta.take(together[1:], spans, checkpoints=checkpoints)
    rest = [values[saved:] for values in (x, *given)]
    for target in (4, 1):
        spans = [(target, saved, 7 - saved)]
        found = conv.take(rest[0], spans, sources=[3]), delta.take(rest[1:], spans, sources=[3])
        for part, expected in zip(found, whole, strict=True):
            assert (bits(part) == bits(expected[saved:])).all(), target


def test_what_is_refused() -> None:
    model = Delta()
    given = model.inputs(2)
    for heads, text in (
        (DeltaHeads(3, 50, 1), "value heads must share key heads evenly"),
        (DeltaHeads(2, 0, 1), "value_dim is 0"),
        (DeltaHeads(2, 70, 0), "heads_in_turn is 0"),
    ):
        model.heads = heads
        with pytest.raises(LaunchRejected, match=text):
            model.take(given, [(0, 0, 2)])


def test_what_a_scan_refuses() -> None:
    for heads, text in (
        (ScanHeads(3, 50), "heads must share groups evenly"),
        (ScanHeads(2, 0), "value_dim is 0"),
        (ScanHeads(4, 70), "x has 384 along axis 1"),
    ):
        model = Scan()
        given = model.inputs(2)
        model.heads = heads
        with pytest.raises(LaunchRejected, match=text):
            model.take(given, [(0, 0, 2)])


@pytest.mark.parametrize(("num_groups", "width"), [(1, 70), (3, 20)])
def test_gate_norm(num_groups: int, width: int) -> None:
    rng = np.random.default_rng(12)
    z, x = rng.standard_normal((2, 5, num_groups * width)).astype(np.float32)
    weight = rng.standard_normal(num_groups * width).astype(np.float32)
    expected = gate_norm.reference(z, x, weight, 1e-3, num_groups)
    gate, given, by = rows_tensor("gate", z), rows_tensor("x", x), vector_tensor("weight", weight)
    launch(
        lambda p: gate_norm.gate_norm(
            p, gate, given, by, 1e-3, counts(5), width=width, num_groups=num_groups
        ),
        5,
    )
    found = to_host(gate)[:, : num_groups * width]
    assert np.abs(found - expected).max() < 16 * EPS * np.abs(expected).max()


@pytest.mark.parametrize(
    ("spans", "name"),
    [
        ([(NUM_SLOTS, 0, 2)], "state_slots"),
        ([(1, 0, 1), (1, 0, 1)], "state_slots"),
        ([(1, 0, 3), (2, 3, -1)], "sequence_starts"),
    ],
)
def test_what_inputs_must_not_hold(spans: list[tuple[int, int, int]], name: str) -> None:
    """Slots are different ones that exist, and sequences stand one behind the other."""
    slots = np.array([slot for slot, _, _ in spans] + [-1], np.int32)
    starts = np.cumsum([0] + [length for _, _, length in spans] + [9]).astype(np.int32)
    values = {
        **{"num_slots": NUM_SLOTS, "max_sequences": len(slots), "num_tokens": 3},
        **{"state_slots": slots, "sequence_starts": starts, "counts": np.array([2, 0])},
        "sequence_rows": np.array([0, len(spans) - 1], np.int32),
        **{"state_sources": 0 * slots, "checkpoint_slots": slots, "checkpoint_stops": 0 * slots},
    }
    (refusal,) = delta_rule.CONTRACT.index_refusals(values)
    assert refusal.argument == name
