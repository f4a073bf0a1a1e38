"""A loop that steps by 0."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

LOOP = "for start in tl.range(0, num_chunks, CHUNKS, num_stages=STAGES):"


def plant(lab: Lab) -> None:
    lab.edit("linear_float_gpu", (LOOP, "start = 0\n    while start < num_columns:"))


VICTIM = Victim(
    name="endless_loop",
    title="linear never reaches the end of a row",
    cause=Cause.ENDLESS_LOOP,
    symptom="hang",
    kernel="linear_float",
    argument=None,
    line="while start < num_columns:",
    source="vllm#54269",
    plant=plant,
)
