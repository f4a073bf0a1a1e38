"""A hash wraps on purpose and is no fault; a flat number that wraps before its division is one."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from specimens import hash_kernels as kernels  # noqa: E402

from hypocenter.replay.findings import ReplayReport  # noqa: E402
from hypocenter.replay.replay import VirtualTensor, replay  # noqa: E402

HASHES = [
    kernels.by_remainder, kernels.by_quotient, kernels.by_shift, kernels.by_signed_shift,
    kernels.by_mask, kernels.made_positive, kernels.generator, kernels.fnv, kernels.murmur,
    kernels.xxhash, kernels.philox, kernels.rolling,
]  # fmt: skip


def hashed(kernel: Any, first: int = 90_000) -> ReplayReport:
    keys = torch.arange(first, first + 64, dtype=torch.int32) * 7
    launch = {
        "key_ptr": keys, "table_ptr": torch.arange(16, dtype=torch.int32),
        "out_ptr": torch.full((64,), -1, dtype=torch.int32),
        "num_slots": 16 if kernel is kernels.by_mask else 13, "BLOCK": 64,
    }  # fmt: skip
    return replay(kernel, (1,), launch, headroom=True)


@pytest.mark.parametrize("kernel", HASHES, ids=lambda kernel: str(kernel.__name__))
def test_a_hash_that_wraps_and_stays_inside_its_table_is_no_fault(kernel: Any) -> None:
    report = hashed(kernel)
    assert report.findings == ()
    assert report.headroom == ()


@pytest.mark.parametrize("kernel", [kernels.of_levels, kernels.of_quotients])
def test_small_keys_of_a_hash_into_one_of_several_tables_are_no_fault(kernel: Any) -> None:
    """Without a limit to the bits some of them lead to another table, inside of the tensor."""
    report = hashed(kernel, first=0)
    assert report.findings == ()
    assert report.headroom == ()


def test_a_remainder_before_the_table_is_what_has_wrapped() -> None:
    [finding] = hashed(kernels.signed_remainder).findings
    assert (finding.kind, finding.argument) == ("int32 overflow", "table_ptr")
    assert finding.origin is not None
    assert "* 1000003" in finding.origin.expression


@pytest.mark.parametrize("around", [1, 2], ids=["below 0", "inside again"])
def test_a_flat_number_that_wraps_before_its_division_is_a_fault(around: int) -> None:
    """Row and column are quotient and remainder of one number."""
    num_rows = (around << 31) // 65536 + 4
    launch = {
        "x_ptr": VirtualTensor("int8", (num_rows, 65536), (65536, 1)),
        "y_ptr": torch.zeros(64, dtype=torch.int8),
        "first": (around << 31) // 65536, "n_cols": 65536, "stride": 65536, "BLOCK": 64,
    }  # fmt: skip
    [finding] = replay(kernels.wrapped_rows, (1,), launch).findings
    assert (finding.kind, finding.argument) == ("int32 overflow", "x_ptr")


def rows_of(stride: int) -> ReplayReport:
    """A table of 30000 rows of 8, of which row 29999 is read by this stride."""
    launch = {
        "x_ptr": VirtualTensor("float32", (30_000, 8), (8, 1)),
        "ids_ptr": torch.tensor([29_999], dtype=torch.int32),
        "out_ptr": torch.zeros(8), "stride": stride, "BLOCK": 8,
    }  # fmt: skip
    return replay(kernels.row_by_index, (1,), launch)


def test_of_an_offset_that_lies_outside_in_64_bits_as_well_that_is_said() -> None:
    [finding] = [f for f in rows_of(100_000).findings if f.kind == "int32 overflow"]
    assert not finding.is_meant_inside
    assert finding.detail.endswith(", which is outside as well")
    assert rows_of(8).findings == ()
