"""all_reduce, all_gather, broadcast: launches in which all GPUs of a group take part, in one order.

The terms are those of MPI and NCCL. `join` lays what was gathered side by side; `add_parts` adds
it.
"""

from __future__ import annotations

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.collectives import ALL_GATHER, ALL_REDUCE, BROADCAST
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Apart, Arg, Scalar, live_counts
from hypocenter.device.group import Group
from hypocenter.device.launch import Launch, prepare_call
from hypocenter.device.memory import rows
from hypocenter.device.op import BoundPlan, Op
from hypocenter.device.plan import PlanBuilder

JOIN = Contract(
    "join",
    Arg("out", (DType.F32,), "num_logit_rows, num_parts * num_columns", "write"),
    Arg("parts", (DType.F32,), "num_parts * num_logit_rows, >= num_columns"),
    live_counts("num_logit_rows", 1),
    Scalar("num_parts", "num_parts > 1", "must be 2 or more"),
    Scalar("num_columns", "num_columns > 0", "must be 1 or more"),
    Apart("out", "parts"),
)
ADD_PARTS = Contract(
    "add_parts",
    Arg("out", (DType.F32,), "num_tokens, width", "write"),
    Arg("parts", (DType.F32,), "num_parts * num_tokens, width"),
    live_counts("num_tokens", 0),
    Scalar("num_parts", "num_parts > 1", "must be 2 or more"),
    Apart("out", "parts"),
)
_JOIN = Op(JOIN, gpu="collective.join_gpu.launch")
_ADD_PARTS = Op(ADD_PARTS, gpu="collective.add_parts_gpu.launch")
_ALL_REDUCE = Op(ALL_REDUCE, gpu="collective.collectives.call_all_reduce")
_ALL_GATHER = Op(ALL_GATHER, gpu="collective.collectives.call_all_gather")


def gathered_rows(num_ranks: int, num_tokens: int) -> int:
    """Rows of the `parts` that `all_reduce` needs for so many rows of x."""
    return num_ranks * num_tokens if num_ranks > 2 else 0


def all_reduce(
    plan: PlanBuilder, group: Group, x: Tensor, counts: Tensor, parts: Tensor | None
) -> None:
    """Append x[i] = the sum of x[i] of all ranks, for i < counts[0]: f32 [num_tokens, width].

    The bits are the same on each rank, and whatever other rows there are. Two numbers have one
    sum. The library adds more of them in an order that depends on the size of x and on the place
    in it; so x of all ranks is gathered in `parts`, f32 [gathered_rows, width], and added in the
    order of ranks.
    """
    if group.num_ranks == 2:
        plan.add(_ALL_REDUCE, x=x, group=group)
        return
    assert parts is not None, "more than two ranks need somewhere to gather"
    parts = rows(parts, 0, gathered_rows(group.num_ranks, x.shape[0]))
    all_gather(plan, group, x, parts)
    plan.add(_ADD_PARTS, out=x, parts=parts, counts=counts, num_parts=group.num_ranks)


def call_all_reduce(plan: BoundPlan, group: Group, x: Tensor) -> None:
    """Append the group's call, or its own kernel where GPUs reach each other's memory."""
    launch = group.peer_sum.launch(x) if group.peer_sum is not None else None
    # A launch that waits for another process is a call, too: by itself it would wait for ever.
    plan.add_call(group.all_reduce if launch is None else lambda _: launch.run(), "x")


def all_gather(plan: PlanBuilder, group: Group, part: Tensor, parts: Tensor) -> None:
    """Append parts = part of all ranks, one below the other: f32 [num_ranks * num_rows, width]."""
    plan.add(_ALL_GATHER, part=part, parts=parts, num_ranks=group.num_ranks, group=group)


def call_all_gather(plan: BoundPlan, group: Group) -> None:
    """Append the group's call."""
    plan.add_call(group.all_gather, "part", "parts")


def broadcast(group: Group, token_ids: Tensor, device: str) -> Launch:
    """The launch, of no plan, by which all ranks get the first one's i32 [num_tokens]."""
    return prepare_call(
        "broadcast", group.broadcast, (token_ids,), BROADCAST, {"token_ids": token_ids}, device
    )


def join(
    plan: PlanBuilder, parts: Tensor, out: Tensor, counts: Tensor, *, num_columns: int
) -> None:
    """Append out[i] = the leading `num_columns` of row i of each part, side by side, on a GPU.

    parts f32 [num_parts * num_logit_rows, num_columns or more], for i < counts[1].
    """
    plan.add(
        _JOIN,
        out=out,
        parts=parts,
        counts=counts,
        num_parts=out.shape[1] // num_columns,
        num_columns=num_columns,
    )
