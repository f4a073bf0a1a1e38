"""The logits of two requests change places on their way to the sampler."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


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
    truth=Truth(causes=(Cause.WRONG_INPUT,), kernels=("gather",), arguments=("rows", "logit_rows")),
    symptom="differs",
    source="tt-xla#4190",
    plant=plant,
    twin=twin,
)
