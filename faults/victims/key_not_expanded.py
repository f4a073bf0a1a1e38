"""Attention's parts: expand leaves out the last key and value of each sequence."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from faults.victims.score_not_written import twin
from hypocenter.doctor.causes import Cause

OLD = "both = written[:, None] & (d < head_dim)[None, :]"
NEW = "both = (key < length - 1)[:, None] & (d < head_dim)[None, :]"


def plant(lab: Lab) -> None:
    twin(lab)
    lab.edit("unfused_gpu", (OLD, NEW))


VICTIM = Victim(
    name="key_not_expanded",
    title="expand leaves out the last key of each sequence, on the route of attention's parts",
    truth=Truth(
        causes=(Cause.OUTPUT_NOT_WRITTEN,), kernels=("expand",), arguments=("out",), lines=(NEW,)
    ),
    symptom="differs",
    source="vllm-ascend#17003",
    plant=plant,
    twin=twin,
)
