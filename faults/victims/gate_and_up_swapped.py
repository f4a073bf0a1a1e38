"""The two halves of the feed-forward change places."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause
from hypocenter.model.layers import layer_ops


def plant(lab: Lab) -> None:
    def swap(original: Any, plan: Any, gate: Any, up: Any, *given: Any) -> None:
        original(plan, up, gate, *given)

    lab.wrap(layer_ops, "gate", swap)


VICTIM = Victim(
    name="gate_and_up_swapped",
    title="gate and up are passed the wrong way round",
    truth=Truth(causes=(Cause.WRONG_ANSWER,), kernels=("gate",), arguments=("gate", "up")),
    symptom="differs",
    source="vllm#41645",
    plant=plant,
)
