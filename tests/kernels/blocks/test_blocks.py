"""Blocks of f32 rows are those of ggml, bit for bit, also at the ends of what f32 holds.

What ggml makes was recorded once, as digests; `tests/peer` compares with ggml itself.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from models.block_cases import comparable, digest, weights
from repository import ROOT

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.tensor import DType
from hypocenter.kernels.blocks.block_quantise import (
    NEEDS_WEIGHTS,
    WEIGHED,
    WRITTEN_TYPES,
    quantise_rows,
)
from hypocenter.kernels.blocks.grids import grid_of
from hypocenter.kernels.weights.block_types import dequantise
from hypocenter.model.gguf.inspection import first_bad_block

DIGESTS = json.loads((ROOT / "tests/fixtures/blocks_of_ggml.json").read_text())
#: One type of each kind of search.
FAST = (
    *("F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS"),
    *("NVFP4", "IQ3_S", "IQ2_XXS", "TQ1_0"),
)


@pytest.mark.tier("sim", fast=lambda case: case.dtype.name in FAST)
@pytest.mark.parametrize("dtype", WRITTEN_TYPES, ids=lambda dtype: dtype.name)
def test_blocks_are_those_of_ggml(dtype: DType) -> None:
    known = dict(DIGESTS[dtype.name])
    for name, x in comparable(dtype).items():
        if dtype not in NEEDS_WEIGHTS:
            assert digest(quantise_rows(x, dtype)) == known.pop(name), name
        if dtype in WEIGHED:
            weighed = digest(quantise_rows(x, dtype, weights()))
            assert weighed == known.pop(f"weighed {name}"), name
    assert known == {}


@pytest.mark.parametrize("dtype", [DType.Q4_K, DType.Q8_0], ids=lambda dtype: dtype.name)
def test_threads_make_the_same_blocks_as_one(dtype: DType) -> None:
    x = np.random.RandomState(1).standard_normal((70, 256)).astype(np.float32)
    alone = [quantise_rows(row[None], dtype) for row in x]
    assert quantise_rows(x, dtype).tobytes() == np.concatenate(alone).tobytes()


def test_a_group_of_zeros_moves_no_other_group() -> None:
    """ggml's IQ3_S writes what comes behind one in the place of the group before, and so the block
    is another one when it is read."""
    x = np.random.RandomState(2).standard_normal((4, 256)).astype(np.float32)
    for zeros in ((), (0,), (3, 4)):
        grouped = x.reshape(4, 8, 32).copy()
        grouped[:, list(zeros)] = 0
        rows = grouped.reshape(4, 256)
        read = dequantise(quantise_rows(rows, DType.IQ3_S), DType.IQ3_S, 256)
        assert np.abs(read - rows).mean() < 0.2 * np.abs(x).mean(), zeros


@pytest.mark.parametrize("dtype", [DType.IQ2_S, DType.IQ3_S], ids=lambda dtype: dtype.name)
def test_a_grid_knows_its_own_entries_and_what_is_near_others(dtype: DType) -> None:
    grid = grid_of(dtype)
    num_levels = 3 if dtype is DType.IQ2_S else 8
    powers = num_levels ** np.arange(grid.levels.shape[1])
    numbers = grid.levels @ powers
    assert (grid.exact[numbers] == np.arange(len(grid.levels))).all()
    assert (np.diff(grid.starts) > 0).all()
    other = int(np.flatnonzero(grid.exact < 0)[-1])
    codes = other // powers % num_levels
    squares = ((grid.levels - codes) ** 2).sum(axis=1)
    near = squares[grid.near[grid.starts[other] : grid.starts[other + 1]]]
    assert near[0] == squares.min()
    assert (np.diff(near) >= 0).all()


def test_what_is_beyond_a_type_is_found() -> None:
    x = np.zeros((2, 512), np.float32)
    x[1, 300] = 5e8
    for dtype, block in ((DType.F16, 812), (DType.Q8_0, 25), (DType.Q4_K, 3), (DType.Q6_K, 3)):
        assert first_bad_block(quantise_rows(x, dtype), dtype) == block
    assert first_bad_block(quantise_rows(x[:1], DType.Q4_K), DType.Q4_K) is None
    assert first_bad_block(quantise_rows(x, DType.BF16), DType.BF16) is None


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="288 elements do not fill blocks of 256"):
        quantise_rows(np.zeros((2, 288), np.float32), DType.Q4_K)
    with pytest.raises(LaunchRejected, match="each column has a weight"):
        quantise_rows(np.zeros((2, 512), np.float32), DType.Q4_K, np.ones(256, np.float32))
