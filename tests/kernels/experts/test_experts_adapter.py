"""Adapters of routed experts against a reference in float64: each choice of a token has those of
its expert, and each token those of its request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_forms import use_form
from ops.kernel_launch import Array, bits, counts, launch, rows_tensor, tensor

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.tensor import Tensor
from hypocenter.device.copies import to_host
from hypocenter.kernels.experts import experts_adapter
from hypocenter.kernels.experts.experts_table import ExpertsShape, ExpertsTable
from hypocenter.kernels.linear.adapter_sizes import RANKS

EPS = 2.0**-24
NUM_EXPERTS, NUM_USED, SPARE_ROWS = 5, 3, 4
Pair = tuple[Array, Array]


@pytest.fixture(params=["one thread", "many threads", "sim:mi300x"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_form(request.param, monkeypatch)


def pairs_of(k: int, n: int, *ranks: int) -> list[Pair]:
    """Adapters of f16's numbers: of each A [num_experts, rank, k] and B [num_experts, n, rank]."""
    rng = np.random.default_rng(k)
    shapes = [((NUM_EXPERTS, rank, k), (NUM_EXPERTS, n, rank)) for rank in ranks]
    found = [
        tuple(rng.standard_normal(shape).astype(np.float16) for shape in two) for two in shapes
    ]
    return [(down.astype(np.float32), up.astype(np.float32)) for down, up in found]


def stacked(parts: list[Array], *, is_half: bool) -> Tensor:
    """Ranks of all adapters, padded to tiles of ranks and 64 columns."""
    padded = [np.pad(x, ((0, 0), (0, -x.shape[1] % RANKS), (0, -x.shape[2] % 64))) for x in parts]
    whole = np.concatenate(padded, axis=1)
    return tensor("ranks", whole.astype(np.float16).view(np.uint16) if is_half else whole)


def chosen(num_tokens: int) -> tuple[Array, Array]:
    """Experts of each token, and the sorted row of each choice, with gaps between."""
    rng = np.random.default_rng(num_tokens)
    ids = np.array([rng.permutation(NUM_EXPERTS)[:NUM_USED] for _ in range(num_tokens)], np.int32)
    rows = rng.permutation(num_tokens * NUM_USED + SPARE_ROWS)[: num_tokens * NUM_USED]
    return ids, rows.reshape(ids.shape).astype(np.int32)


def table_of(ids: Array, places: Array) -> ExpertsTable:
    shape = ExpertsShape(len(ids), NUM_EXPERTS, NUM_USED, kernel_launch.device)
    table = ExpertsTable.allocate(shape).first(len(ids))
    return replace(table, ids=tensor("ids", ids), places=tensor("places", places))


def apply(
    x: Array, out: Array, pairs: list[Pair], choices: tuple[Array, Array], scales: Array,
    of: Array, factors: list[float], *, spare: int = 0, is_half: bool = False,
) -> Array:  # fmt: skip
    """What becomes of `out` [sorted rows, n]; `of` is the row of `scales` of each token. The last
    `spare` tokens are not live, and what they index is junk."""
    ids, places = (np.array(part) for part in choices)
    live = len(ids) - spare
    of = np.array(of, np.int32)
    for part in (ids, places, of):
        part[live:] = -9
    num_tiles = [-(-down.shape[1] // RANKS) for down, _ in pairs]
    num_ranks = NUM_USED * RANKS * sum(num_tiles)
    wide = np.full((len(out), -(-out.shape[1] // 64) * 64 + 64), 7.0, np.float32)
    wide[:, : out.shape[1]] = out
    held_out = tensor("out", wide)
    products = tensor("products", np.full((len(ids), num_ranks + 3), 7.0, np.float32))
    shared: dict[str, Any] = {
        "owners": tensor("owners", np.repeat(np.arange(len(pairs)), num_tiles).astype(np.int32)),
        "factors": tensor("factors", np.repeat(np.array(factors, np.float32), num_tiles)),
        "scales": tensor("scales", scales.astype(np.float32)),
        "sequences": tensor("sequences", of),
        "counts": counts(live),
        "num_columns": x.shape[1],
    }
    down = stacked([pair[0] for pair in pairs], is_half=is_half)
    up = stacked([pair[1].swapaxes(1, 2) for pair in pairs], is_half=is_half)
    held_x = rows_tensor("x", x, fill=np.nan)
    table = table_of(ids, places)
    launch(
        lambda plan: experts_adapter.experts_adapter(
            plan, held_x, down, up, held_out, products, table, **shared
        ),
        len(ids),
    )
    made, found = to_host(products), to_host(held_out)
    assert (made[live:] == 7).all()
    assert (made[:, num_ranks:] == 7).all()
    assert (found[:, wide.shape[1] - 64 :] == 7).all()
    return found[:, : out.shape[1]]


@pytest.mark.parametrize(
    ("num_tokens", "k", "n", "ranks", "is_half"),
    [(1, 64, 64, (8,), False), (5, 100, 72, (9, 3), True), (3, 1, 1, (1,), False)],
)
def test_each_choice_has_its_expert_and_each_token_its_adapters(
    num_tokens: int, k: int, n: int, ranks: tuple[int, ...], is_half: bool
) -> None:
    pairs, spare = pairs_of(k, n, *ranks), 2
    factors = [0.5 + index for index in range(len(ranks))]
    choices = chosen(num_tokens + spare)
    ids, places = (part[:num_tokens] for part in choices)
    rng = np.random.default_rng(7)
    num_rows = (num_tokens + spare) * NUM_USED + SPARE_ROWS
    x, out = (rng.standard_normal((num_rows, width)).astype(np.float32) for width in (k, n))
    scales = np.zeros((3, len(ranks)), np.float32)
    scales[0], scales[2, 0] = 0.75, -0.5
    of = np.arange(num_tokens + spare) % 3
    found = apply(x, out, pairs, choices, scales, of, factors, spare=spare, is_half=is_half)
    right, sizes = out.astype(np.float64), np.abs(out).astype(np.float64)
    for index, (down, up) in enumerate(pairs):
        for token, slot in np.ndindex(ids.shape):
            row, expert = places[token, slot], ids[token, slot : slot + 1]
            count = float(scales[of[token], index]) * factors[index]
            right[row] += count * experts_adapter.reference(x[[row]], expert, down, up)[0]
            two = np.abs(down), np.abs(up)
            size = experts_adapter.reference(np.abs(x[[row]]), expert, *two)[0]
            sizes[row] += abs(count) * size
    assert (np.abs(found - right) <= (k + sum(ranks) + 8) * EPS * sizes).all()
    touched = np.zeros(num_rows, bool)
    touched[places[(scales[of[:num_tokens]] != 0).any(axis=1)]] = True
    assert (bits(found[~touched]) == bits(out[~touched])).all()
    assert (np.abs(right - out).max(axis=1)[touched] > 100 * EPS).all()


def test_bits_do_not_depend_on_company() -> None:
    """Beside tokens whose adapter makes infinities."""
    pairs, choices = pairs_of(130, 70, 8, 5), chosen(6)
    pairs[1][0][:] = 3e38
    rng = np.random.default_rng(8)
    num_rows = 6 * NUM_USED + SPARE_ROWS
    x, out = (rng.standard_normal((num_rows, width)).astype(np.float32) for width in (130, 70))
    scales, of = np.array([[0.5, 0], [0, 1], [0, 0]], np.float32), np.arange(6) % 3
    whole = apply(x, out, pairs, choices, scales, of, [1, 1])
    places = choices[1]
    assert not np.isfinite(whole[places[of == 1]]).all()
    assert np.isfinite(whole[places[of != 1]]).all()
    for token in range(6):
        one = choices[0][[token]], choices[1][[token]]
        alone = apply(x, out, pairs, one, scales, of[[token]], [1, 1])
        assert (bits(alone[places[token]]) == bits(whole[places[token]])).all()


def test_what_is_refused() -> None:
    table = table_of(*chosen(1))
    x = tensor("x", np.zeros((7, 64), np.float32))
    one: dict[str, Any] = {
        "owners": tensor("owners", np.zeros(1, np.int32)),
        "factors": tensor("factors", np.ones(1, np.float32)),
        "scales": tensor("scales", np.ones((1, 1), np.float32)),
        "sequences": tensor("sequences", np.zeros(1, np.int32)),
        "counts": counts(1),
        "num_columns": 64,
    }

    def refused(num_ranks: int, width: int, text: str) -> None:
        matrix = tensor("ranks", np.zeros((NUM_EXPERTS, num_ranks, 64), np.float32))
        products = tensor("products", np.zeros((1, width), np.float32))
        with pytest.raises(LaunchRejected, match=text):
            launch(
                lambda plan: experts_adapter.experts_adapter(
                    plan, x, matrix, matrix, x, products, table, **one
                ),
                1,
            )

    refused(4, 64, "ranks must be whole tiles of 8")
    refused(8, 23, "products has 23 along axis 1, but must be at least")
