"""Small Triton kernels whose need of a GPU's resources is known, for tests that compile offline."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201
from typing import Any

from hypocenter.device.offline.specimen import Specimen
from hypocenter.device.triton_lang import tl, triton


@triton.jit
def copy_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < count), mask=at < count)


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, depth, a_stride, b_stride, c_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row, column, inner = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    a_at = a_ptr + row * a_stride + inner[None, :]
    b_at = b_ptr + inner[:, None] * b_stride + column
    total = tl.zeros((M, N), tl.float32)
    for _ in range(0, depth, K):
        total = tl.dot(tl.load(a_at), tl.load(b_at), total)
        a_at += K
        b_at += K * b_stride
    tl.store(c_ptr + row * c_stride + column, total)


@triton.jit
def hoard_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    """Holds BLOCK values per program until the end."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    for step in range(count):
        x = x * tl.load(y_ptr + step) + x
    tl.store(x_ptr + at, x)


@triton.jit
def pointers_kernel(
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15, p16, p17, p18, p19, p20,
    p21, p22, p23, p24, p25, p26, p27, p28, p29, p30, p31, p32, p33, p34, p35, p36, p37, p38, p39,
    count,
):  # fmt: skip
    """Keeps forty addresses, the same for every lane: scalar registers on AMD."""
    pointers = (
        p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15, p16, p17, p18, p19,
        p20, p21, p22, p23, p24, p25, p26, p27, p28, p29, p30, p31, p32, p33, p34, p35, p36, p37,
        p38, p39,
    )  # fmt: skip
    for step in range(count):
        for index in tl.static_range(40):
            at = pointers[index] + step
            tl.store(at, tl.load(at + 1) * 2)


@triton.jit
def refused_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 0, "BLOCK is not below 0")
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)


@triton.jit
def many_types_kernel(
    x_ptr, y_ptr, n, one, wide, huge, eps, flag, none, sized: tl.int64, FLAG: tl.constexpr, K=1
):  # fmt: skip
    """One parameter for each way in which Triton finds a type; it does nothing."""


def copy(dtype: str = "fp32", block: int = 1024, **options: Any) -> Specimen:
    return Specimen(
        copy_kernel,
        {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "count": "i32"},
        {"BLOCK": block},
        ("x_ptr", "y_ptr", "count"),
        {"num_warps": 4, **options},
    )


def product(m: int = 64, n: int = 64, k: int = 32, **options: Any) -> Specimen:
    names = ("a_ptr", "b_ptr", "c_ptr", "depth", "a_stride", "b_stride", "c_stride")
    types = ("*fp16", "*fp16", "*fp32", *["i32"] * 4)
    return Specimen(
        product_kernel,
        dict(zip(names, types, strict=True)),
        {"M": m, "N": n, "K": k},
        names,
        {"num_warps": 4, "num_stages": 3, **options},
    )


def hoard(block: int, **options: Any) -> Specimen:
    return Specimen(
        hoard_kernel,
        {"x_ptr": "*fp32", "y_ptr": "*fp32", "count": "i32"},
        {"BLOCK": block},
        ("x_ptr", "y_ptr"),
        {"num_warps": 1, **options},
    )


def pointers() -> Specimen:
    names = tuple(f"p{index}" for index in range(40))
    signature = {**dict.fromkeys(names, "*fp32"), "count": "i32"}
    return Specimen(pointers_kernel, signature, options={"num_warps": 1}, huge=names)


def refused() -> Specimen:
    return Specimen(refused_kernel, {"x_ptr": "*fp32"}, {"BLOCK": 16})


SPECIMENS = (copy(), product(), hoard(1024), refused())
