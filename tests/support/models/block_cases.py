"""f32 rows to be made into blocks, plain ones and those at the ends of what f32 holds.

The numbers come from numpy's RandomState, which never changes, so that what ggml made of them once
can be held against ours for good (`tests/fixtures/blocks_of_ggml.json`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from hypocenter.base.tensor import DType

NUM_ROWS, NUM_COLUMNS = 3, 512
#: Cases in which ggml's own search for an entry of a grid ends the process.
ENDS_GGML = ("denormal", "tiny", "mixed", "one huge", "too huge")


def cases() -> Iterator[tuple[str, np.ndarray]]:
    """A name and f32 [NUM_ROWS, NUM_COLUMNS]."""
    draw, shape = np.random.RandomState(3), (NUM_ROWS, NUM_COLUMNS)
    normal = draw.standard_normal(shape)
    yield "normal", normal.astype(np.float32)
    yield "small", (0.02 * draw.standard_normal(shape)).astype(np.float32)
    yield "positive", draw.uniform(0.5, 1, shape).astype(np.float32)
    yield "negative", -draw.uniform(0.5, 1, shape).astype(np.float32)
    yield "zeros", np.zeros(shape, np.float32)
    yield "minus zeros", np.where(draw.uniform(size=shape) < 0.5, -0.0, normal).astype(np.float32)
    constants = np.array([[0.37], [-0.37], [1e-3]], np.float32)
    yield "constant rows", np.repeat(constants, NUM_COLUMNS, axis=1)
    yield "steps", draw.randint(-3, 4, shape).astype(np.float32)
    yield "heavy tails", draw.standard_t(2, shape).astype(np.float32)
    exponents = draw.randint(-30, 12, shape)
    beside = 1 - 2.0**-24 * draw.randint(0, 3, shape)
    yield "powers of two", (2.0**exponents * beside).astype(np.float32)
    huge = (0.02 * normal).astype(np.float32)
    huge[:, ::256] = 3e4
    yield "one huge", huge
    huge = huge.copy()
    huge[:, 5] = 1e38
    yield "too huge", huge
    yield "tiny", (1e-30 * normal).astype(np.float32)
    yield "denormal", (1e-40 * normal).astype(np.float32)
    yield "mixed", (normal * 10.0 ** draw.uniform(-20, 4, shape)).astype(np.float32)


def weights() -> np.ndarray:
    """f32 [NUM_COLUMNS], some 0 and some large."""
    draw = np.random.RandomState(5)
    sizes = np.abs(draw.standard_normal(NUM_COLUMNS))
    return np.asarray(sizes * draw.choice([1, 1e-3, 0, 30], NUM_COLUMNS), np.float32)


def comparable(dtype: DType) -> dict[str, np.ndarray]:
    """The cases that ggml gets through."""
    is_of_grid = dtype.name.startswith(("IQ1", "IQ2", "IQ3"))
    return {name: x for name, x in cases() if not (is_of_grid and name in ENDS_GGML)}


def digest(blocks: np.ndarray) -> str:
    """What tells bytes of blocks apart, short enough for a table."""
    return hashlib.sha256(blocks.tobytes()).hexdigest()[:16]


def digest_of_types(types: Mapping[str, str]) -> str:
    """What tells choices apart: the types of tensors by their names, in order."""
    lines = "\n".join(f"{name} {dtype}" for name, dtype in types.items())
    return hashlib.sha256(lines.encode()).hexdigest()[:16]
