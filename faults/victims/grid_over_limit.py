"""Tokens along a dimension of the grid that ends at 65535."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause

TURNED = (
    ("grid=(x.shape[0], num_heads)", "grid=(num_heads, x.shape[0])"),
    (
        "row, head = tl.program_id(0), tl.program_id(1)",
        "head, row = tl.program_id(0), tl.program_id(1)",
    ),
)


def plant(lab: Lab) -> None:
    lab.edit("norm_gpu", *TURNED)
    lab.config["max_batch_tokens"] = 65536


def twin(lab: Lab) -> None:
    lab.edit("norm_gpu", *TURNED)


VICTIM = Victim(
    name="grid_over_limit",
    title="rms_norm has 65536 programs along y",
    truth=Truth(causes=(Cause.GRID_LIMIT,), kernels=("rms_norm",), arguments=("grid",)),
    symptom="error",
    on_card=True,
    device="sim:h200",
    source="vllm#52381",
    plant=plant,
    twin=twin,
)
