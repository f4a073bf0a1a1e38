"""The contracts of launches in which all GPUs of a group take part, in one order.

The terms are those of MPI and NCCL.
"""

from __future__ import annotations

from hypocenter.base.tensor import DType
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Apart, Arg, Scalar

ALL_REDUCE = Contract("all_reduce", Arg("x", (DType.F32,), "num_tokens, width", "both"))
ALL_GATHER = Contract(
    "all_gather",
    Arg("part", (DType.F32,), "num_rows, width"),
    Arg("parts", (DType.F32,), "num_ranks * num_rows, width", "write"),
    Scalar("num_ranks", "num_ranks > 1", "must be 2 or more"),
    Apart("parts", "part"),
)
BROADCAST = Contract("broadcast", Arg("token_ids", (DType.I32,), "num_tokens", "both"))
