"""Attention's parts: expand leaves out the last key and value of each sequence."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
from hypocenter.lab.victims.score_not_written import twin

OLD = "both = written[:, None] & (d < head_dim)[None, :]"
NEW = "both = (key < length - 1)[:, None] & (d < head_dim)[None, :]"


def plant(lab: Lab) -> None:
    twin(lab)
    lab.edit("unfused_gpu", (OLD, NEW))


VICTIM = Victim(
    name="key_not_expanded",
    title="expand leaves out the last key of each sequence, on the route of attention's parts",
    cause=Cause.OUTPUT_NOT_WRITTEN,
    symptom="differs",
    kernel="expand",
    argument="out",
    line=NEW,
    source="vllm-ascend#17003",
    plant=plant,
    twin=twin,
)
