"""embedding: rows of the token table by token id, and rows of activations by index."""

from __future__ import annotations

from hypocenter.device.plan import PlanBuilder
from hypocenter.errors import LaunchRejected
from hypocenter.kernels import embedding_cpu
from hypocenter.kernels.quant import Packed
from hypocenter.tensor import Tensor

_KERNELS = {"float": embedding_cpu.lookup_float, "codes": embedding_cpu.lookup_codes}


def lookup(
    plan: PlanBuilder, token_ids: Tensor, table: Tensor, out: Tensor, counts: Tensor
) -> None:
    """Append out[i] = table[token_ids[i]]: table packed [vocab_size, width], out f32.

    Ids must lie in 0 .. vocab_size - 1; the runner checks them before they reach the device.
    """
    packed: Packed = table.data
    if out.shape[1] < packed.num_columns:
        raise LaunchRejected(
            "lookup", f"{out.name} has {out.shape[1]} columns, {table.name} {packed.num_columns}"
        )
    plan.launch(
        _KERNELS[packed.layout], token_ids, counts, table, out, work_per_row=16 * packed.num_columns
    )


def gather(plan: PlanBuilder, x: Tensor, rows: Tensor, out: Tensor, counts: Tensor) -> None:
    """Append out[i] = x[rows[i]] for i < counts[1]; x and out f32 of the same width."""
    if x.shape[1] != out.shape[1]:
        raise LaunchRejected("gather", f"{x.name} {x.shape} and {out.name} {out.shape}")
    plan.launch(embedding_cpu.gather, x, rows, counts, out, work_per_row=x.shape[1])


def narrow(plan: PlanBuilder, x: Tensor, out: Tensor, counts: Tensor) -> None:
    """Append out[i] = the leading columns of x[i] for i < counts[1]: takes the padding off."""
    if x.shape[1] < out.shape[1]:
        raise LaunchRejected(
            "narrow", f"{x.name} {x.shape} is narrower than {out.name} {out.shape}"
        )
    plan.launch(embedding_cpu.narrow, x, counts, out, work_per_row=out.shape[1])
