"""A step without tokens is planned: its grid is empty."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.after_load(lambda llm: llm.engine.runner._decoder.plan(0, 0))


VICTIM = Victim(
    name="empty_batch",
    title="a plan is made for no token at all",
    truth=Truth(
        causes=(Cause.EMPTY_LAUNCH,), kernels=("lookup_float",), arguments=("grid", "counts")
    ),
    symptom="error",
    source="sglang#38952",
    plant=plant,
)
