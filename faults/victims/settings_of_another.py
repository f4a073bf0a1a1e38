"""The sampler's rows are in the order in which requests came, and not in the order of the step."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause
from hypocenter.kernels.sampling.sampling_plan import DeviceSampler


def plant(lab: Lab) -> None:
    def reversed_rows(original: Any, sampler: Any, draws: Any) -> None:
        original(sampler, list(draws)[::-1])

    twin(lab)
    lab.wrap(DeviceSampler, "_fill", reversed_rows)


def twin(lab: Lab) -> None:
    lab.run_two_requests()
    lab.sampling = {"temperature": 1.5, "seed": 3}


VICTIM = Victim(
    name="settings_of_another",
    title="two requests draw with each other's random numbers",
    truth=Truth(causes=(Cause.WRONG_INPUT,), kernels=("sample_keys",), arguments=("settings",)),
    symptom="differs",
    source="tt-metal#46350",
    plant=plant,
    twin=twin,
)
