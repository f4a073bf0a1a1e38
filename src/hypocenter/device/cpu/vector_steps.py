"""A word of CPU kernels for sums and differences between lanes; the others are in `vector.py`."""

from __future__ import annotations

from typing import Any

from hypocenter.device.cpu.lang import intrinsic, ir
from hypocenter.device.cpu.vector_ir import LANES, VEC_F32, VEC_I32, Codegen, f32x16


@intrinsic
def sums_and_differences(typing: Any, value: Any) -> tuple[Any, Codegen]:
    """The product of 16 lanes with the Hadamard matrix of 16, by steps of 1, 2, 4 and 8 lanes: of
    each two that lie a step apart the sum, and the first less the second."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = args[0]
        for step in (1, 2, 4, 8):
            order = [lane ^ step for lane in range(LANES)]
            other = builder.shuffle_vector(found, found, ir.Constant(VEC_I32, order))
            signs = [(lane // step % 2) << 31 for lane in range(LANES)]
            bits = builder.xor(builder.bitcast(found, VEC_I32), ir.Constant(VEC_I32, signs))
            found = builder.fadd(other, builder.bitcast(bits, VEC_F32))
        return found

    return f32x16(f32x16), build
