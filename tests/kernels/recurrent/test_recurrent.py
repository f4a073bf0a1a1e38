"""Ops with a state against their references in float64; chunks, company, what lay there before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_forms import FORMS, use_form
from kernel_launch import bits, counts, launch, rows_tensor, tensor, vector_tensor

from hypocenter.device.copies import to_host
from hypocenter.errors import LaunchRejected
from hypocenter.kernels.recurrent import delta_rule, short_conv
from hypocenter.kernels.recurrent.delta_rule import DeltaHeads
from hypocenter.kernels.recurrent.sequences import Sequences
from hypocenter.tensor import Tensor

EPS = 2.0**-24
MAX_SEQUENCES, NUM_SLOTS = 4, 5


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

    def __init__(self, *, activates: bool = True) -> None:
        rng, self.activates = np.random.default_rng(0), activates
        self.weight = rng.standard_normal((4, 70)).astype(np.float32)
        wide = np.zeros((4, 128), np.float32)
        wide[:, :70] = self.weight
        self.padded, self.state = tensor("weight", wide), stale(3, 128)

    def take(self, x: np.ndarray, spans: list[tuple[int, int, int]], **states: Any) -> np.ndarray:
        out = rows_tensor("out", np.full_like(x, np.nan))
        given, where = rows_tensor("x", x), sequences_of(spans, **states)
        launch(
            lambda p: short_conv.short_conv(
                p, given, self.padded, self.state, out, where, activates=self.activates
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


@pytest.mark.parametrize("activates", [True, False])
def test_short_conv(activates: bool) -> None:
    x = np.random.default_rng(3).standard_normal((9, 70)).astype(np.float32)
    expected = short_conv.reference(x, Conv().weight, activates=activates)
    found = Conv(activates=activates).take(x, [(2, 0, 9)])
    assert np.abs(found - expected).max() < 32 * EPS * np.abs(expected).max()


@pytest.mark.parametrize(("value_dim", "heads_in_turn"), [(70, 1), (16, 2)])
def test_delta_rule(value_dim: int, heads_in_turn: int) -> None:
    model = Delta(value_dim, heads_in_turn)
    given = model.inputs(23)
    expected = model.expected(given)
    # Errors of a step decay with the state; each has as many terms as a key has elements.
    bound = 23 * model.key_dim * EPS * np.abs(expected).max()
    assert np.abs(model.take(given, [(3, 0, 23)]) - expected).max() < bound


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_of_a_convolution(chunk: int) -> None:
    """Shorter ones than it reads tokens, too."""
    x = np.random.default_rng(4).standard_normal((11, 70)).astype(np.float32)
    whole, model = Conv().take(x, [(0, 0, 11)]), Conv()
    for start in range(0, 11, chunk):
        part = x[start : start + chunk]
        found = model.take(part, [(4, start, len(part))])
        assert (bits(found) == bits(whole[start : start + chunk])).all(), start


@pytest.mark.parametrize("chunk", [1, 5])
def test_chunks_of_a_recurrence(chunk: int) -> None:
    whole, model = Delta(), Delta()
    given = model.inputs(11)
    expected = whole.take(given, [(0, 0, 11)])
    for start in range(0, 11, chunk):
        part = [values[start : start + chunk] for values in given]
        found = model.take(part, [(4, start, len(part[0]))])
        assert (bits(found) == bits(expected[start : start + chunk])).all(), start


def test_company() -> None:
    """Sequences of other lengths in other slots; one of them goes on where it stood."""
    model, lengths, given = Delta(), [3, 4, 1], Delta().inputs(8)
    alone = [
        Delta().take([values[stop - n : stop] for values in given], [(0, 0, n)])
        for n, stop in zip(lengths, np.cumsum(lengths), strict=True)
    ]
    together = model.take(given, [(4, 0, 3), (0, 0, 4), (2, 0, 1)])
    assert (bits(together) == bits(np.concatenate(alone))).all()
    more = model.inputs(3, seed=5)
    again = Delta()
    again.take([values[3:7] for values in given], [(1, 0, 4)])
    expected = again.take([values[1:] for values in more], [(1, 4, 2)])
    found = model.take(more, [(4, 0, 1), (0, 4, 2)])
    assert (bits(found[1:]) == bits(expected)).all()


@pytest.mark.parametrize("saved", [1, 2, 6])
def test_a_checkpoint_is_the_state_behind_a_token(saved: int) -> None:
    """Others go on from it in slots of their own, one after the other and one over its maker's."""
    x = np.random.default_rng(6).standard_normal((7, 70)).astype(np.float32)
    conv, delta = Conv(), Delta()
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
