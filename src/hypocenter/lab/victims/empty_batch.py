"""A step without tokens is planned: its grid is empty."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.after_load(lambda llm: llm.engine.runner._decoder.plan(0, 0))


VICTIM = Victim(
    name="empty_batch",
    title="a plan is made for no token at all",
    cause=Cause.EMPTY_LAUNCH,
    symptom="error",
    kernel="lookup_float",
    argument="grid",
    also=("counts",),
    source="sglang#38952",
    plant=plant,
)
