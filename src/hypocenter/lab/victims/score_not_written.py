"""Attention's parts: the last score of each token stays what it was, the token's own key."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

OLD = "tl.store(scores_ptr + row + key, total, mask=written)"
NEW = "tl.store(scores_ptr + row + key, total, mask=key < length - 1)"


def plant(lab: Lab) -> None:
    twin(lab)
    lab.edit("unfused_gpu", (OLD, NEW))


def twin(lab: Lab) -> None:
    lab.config["attention"] = "parts"


VICTIM = Victim(
    name="score_not_written",
    title="scores leaves out the last key of each token, on the route of attention's parts",
    cause=Cause.OUTPUT_NOT_WRITTEN,
    symptom="differs",
    kernel="scores",
    argument="scores",
    line=NEW,
    source="vllm-ascend#17003",
    plant=plant,
    twin=twin,
)
