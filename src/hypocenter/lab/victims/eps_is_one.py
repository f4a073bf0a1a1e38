"""The epsilon of the norms is 1."""

from __future__ import annotations

from typing import Any

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
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
    cause=Cause.WRONG_ANSWER,
    symptom="differs",
    kernel="rms_norm",
    argument="eps",
    source="sglang#30989",
    plant=plant,
)
