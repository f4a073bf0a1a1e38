"""The epsilon of the norms is 1."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause
from hypocenter.model.layers import layer_ops


def plant(lab: Lab) -> None:
    def large(
        original: Any, plan: Any, x: Any, weight: Any, eps: float, *given: Any, **keywords: Any
    ) -> None:
        original(plan, x, weight, 1.0, *given, **keywords)

    lab.wrap(layer_ops, "rms_norm", large)


VICTIM = Victim(
    name="eps_is_one",
    title="rms_norm is called with eps = 1",
    truth=Truth(causes=(Cause.WRONG_ANSWER,), kernels=("rms_norm",), arguments=("eps",)),
    symptom="differs",
    on_card=True,
    source="sglang#30989",
    plant=plant,
)
