"""A program too many is let through: the row behind the last live one is written."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

PROMPTS = [[9, 400, 33]]


def plant(lab: Lab) -> None:
    lab.prompts = PROMPTS
    lab.edit(
        "rope_write_gpu",
        ("if token >= tl.load(counts_ptr):", "if token > tl.load(counts_ptr):"),
    )


def twin(lab: Lab) -> None:
    lab.prompts = PROMPTS


VICTIM = Victim(
    name="one_token_too_many",
    title="rope_write also writes the token behind the last one",
    cause=Cause.OFF_BY_ONE,
    symptom="differs",
    kernel="rope_write",
    argument="slots",
    also=("counts", "k_cache", "v_cache"),
    line="if token > tl.load(counts_ptr):",
    source="vllm#13418",
    plant=plant,
    twin=twin,
)
