"""embedding: rows of the token table by token id, and rows of activations by index."""

from __future__ import annotations

from hypocenter.base.tensor import WEIGHT_TYPES, DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Apart, Arg, Index, Rule, live_counts, live_rows
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.rowwise import embedding_cpu
from hypocenter.kernels.weights.packing import Packed

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
    Arg("out", (DType.F32,), "num_logit_rows, width", "write"),
    Arg(
        "rows",
        (DType.I32,),
        ">= num_logit_rows",
        index=Index("num_rows", "the activations", live=live_rows("rows", 1)),
    ),
    live_counts("num_logit_rows", 1),
    Apart("out", "x"),
    Rule("width % 16 == 0", "rows must be padded to whole vectors"),
)
NARROW = Contract(
    "narrow",
    Arg("out", (DType.F32,), "num_logit_rows, width", "write"),
    Arg("x", (DType.F32,), "num_logit_rows, >= -(-width // 16) * 16", "read"),
    live_counts("num_logit_rows", 1),
    Apart("out", "x"),
)


def lookup(
    plan: PlanBuilder, token_ids: Tensor, table: Tensor, out: Tensor, counts: Tensor
) -> None:
    """Append out[i] = table[token_ids[i]]: table packed [vocab_size, width], out f32.

    Ids must lie in 0 .. vocab_size - 1; the runner checks them before they reach the device.
    """
    packed: Packed = table.data
    facts = {"table": table, "out": out, "token_ids": token_ids, "counts": counts}
    if plan.device != "cpu":
        from hypocenter.kernels.rowwise import embedding_gpu

        embedding_gpu.add_lookup(plan, LOOKUP, facts)
        return
    is_codes = table.dtype.is_quantised
    plan.add_cpu(
        embedding_cpu.lookup_codes if is_codes else embedding_cpu.lookup_float,
        *(token_ids, counts, table, *([packed.num_columns] if is_codes else []), out),
        contract=LOOKUP,
        facts=facts,
        work_per_row=16 * packed.num_columns,
    )


def gather(plan: PlanBuilder, x: Tensor, rows: Tensor, out: Tensor, counts: Tensor) -> None:
    """Append out[i] = x[rows[i]] for i < counts[1]; x and out f32 of the same width."""
    facts = {"x": x, "out": out, "rows": rows, "counts": counts}
    if plan.device != "cpu":
        from hypocenter.kernels.rowwise import embedding_gpu

        embedding_gpu.add_gather(plan, GATHER, facts)
        return
    plan.add_cpu(
        embedding_cpu.gather,
        x,
        rows,
        counts,
        out,
        contract=GATHER,
        facts=facts,
        work_per_row=x.shape[1],
    )


def narrow(plan: PlanBuilder, x: Tensor, out: Tensor, counts: Tensor) -> None:
    """Append out[i] = the leading columns of x[i] for i < counts[1]: takes the padding off."""
    facts = {"out": out, "x": x, "counts": counts}
    if plan.device != "cpu":
        from hypocenter.kernels.rowwise import embedding_gpu

        embedding_gpu.add_narrow(plan, NARROW, facts)
        return
    plan.add_cpu(
        embedding_cpu.narrow,
        x,
        counts,
        out,
        contract=NARROW,
        facts=facts,
        work_per_row=out.shape[1],
    )
