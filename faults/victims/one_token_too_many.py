"""A program too many is let through: the row behind the last live one is written."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause

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
    truth=Truth(
        causes=(Cause.OFF_BY_ONE,),
        kernels=("rope_write",),
        arguments=("slots", "counts", "k_cache", "v_cache"),
        lines=("if token > tl.load(counts_ptr):",),
    ),
    symptom="differs",
    source="vllm#13418",
    plant=plant,
    twin=twin,
)
