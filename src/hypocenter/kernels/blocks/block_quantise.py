"""f32 rows as blocks of a GGUF type; what is not finite, or grows beyond the type, is refused.

Formats and searches are ggml's, so that the bytes are those of its `ggml_quantize_chunk`.
"""

from __future__ import annotations

import numpy as np

from hypocenter.base.dtypes import Array, Float32s, f32_to_bf16
from hypocenter.base.tensor import DType
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Rule, Scalar
from hypocenter.device import launch
from hypocenter.device.cpu.kernel_forms import named_kernel
from hypocenter.kernels.blocks.grids import grid_of

CONTRACT = Contract(
    "quantise_blocks",
    Scalar("num_columns", "num_columns > 0", "must be above 0"),
    Scalar("block_elements"),
    Scalar("num_weights"),
    Rule("num_columns % block_elements == 0", "rows must be whole blocks"),
    Rule("num_weights in (0, num_columns)", "each column has a weight, or none has"),
)
_MINIS = (DType.MXFP4, DType.NVFP4)
_PLAIN = (DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0, *_MINIS)
_K = (DType.Q2_K, DType.Q3_K, DType.Q4_K, DType.Q5_K, DType.Q6_K)
_OF_IQ1 = (DType.IQ1_S, DType.IQ1_M)
_OF_IQ2_AND_IQ3 = (DType.IQ2_XXS, DType.IQ2_XS, DType.IQ2_S, DType.IQ3_XXS, DType.IQ3_S)
_GRIDS = (*_OF_IQ1, *_OF_IQ2_AND_IQ3)
_FEW_BITS = (DType.TQ1_0, DType.TQ2_0, DType.Q1_0, DType.Q2_0)
_KERNELS = {
    **dict.fromkeys(_PLAIN, "plain_cpu._quantise_plain_cpu"),
    **dict.fromkeys(_K, "k_cpu._quantise_k_cpu"),
    **dict.fromkeys((DType.IQ4_NL, DType.IQ4_XS), "iq4_cpu._quantise_iq4_cpu"),
    **dict.fromkeys(_OF_IQ2_AND_IQ3, "grid_cpu._quantise_grid_cpu"),
    **dict.fromkeys(_OF_IQ1, "iq1_cpu._quantise_iq1_cpu"),
    **dict.fromkeys(_FEW_BITS, "few_bits_cpu._quantise_few_bits_cpu"),
}
#: The types that `quantise_rows` makes.
WRITTEN_TYPES: tuple[DType, ...] = (DType.F32, DType.F16, DType.BF16, *_KERNELS)
#: Those that are searched for badly, or not at all, where no column has a weight.
NEEDS_WEIGHTS = frozenset(_GRIDS) - {DType.IQ3_S}
#: Those that make use of weights of columns; the others take none into account.
WEIGHED = frozenset(_KERNELS) - {DType.Q8_0, *_MINIS, *_FEW_BITS}


def quantise_rows(x: Float32s, dtype: DType, weights: Float32s | None = None) -> Array:
    """uint8 [num_rows, row_bytes]: f32 rows [num_rows, num_columns] in the type `dtype`.

    `weights` f32 [num_columns]: how much each column counts. x must be finite. A number that is
    beyond the type becomes infinity, or its block has a scale that is.
    """
    if dtype is DType.F32:
        return x.view(np.uint8)
    if dtype is DType.F16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint8)
    if dtype is DType.BF16:
        return f32_to_bf16(x).view(np.uint8)
    num_rows, num_columns = x.shape
    if weights is None or dtype not in WEIGHED:
        weights = np.empty(0, np.float32)
    sizes = {
        "num_columns": num_columns,
        "block_elements": dtype.block_elements,
        "num_weights": weights.size,
    }
    blocks = np.empty((num_rows, dtype.num_bytes(num_columns)), np.uint8)
    of_grid = grid_of(dtype) if dtype in _GRIDS else ()
    arguments = (x, weights, blocks, dtype.ggml_id, *of_grid)
    kernel = named_kernel(f"kernels.blocks.{_KERNELS[dtype]}")
    prepared = launch.prepare(kernel, arguments, CONTRACT, sizes, parallel=num_rows > 1)
    launch.run([prepared])
    return blocks
