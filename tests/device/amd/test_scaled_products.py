"""`tl.dot_scaled` as gfx950 code beside numpy: where Triton's compiler puts numbers and scales is
where AMD's matrix instructions take them from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machine.scaling_kernels import scaled_product

from hypocenter.base.dtypes import Array
from hypocenter.check.machine.launch import launch
from hypocenter.device.amd.code_object import read_code_object
from hypocenter.device.amd.kernarg import LaunchShape
from hypocenter.device.limits import named_gpu
from hypocenter.device.offline.compile import compile_source, triton_source
from hypocenter.device.offline.specimen import Specimen

_SIZE, _DEPTH, _WARPS = 64, 256, 4
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _numbers(rng: np.random.Generator, form: str) -> tuple[Array, Array]:
    """Bytes [rows, n] of a matrix and its values."""
    if form == "e2m1":
        codes = rng.integers(0, 16, (_SIZE, _DEPTH))
        values = np.where(codes < 8, 1, -1) * _FP4[codes % 8]
        return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8), values
    num_fraction, bias = (3, 7) if form == "e4m3" else (2, 15)
    exponents, fractions = (
        rng.integers(low, high, (_SIZE, _DEPTH)) for low, high in ((-1, 2), (0, 2**num_fraction))
    )
    signs = rng.integers(0, 2, (_SIZE, _DEPTH))
    codes = signs << 7 | (exponents + bias) << num_fraction | fractions
    values = (1 + fractions / 2**num_fraction) * 2.0**exponents * (1 - 2 * signs)
    return codes.astype(np.uint8), values


@pytest.mark.tier("amd")
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize(
    ("first", "second"), [("e4m3", "e4m3"), ("e2m1", "e2m1"), ("e4m3", "e2m1"), ("e2m1", "e5m2")]
)
def test_a_scaled_product_is_numpys(first: str, second: str, size: int) -> None:
    rng = np.random.default_rng(4)
    (a, left), (b, right) = _numbers(rng, first), _numbers(rng, second)
    scales = rng.integers(122, 133, (2, _SIZE, _DEPTH // 32)).astype(np.uint8)
    factors = np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=2)
    wanted = (left * factors[0]) @ (right * factors[1]).T
    given = {"a": a, "b": np.ascontiguousarray(b.T), "of_a": scales[0], "of_b": scales[1]}
    out = np.zeros((_SIZE, _SIZE), np.float32)
    options: dict[str, Any] = {"num_warps": _WARPS, "matrix_instr_nonkdim": size}
    constants = {
        "SIZE": _SIZE, "DEPTH": _DEPTH, "A": first, "B": second,
        "IN_A": 1 + (first == "e2m1"), "IN_B": 1 + (second == "e2m1"),
    }  # fmt: skip
    signature = {**dict.fromkeys(given, "*u8"), "out": "*fp32"}
    specimen = Specimen(scaled_product, signature, constants, tuple(signature), options)
    limits = named_gpu("gfx950")
    made = compile_source(triton_source(specimen, limits), limits, options)
    assert f"v_mfma_scale_f32_{size}x{size}x{2048 // size}_f8f6f4" in made.asm["amdgcn"]
    code = read_code_object(made.asm["hsaco"], "scaled_product")
    kernel = code.kernel()
    shared = int(made.metadata.shared) - kernel.descriptor.group_bytes
    arguments: dict[str, Any] = {**given, "out": out}
    # What Triton adds behind a kernel's own parameters is null.
    arguments |= {f"more{i}": None for i in range(len(kernel.shown) - len(arguments))}
    shape = LaunchShape((1, 1, 1), (64 * _WARPS, 1, 1), max(shared, 0))
    assert launch(code, None, shape, arguments, arch="gfx950").findings == ()
    np.testing.assert_allclose(out, wanted, rtol=0, atol=np.abs(wanted).max() * 2.0**-20)
