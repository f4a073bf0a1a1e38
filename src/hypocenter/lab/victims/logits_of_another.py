"""The logits of two requests change places on their way to the sampler."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.run_two_requests()
    lab.change_batch(logit_rows=lambda batch: batch.logit_rows[::-1].copy())


def twin(lab: Lab) -> None:
    lab.disarm()
    lab.run_two_requests()


VICTIM = Victim(
    name="logits_of_another",
    title="two requests draw from each other's logits",
    cause=Cause.WRONG_INPUT,
    symptom="differs",
    kernel="gather",
    argument="rows",
    also=("logit_rows",),
    source="tt-xla#4190",
    plant=plant,
    twin=twin,
)
