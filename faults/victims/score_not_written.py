"""Attention's parts: the last score of each token stays what it was, the token's own key."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause

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
    truth=Truth(
        causes=(Cause.OUTPUT_NOT_WRITTEN,), kernels=("scores",), arguments=("scores",), lines=(NEW,)
    ),
    symptom="differs",
    source="vllm-ascend#17003",
    plant=plant,
    twin=twin,
)
