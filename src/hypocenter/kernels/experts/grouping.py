"""group: the rows that each expert reads, one behind the other, by what `route` has chosen.

A step has no time to ask the host, so the table is made where the ids are, into buffers of one
size for a bucket; what of it a step does not need says so by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Index, Rule, Scalar, Symbols, live_counts
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.experts.experts_table import ExpertsTable


def live_choices(name: str) -> Any:
    """The mask of the choices of live tokens in the index tensor `name`."""

    def mask(values: Symbols) -> np.ndarray[Any, Any]:
        live: np.ndarray[Any, Any] = np.arange(len(values[name])) < values["counts"][0]
        return live[:, None]

    return mask


_GROUP = (
    Arg(
        "ids",
        (DType.I32,),
        "num_tokens, num_used",
        index=Index("num_experts", "the experts", live=live_choices("ids")),
    ),
    Arg("experts", (DType.I32,), "num_groups", "write"),
    Arg("firsts", (DType.I32,), "num_groups", "write"),
    Arg("sizes", (DType.I32,), "num_groups", "write"),
    Arg("sources", (DType.I32,), "num_rows", "write"),
    Arg("places", (DType.I32,), "num_tokens, num_used", "write"),
    Arg("sorted_counts", (DType.I32,), "2", "write"),
    Arg("found", (DType.I32,), "1", "write"),
    live_counts("num_tokens", 0),
    Scalar("num_experts", "num_experts > 0", "must be above 0"),
    Scalar("alignment", "alignment in (1, 4, 16)", "must be 1, 4 or 16"),
    Rule(
        "num_tokens * num_used + min(num_experts, num_tokens * num_used) * (alignment - 1) "
        "<= num_rows",
        "the sorted rows must hold each choice, and what lies between two experts",
    ),
)
#: On a GPU, and on the CPU, where one thread counts by itself.
GROUP = Contract("group", *_GROUP)
COUNTED = Contract("group", Arg("ends", (DType.I32,), "num_experts", "write"), *_GROUP)
_GROUP_ROWS = Op(
    COUNTED,
    gpu_contract=GROUP,
    cpu="experts.routing_cpu.group",  # by one thread: the others would have nothing to do
    gpu="experts.routing_gpu.launch_group",
    cpu_alone=("ends",),
    gpu_alone=("shape",),
)


def reference(
    ids: np.ndarray[Any, Any], alignment: int, group_rows: int = 0
) -> tuple[list[tuple[int, int, int]], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Groups (expert, first row, rows), and of ids [num_tokens, num_used] the places and, by
    row, the source of each row that has one."""
    places, groups, row = np.zeros_like(ids), [], 0
    sources: dict[int, int] = {}
    for expert in np.unique(ids):
        chosen = np.argwhere(ids == expert)
        for at, (token, slot) in enumerate(chosen):
            places[token, slot] = row + at
            sources[row + at] = int(token)
        most = group_rows or len(chosen)
        groups += [
            (int(expert), row + start, min(most, len(chosen) - start))
            for start in range(0, len(chosen), most)
        ]
        row += -(-len(chosen) // alignment) * alignment
    by_row = np.full(row, -1)
    by_row[list(sources)] = list(sources.values())
    return groups, places, by_row


def group(plan: PlanBuilder, table: ExpertsTable, counts: Tensor) -> None:
    """Append the groups, sources and places of `table` for the first counts[0] rows of its ids."""
    plan.add(
        _GROUP_ROWS,
        ids=table.ids,
        experts=table.experts,
        firsts=table.firsts,
        sizes=table.sizes,
        sources=table.sources,
        places=table.places,
        sorted_counts=table.counts,
        found=table.num_groups,
        counts=counts,
        num_experts=table.shape.num_experts,
        alignment=table.shape.alignment,
        ends=table.ends,
        shape=table.shape,
    )
