"""What kernels may write in Triton's language, replayed as its compiler takes it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from specimens import language_kernels as kernels  # noqa: E402

from hypocenter.replay.replay import KernelFailed, replay  # noqa: E402


@pytest.mark.parametrize("step", [1, 3])
def test_what_a_loop_counts_by_is_a_tensor(step: int) -> None:
    x, y = torch.randn(10, 16), torch.empty(16)
    numbers = {"rows": 10, "stride": 16, "COLUMNS": 16, "STEP": step}
    report = replay(kernels.sums_of_rows, 1, {"x_ptr": x, "y_ptr": y, **numbers})
    assert report.findings == ()
    assert torch.allclose(y, x[::step].sum(0), atol=1e-5)


def test_it_has_the_type_that_the_compiler_counts_in() -> None:
    y = torch.zeros(4, dtype=torch.int32)
    assert replay(kernels.types_of_counters, 1, {"y_ptr": y, "n": 2}).findings == ()
    assert y.tolist() == [0, 0, 2, 0]


def test_a_counter_that_leaves_32_bits_in_an_offset_is_told() -> None:
    arguments = {"x_ptr": torch.zeros(4), "first": 2**16, "stride": 2**16}
    (finding,) = replay(kernels.far_row, 1, arguments).findings
    assert (finding.kind, finding.values["i"]) == ("int32 overflow", 2**16)
    assert finding.origin is not None
    assert finding.origin.expression == "i * stride"


def test_a_bound_that_is_no_integer_is_refused_where_it_stands() -> None:
    with pytest.raises(KernelFailed, match="must be integers, but are int32, fp32") as refused:
        replay(kernels.float_bound, 1, {"x_ptr": torch.zeros(4), "n": 4})
    assert refused.value.site is not None


def test_libdevice_takes_the_integers_that_triton_takes() -> None:
    x = torch.tensor([1.5, -2.0, 0.5, 3.0])
    n = torch.tensor([2, 3, 4, 12], dtype=torch.int32)
    y = torch.empty(5, 4)
    report = replay(kernels.powers, 1, {"x_ptr": x, "y_ptr": y, "z_ptr": n, "N": 4})
    assert report.findings == ()
    assert torch.allclose(y[0], x**n)
    assert torch.equal(y[1], 2.0**n)
    assert torch.equal(y[2], n / 2)
    assert y[3].tolist() == [
        10_000 * first + 100 * zeros + ones
        for ones, zeros, first in [(1, 30, 2), (2, 30, 1), (1, 29, 3), (2, 28, 3)]
    ]
    assert torch.equal(y[4], x)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("root_of_integers", "libdevice.sqrt takes fp32 or fp64, but got int32"),
        ("root_of_halves", "libdevice.fmod takes (fp32, fp32) or (fp64, fp64), but got (fp16"),
    ],
)
def test_what_triton_does_not_convert_is_refused_with_the_cast(kernel: str, words: str) -> None:
    with pytest.raises(KernelFailed, match="could not be replayed") as refused:
        replay(getattr(kernels, kernel), 1, {"x_ptr": torch.zeros(16), "N": 16})
    assert words in str(refused.value)
    assert "cast with .to(tl.float32)" in str(refused.value)


def test_a_block_that_is_loaded_under_a_mask_is_what_was_there() -> None:
    """Triton makes what is loaded elsewhere in the order of the addresses, by columns here."""
    x, y = torch.randn(100, 64), torch.zeros(100, 64)
    arguments = {"x_ptr": x, "y_ptr": y, "rows": 100, "COLUMNS": 64, "BLOCK": 32}
    assert replay(kernels.copy_rows, 4, arguments).findings == ()
    assert torch.equal(x, y)
