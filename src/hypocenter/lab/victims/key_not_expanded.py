"""Attention's parts: expand leaves out the last key and value of each sequence."""

from __future__ import annotations

from hypocenter.diagnosis import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

OLD = "both = written[:, None] & (d < head_dim)[None, :]"
NEW = "both = (key < length - 1)[:, None] & (d < head_dim)[None, :]"


def plant(lab: Lab) -> None:
    twin(lab)
    lab.edit("attention_parts_gpu", (OLD, NEW))


def twin(lab: Lab) -> None:
    lab.config["attention"] = "parts"


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
