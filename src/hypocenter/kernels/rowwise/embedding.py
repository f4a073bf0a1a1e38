"""embedding: rows of the token table by token id, and rows of activations by index."""

from __future__ import annotations

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import WEIGHT_TYPES, DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import (
    COUNT,
    Apart,
    Arg,
    Index,
    Rule,
    Symbols,
    live_counts,
    live_rows,
)
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.weights.packing import Packed


def _live(values: Symbols) -> Array:
    """The mask of the rows that the scalar `count` says are live."""
    return live_rows("rows", values["count"])(values)


LOOKUP = Contract(
    "lookup",
    Arg("table", WEIGHT_TYPES, "vocab_size, width"),
    Arg("out", (DType.F32,), "num_tokens, >= width", "write"),
    Arg(
        "token_ids",
        (DType.I32,),
        ">= num_tokens",
        index=Index("vocab_size", "the vocabulary", live=live_rows("token_ids")),
    ),
    live_counts("num_tokens", 0),
)
GATHER = Contract(
    "gather",
    Arg("x", (DType.F32,), "num_rows, width"),
    Arg("out", (DType.F32,), "num_taken, width", "write"),
    Arg("rows", (DType.I32,), ">= num_taken", index=Index("num_rows", "the rows", live=_live)),
    live_counts("num_taken"),
    COUNT,
    Apart("out", "x"),
    Rule("width % 16 == 0", "rows must be padded to whole vectors"),
)
ADD_ROWS = Contract(
    "add_rows",
    Arg("x", (DType.F32,), "num_tokens, width", "both"),
    Arg("table", (DType.F32,), "num_rows, width"),
    Arg(
        "rows",
        (DType.I32,),
        ">= num_tokens",
        index=Index("num_rows", "the table", live=live_rows("rows")),
    ),
    live_counts("num_tokens", 0),
    Apart("x", "table"),
    Rule("width % 16 == 0", "rows must be padded to whole vectors"),
)
KEEP_ROWS = Contract(
    "keep_rows",
    Arg("x", (DType.F32,), "num_rows, width"),
    Arg("table", (DType.F32,), "num_kept, width", "both"),
    Arg("rows", (DType.I32,), ">= num_rows", index=Index("num_kept", "the table", live=_live)),
    live_counts("num_rows"),
    COUNT,
    Apart("table", "x"),
    Rule("width % 16 == 0", "rows must be padded to whole vectors"),
)
NARROW = Contract(
    "narrow",
    Arg("out", (DType.F32,), "num_logit_rows, width", "write"),
    Arg("x", (DType.F32,), "num_logit_rows, >= -(-width // 16) * 16", "read"),
    live_counts("num_logit_rows", 1),
    Apart("out", "x"),
)
_LOOKUP_FLOAT = Op(
    LOOKUP,
    cpu="rowwise.embedding_cpu.lookup_float",
    gpu="rowwise.embedding_gpu.launch_lookup_float",
    work_per_row=lambda num_columns: 16 * num_columns,
)
_LOOKUP_CODES = Op(
    LOOKUP,
    cpu="rowwise.embedding_cpu.lookup_codes",
    gpu="rowwise.embedding_gpu.launch_lookup_codes",
    work_per_row=lambda num_columns: 16 * num_columns,
)
_GATHER = Op(
    GATHER,
    cpu="rowwise.embedding_cpu.gather",
    gpu="rowwise.embedding_gpu.launch_gather",
    work_per_row=lambda x: x.shape[1],
)
_ADD_ROWS = Op(
    ADD_ROWS,
    cpu="rowwise.embedding_cpu.add_rows",
    gpu="rowwise.embedding_gpu.launch_add_rows",
    work_per_row=lambda x: x.shape[1],
)
_KEEP_ROWS = Op(
    KEEP_ROWS,
    cpu="rowwise.embedding_cpu.keep_rows",
    gpu="rowwise.embedding_gpu.launch_keep_rows",
    work_per_row=lambda x: x.shape[1],
)
_NARROW = Op(
    NARROW,
    cpu="rowwise.embedding_cpu.narrow",
    gpu="rowwise.embedding_gpu.launch_narrow",
    work_per_row=lambda out: out.shape[1],
)


def lookup(
    plan: PlanBuilder, token_ids: Tensor, table: Tensor, out: Tensor, counts: Tensor
) -> None:
    """Append out[i] = table[token_ids[i]]: table packed [vocab_size, width], out f32.

    Ids must lie in 0 .. vocab_size - 1; the runner checks them before they reach the device.
    """
    packed: Packed = table.data
    plan.add(
        _LOOKUP_CODES if table.dtype.is_quantised else _LOOKUP_FLOAT,
        table=table,
        out=out,
        token_ids=token_ids,
        counts=counts,
        num_columns=packed.num_columns,
    )


def gather(
    plan: PlanBuilder, x: Tensor, rows: Tensor, out: Tensor, counts: Tensor, *, count: int = 1
) -> None:
    """Append out[i] = x[rows[i]] for i < counts[count]; x and out f32 of the same width."""
    plan.add(_GATHER, x=x, out=out, rows=rows, counts=counts, count=count)


def add_rows(plan: PlanBuilder, x: Tensor, table: Tensor, rows: Tensor, counts: Tensor) -> None:
    """Append x[i] += table[rows[i]] for i < counts[0]; x and table f32 of the same width."""
    plan.add(_ADD_ROWS, x=x, table=table, rows=rows, counts=counts)


def keep_rows(
    plan: PlanBuilder, x: Tensor, rows: Tensor, table: Tensor, counts: Tensor, *, count: int = 0
) -> None:
    """Append table[rows[i]] = x[i] for i < counts[count]; x and table f32 of the same width. No two
    of these rows may be the same."""
    plan.add(_KEEP_ROWS, x=x, table=table, rows=rows, counts=counts, count=count)


def narrow(plan: PlanBuilder, x: Tensor, out: Tensor, counts: Tensor) -> None:
    """Append out[i] = the leading columns of x[i] for i < counts[1]: takes the padding off."""
    plan.add(_NARROW, out=out, x=x, counts=counts)
