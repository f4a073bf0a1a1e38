"""A sum is begun with whatever a fresh buffer holds."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause
from hypocenter.model.layers.activations import Activations


def plant(lab: Lab) -> None:
    from hypocenter.kernels.linear import linear_gpu

    def launch(original: Any, plan: Any, products: Any, accumulate: bool, **operands: Any) -> None:
        original(plan, products, accumulate or products[0].out.name == "q", **operands)

    lab.leave_undefined(Activations)
    for name in ("launch_floats", "launch_rounded"):
        lab.wrap(linear_gpu, name, launch)


def twin(lab: Lab) -> None:
    lab.leave_undefined(Activations)


VICTIM = Victim(
    name="added_to_nothing",
    title="linear adds to q, which nobody has written",
    truth=Truth(causes=(Cause.UNINITIALISED_READ,), kernels=("linear_float",), arguments=("out",)),
    symptom="nonfinite",
    device="sim:h200",
    source="sglang#9346",
    plant=plant,
    twin=twin,
)
