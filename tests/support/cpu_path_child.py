"""Products of weights of the types given on the path of instructions that the environment names;
prints what differs.

For codes everything is chosen so that floats are exact: what comes out are sums of integers. Sums
of products in bf16 are held against those in numpy, in the order that is one for all machines.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from ops.bf16_oracle import pairs_in_order, rounded_bits
from ops.kernel_launch import SCALE_FIELDS, counts, launch, random_rows, rows_tensor, weight_tensor

from hypocenter.base.tensor import DType
from hypocenter.device.copies import to_host
from hypocenter.device.cpu.target import instruction_set
from hypocenter.kernels.linear import linear
from hypocenter.kernels.weights import block_types
from hypocenter.kernels.weights.packing import pack, place

#: Sixteen, four and one: every form of the kernel.
NUM_ROWS = 21
NUM_COLUMNS, NUM_OUTPUTS = 512, 70


def rows_of_whole_numbers(dtype: DType) -> np.ndarray:
    """GGUF bytes whose scales are 1, or small integers."""
    raw = random_rows(dtype, NUM_OUTPUTS, NUM_COLUMNS)
    blocks = raw.reshape(NUM_OUTPUTS, -1, dtype.block_bytes)
    scale = 8 if dtype is DType.IQ2_XS else 1  # of which a code has eighths
    for offset in SCALE_FIELDS.get(dtype, ()):
        blocks[..., offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
    if dtype is DType.NVFP4:
        blocks[..., :4] = np.arange(0x40, 0x60, 8)[:4]  # powers of two, the least twice 1
    if dtype is DType.Q8_0:
        blocks[..., 2] = 128  # -128, which has no positive twin of 8 bits
    if dtype is DType.Q6_K:
        # The largest sums that there are: every code of the first output is -32, every scale -128.
        blocks[0, :, :192], blocks[0, :, 192:208] = 0, 128
    return raw


def whole_activations() -> np.ndarray:
    """Numbers that are their own codes, for each group holds a 127."""
    x = np.random.default_rng(7).integers(-127, 128, (NUM_ROWS, NUM_COLUMNS)).astype(np.float32)
    x[:, ::32] = 127
    return x


def num_wrong(dtype: DType) -> int:
    raw, x = rows_of_whole_numbers(dtype), whole_activations()
    if dtype is DType.Q6_K:
        x[:, 256:] = 0  # with 8-bit scales more columns would pass 2**24
        x[::5, :32], x[::5, 32:] = 127, 0
    weights = block_types.dequantise(raw, dtype, NUM_COLUMNS).astype(np.int64)
    out = rows_tensor("out", np.zeros((NUM_ROWS, NUM_OUTPUTS), np.float32))
    given, weight = rows_tensor("x", x), weight_tensor(dtype, raw, NUM_COLUMNS)
    launch(lambda p: linear.linear(p, given, weight, out, counts(NUM_ROWS)), NUM_ROWS)
    exact = x.astype(np.int64) @ weights.T
    return int((to_host(out)[:, :NUM_OUTPUTS] != exact).sum())


def num_wrong_in_bf16(dtype: DType) -> int:
    """Of F16 weights near 1; of BF16 ones around 2**-50, below which numbers are zero, or some of
    their sums would be subnormal."""
    rng, out = np.random.default_rng(9), rows_tensor("out", np.zeros((NUM_ROWS, 70), np.float32))
    raw = random_rows(dtype, NUM_OUTPUTS, NUM_COLUMNS)
    x = rng.standard_normal((NUM_ROWS, NUM_COLUMNS)).astype(np.float32)
    if dtype is DType.BF16:
        x *= np.exp2(rng.integers(-75, -45, x.shape)).astype(np.float32)
        exponents = rng.integers(-75, -45, (NUM_OUTPUTS, NUM_COLUMNS))
        small = rng.choice([-1, 1], exponents.shape) * np.exp2(exponents.astype(np.float32))
        raw = rounded_bits(small.astype(np.float32), least=0).view(np.uint8)
    weight = place("weight", "test", pack(raw, dtype, NUM_COLUMNS, in_bf16=True))
    given, live = rows_tensor("x", x), counts(NUM_ROWS)
    launch(lambda p: linear.linear(p, given, weight, out, live, in_bf16=True), NUM_ROWS)
    weights = rounded_bits(block_types.dequantise(raw, dtype, NUM_COLUMNS))
    wanted = pairs_in_order(rounded_bits(x), weights)
    assert (wanted != 0).any()
    return int((to_host(out)[:, :NUM_OUTPUTS] != wanted).sum())


if __name__ == "__main__":
    wrong = {
        name: num_wrong(DType[name]) if DType[name].is_quantised else num_wrong_in_bf16(DType[name])
        for name in sys.argv[1:]
    }
    json.dump({"path": instruction_set(), "wrong": wrong}, sys.stdout)
