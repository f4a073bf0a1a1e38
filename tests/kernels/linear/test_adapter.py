"""Adapters of rows against a reference in float64; company, rows without one, what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from ops.kernel_forms import FORMS, use_form
from ops.kernel_launch import Array, bits, counts, launch, rows_tensor, tensor

from hypocenter.base.errors import LaunchRejected
from hypocenter.device.copies import to_host
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.linear import adapter
from hypocenter.kernels.linear.adapter_sizes import RANKS

EPS = 2.0**-24


@pytest.fixture(params=FORMS, autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_form(request.param, monkeypatch)


@dataclass(frozen=True)
class Stack:
    """Adapters of one weight: of each A [rank, k] and B [n, rank], and a factor."""

    pairs: tuple[tuple[Array, Array], ...]
    factors: tuple[float, ...]
    is_half: bool = False

    @property
    def num_tiles(self) -> list[int]:
        return [-(-len(down) // RANKS) for down, _ in self.pairs]

    def padded(self, which: int) -> Array:
        """All A or all transposed B, padded to tiles of ranks and 64 columns."""
        parts = []
        for pair, num_tiles in zip(self.pairs, self.num_tiles, strict=True):
            rows = pair[0] if which == 0 else pair[1].T
            wide = np.zeros((num_tiles * RANKS, -(-rows.shape[1] // 64) * 64), np.float32)
            wide[: rows.shape[0], : rows.shape[1]] = rows
            parts.append(wide)
        whole = np.concatenate(parts)
        return whole.astype(np.float16).view(np.uint16) if self.is_half else whole


def stack(k: int, n: int, *ranks: int, is_half: bool = False) -> Stack:
    rng, pairs = np.random.default_rng(k), []
    for rank in ranks:
        down, up = rng.standard_normal((rank, k)), rng.standard_normal((n, rank))
        kind = np.float16 if is_half else np.float32
        pairs.append((down.astype(kind).astype(np.float32), up.astype(kind).astype(np.float32)))
    return Stack(tuple(pairs), tuple(float(rng.uniform(0.5, 2)) for _ in ranks), is_half)


def rows_of(num_rows: int, width: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((num_rows, width)).astype(np.float32)


def apply(x: Array, out: Array, adapters: Stack, scales: Array, of: Array, spare: int = 0) -> Array:
    """What becomes of `out`; `of` is the row of `scales` of each row of x. Rows of the bucket
    behind, and columns behind, must stay."""
    num_rows, k = x.shape
    junk = np.full((spare, k), np.nan, np.float32)
    held_x = rows_tensor("x", np.concatenate([x, junk]), fill=np.nan)
    n = out.shape[1]
    wide = np.full((num_rows + spare, -(-n // 64) * 64 + 64), 7.0, np.float32)
    wide[:num_rows, :n] = out
    held_out = tensor("out", wide)
    num_ranks = RANKS * sum(adapters.num_tiles)
    products = tensor("products", np.full((num_rows + spare, num_ranks + 3), 7.0, np.float32))
    owners = np.repeat(np.arange(len(adapters.pairs)), adapters.num_tiles).astype(np.int32)
    factors = np.repeat(np.asarray(adapters.factors, np.float32), adapters.num_tiles)
    shared: dict[str, Any] = {
        "owners": tensor("owners", owners),
        "scales": tensor("scales", scales.astype(np.float32)),
        "sequences": tensor("sequences", np.concatenate([of, np.full(spare, -9)]).astype(np.int32)),
        "counts": counts(num_rows),
    }
    down, up = tensor("down", adapters.padded(0)), tensor("up", adapters.padded(1))

    def both(plan: PlanBuilder) -> None:
        adapter.adapter_down(
            plan,
            held_x,
            down,
            products,
            factors=tensor("factors", factors),
            num_columns=k,
            **shared,
        )
        adapter.adapter_up(plan, products, up, held_out, **shared)

    launch(both, num_rows + spare)
    found, made = to_host(held_out), to_host(products)
    assert (found[num_rows:] == 7).all()
    assert (found[:, -64:] == 7).all()
    assert (made[num_rows:] == 7).all()
    assert (made[:, num_ranks:] == 7).all()
    return found[:num_rows, :n]


def right(x: Array, out: Array, adapters: Stack, scales: Array, of: Array) -> tuple[Array, Array]:
    """In float64, and the sum of magnitudes by which errors are bounded."""
    total, sizes = out.astype(np.float64), np.abs(out).astype(np.float64)
    for index, (down, up) in enumerate(adapters.pairs):
        count = (scales[of, index].astype(np.float64) * adapters.factors[index])[:, None]
        total = total + count * adapter.reference(x, down, up)
        sizes += np.abs(count) * adapter.reference(np.abs(x), np.abs(down), np.abs(up))
    return total, sizes


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "k", "n", "ranks"),
    [(1, 64, 64, (8,)), (5, 100, 72, (16, 3)), (21, 130, 200, (4, 16, 9)), (2, 1, 1, (1,))],
)
def test_each_row_has_its_own_adapters(
    num_rows: int, k: int, n: int, ranks: tuple[int, ...], is_half: bool
) -> None:
    adapters = stack(k, n, *ranks, is_half=is_half)
    x, out = rows_of(num_rows, k, 1), rows_of(num_rows, n, 2)
    rng = np.random.default_rng(3)
    scales = rng.uniform(-1, 1, (4, len(ranks))) * (rng.random((4, len(ranks))) < 0.6)
    scales[0] = 0.0
    scales[1] = 0.75
    of = np.arange(num_rows) % 4 if num_rows > 1 else np.array([1])
    found = apply(x, out, adapters, scales, of, spare=3)
    expected, sizes = right(x, out, adapters, scales.astype(np.float32), of)
    num_steps = k + sum(ranks) + 8
    assert (np.abs(found - expected) <= num_steps * EPS * sizes).all()
    untouched = (scales[of] == 0).all(axis=1)
    assert (bits(found[untouched]) == bits(out[untouched])).all()
    moved = np.abs(expected - out).max(axis=1)[~untouched]
    assert (moved > 100 * EPS).all(), "the adapters do something"


def test_bits_do_not_depend_on_company() -> None:
    """Alone, beside some, in tiles of many, and beside rows whose adapter makes infinities."""
    adapters = stack(200, 130, 16, 8, 5)
    adapters.pairs[2][0][:] = 3e38
    x, out = rows_of(70, 200, 4), rows_of(70, 130, 5)
    scales = np.array([[0, 0, 0], [0.5, 0, 0], [0, 2, 0], [1, 1, 0], [0, 0, 1]])
    of = np.random.default_rng(6).integers(0, 5, 70)
    whole = apply(x, out, adapters, scales, of)
    assert not np.isfinite(whole[of == 4]).all()
    assert np.isfinite(whole[of != 4]).all()
    some = apply(x[:9], out[:9], adapters, scales, of[:9])
    assert (bits(some) == bits(whole[:9])).all()
    for row in range(20):
        alone = apply(x[row : row + 1], out[row : row + 1], adapters, scales, of[row : row + 1])
        assert (bits(alone) == bits(whole[row : row + 1])).all(), (row, of[row])


def test_a_row_without_adapter_keeps_the_sign_of_zero() -> None:
    adapters, out = stack(64, 64, 8), np.full((2, 64), -0.0, np.float32)
    x = rows_of(2, 64, 7)
    found = apply(x, out, adapters, np.array([[0.0], [1.0]]), np.array([0, 1]))
    assert (bits(found[:1]) == bits(out[:1])).all()
    assert (found[1] != 0).all()


def test_what_is_refused() -> None:
    x, out = tensor("x", rows_of(2, 128, 8)), tensor("out", rows_of(2, 64, 9))
    products, factors = (
        tensor("products", np.zeros((2, 8), np.float32)),
        tensor("factors", np.ones(1, np.float32)),
    )
    down = tensor("down", np.zeros((8, 64), np.float32))
    rest: dict[str, Any] = {
        "owners": tensor("owners", np.zeros(1, np.int32)),
        "scales": tensor("scales", np.ones((2, 1), np.float32)),
        "sequences": tensor("sequences", np.zeros(2, np.int32)),
        "counts": counts(2),
    }
    narrow = tensor("down", np.zeros((8, 40), np.float32))
    few = tensor("down", np.zeros((4, 64), np.float32))
    for matrix, num_columns, text in (
        (down, 65, "num_columns is 65, but must be above 0 and within the matrix"),
        (narrow, 40, "padded to whole blocks of 64"),
        (few, 64, "ranks must be whole tiles of 8"),
    ):
        with pytest.raises(LaunchRejected, match=text):
            launch(
                lambda p, m=matrix, c=num_columns: adapter.adapter_down(  # type: ignore[misc]
                    p, x, m, products, factors=factors, num_columns=c, **rest
                ),
                2,
            )
    wide = tensor("up", np.zeros((16, 64), np.float32))
    owners = tensor("owners", np.zeros(2, np.int32))
    with pytest.raises(LaunchRejected, match="products has 8 along axis 1, but must be at least"):
        launch(lambda p: adapter.adapter_up(p, products, wide, out, **rest | {"owners": owners}), 2)
