"""The two halves of the feed-forward change places."""

from __future__ import annotations

from typing import Any

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
from hypocenter.model.layers import layer_ops


def plant(lab: Lab) -> None:
    def swap(original: Any, plan: Any, gate: Any, up: Any, *given: Any) -> None:
        original(plan, up, gate, *given)

    lab.wrap(layer_ops, "gate", swap)


VICTIM = Victim(
    name="gate_and_up_swapped",
    title="gate and up are passed the wrong way round",
    cause=Cause.WRONG_ANSWER,
    symptom="differs",
    kernel="gate",
    argument="gate",
    also=("up",),
    source="vllm#41645",
    plant=plant,
)
