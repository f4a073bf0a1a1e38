"""A sum is begun with whatever a fresh buffer holds."""

from __future__ import annotations

from typing import Any

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
from hypocenter.model.layers.activations import Activations


def plant(lab: Lab) -> None:
    from hypocenter.kernels.linear import linear_gpu

    def add(
        original: Any, plan: Any, contract: Any, facts: Any, count: int, accumulate: bool
    ) -> None:
        original(plan, contract, facts, count, accumulate or facts["out"].name == "q")

    lab.leave_undefined(Activations)
    lab.wrap(linear_gpu, "add", add)


def twin(lab: Lab) -> None:
    lab.leave_undefined(Activations)


VICTIM = Victim(
    name="added_to_nothing",
    title="linear adds to q, which nobody has written",
    cause=Cause.UNINITIALISED_READ,
    symptom="nonfinite",
    kernel="linear_float",
    argument="out",
    device="sim:h200",
    source="sglang#9346",
    plant=plant,
    twin=twin,
)
