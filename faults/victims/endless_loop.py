"""A loop that steps by 0."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause

LOOP = "for start in tl.range(0, num_chunks, CHUNKS, num_stages=STAGES):"


def plant(lab: Lab) -> None:
    lab.edit("linear_float_gpu", (LOOP, "start = 0\n    while start < num_columns:"))


VICTIM = Victim(
    name="endless_loop",
    title="linear never reaches the end of a row",
    truth=Truth(
        causes=(Cause.ENDLESS_LOOP,),
        kernels=("linear_float",),
        lines=("while start < num_columns:",),
    ),
    symptom="hang",
    on_card=True,
    source="vllm#54269",
    plant=plant,
)
