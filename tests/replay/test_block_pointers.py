"""Kernels with block pointers, replayed: right tiles, checked edges, and what Triton refuses."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from specimens import block_pointer_kernels as kernels  # noqa: E402

from hypocenter.device.interpret.block_pointers import compile_problem  # noqa: E402
from hypocenter.replay.findings import ReplayReport  # noqa: E402
from hypocenter.replay.replay import KernelFailed, replay  # noqa: E402
from hypocenter.replay.terms import GivenMemory  # noqa: E402


def tile(padding: str, axes: tuple[int, ...], dtype: Any = torch.float32) -> tuple[Any, Any, Any]:
    """Report, source and tile at (3, 2) of a source of 5 rows and 7 columns."""
    x = torch.arange(35).reshape(5, 7).to(dtype)
    y = torch.empty(4, 8, dtype=dtype)
    numbers = {"M": 5, "N": 7, "stride_m": 7, "row": 3, "column": 2, "BM": 4, "BN": 8}
    arguments = {"x_ptr": x, "y_ptr": y, **numbers, "PADDING": padding, "AXES": axes}
    return replay(kernels.copy_tile, (1,), arguments, given=GivenMemory(outputs=["y_ptr"])), x, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_a_checked_edge_is_padded_with_zeros(dtype: Any) -> None:
    report, x, y = tile("zero", (0, 1), dtype)
    assert report.findings == ()
    assert report.has_block_pointers
    assert torch.equal(y[:2, :5], x[3:, 2:])
    assert not y[2:].any()
    assert not y[:, 5:].any()


def test_a_checked_edge_is_padded_with_nan_where_that_is_asked_for() -> None:
    report, x, y = tile("nan", (0, 1))
    assert report.findings == ()
    assert torch.equal(y[:2, :5], x[3:, 2:])
    assert y[2:].isnan().all()
    assert y[:, 5:].isnan().all()


@pytest.mark.parametrize(
    ("axes", "lane"), [((0,), None), ((1,), (2, 0)), ((), (1, 5))], ids=["rows", "columns", "none"]
)
def test_an_axis_that_is_not_checked_is_read_beyond_its_end(
    axes: tuple[int, ...], lane: tuple[int, ...] | None
) -> None:
    report, _, _ = tile("zero", axes)
    (finding,) = report.findings
    assert (finding.kind, finding.argument) == ("out of bounds", "x_ptr")
    assert finding.values["x"] == "block [4, 8] at (3, 2) of shape (5, 7)"
    assert finding.lane == (lane or (1, 5))
    assert finding.sites[0].expression.startswith("tl.load(x, boundary_check=AXES")


def test_named_imports_inner_functions_and_scalars_work() -> None:
    x, y = torch.randn(100), torch.empty(16)
    report = replay(kernels.sum_of_parts, 1, {"x_ptr": x, "y_ptr": y, "n": 100, "BLOCK": 16})
    assert report.findings == ()
    assert torch.allclose(y, x.sum().expand(16), atol=1e-5)


def test_an_offset_that_leaves_32_bits_is_told() -> None:
    arguments = {"x_ptr": torch.zeros(64), "n": 2**40, "stride": 2**20, "row": 2**12, "BLOCK": 16}
    (finding,) = replay(kernels.far_tile, 1, arguments).findings
    assert finding.kind == "int32 overflow"
    assert finding.origin is not None
    assert finding.origin.expression == "row * stride"


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("masked", "mask is for other pointers only"),
        ("half_stored", "cast it with .to(fp32)"),
        ("checked_pointers", "boundary_check and padding_option are for block pointers only"),
    ],
)
def test_what_the_compiler_refuses_is_refused(kernel: str, words: str) -> None:
    with pytest.raises(KernelFailed, match="could not be replayed") as refused:
        replay(getattr(kernels, kernel), 1, {"x_ptr": torch.zeros(16), "BLOCK": 16})
    assert words in str(refused.value)
    assert refused.value.site is not None


def test_nan_pads_no_integers() -> None:
    with pytest.raises(KernelFailed, match="is for floats, and this block holds int32"):
        tile("nan", (0, 1), torch.int32)


def test_the_versions_that_compile_them_are_named() -> None:
    assert compile_problem("3.8.1") == ""
    assert compile_problem("3.6.0") == ""
    assert "need Triton 3.8 or older, and 3.10.1 is installed" in compile_problem("3.10.1")


def test_a_kernel_without_them_says_so() -> None:
    from specimens import replay_kernels

    x = torch.zeros(8)
    arguments = {"x_ptr": x, "y_ptr": x.clone(), "x_stride": 8, "y_stride": 8, "n_cols": 8}
    report: ReplayReport = replay(replay_kernels.scaled_rows, 1, {**arguments, "BLOCK": 8})
    assert not report.has_block_pointers
