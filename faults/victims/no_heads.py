"""A dimension of 0 where heads are counted."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause
from hypocenter.model.layers import heads


def plant(lab: Lab) -> None:
    def none(original: Any, plan: Any, *given: Any, num_heads: int, **keywords: Any) -> None:
        original(plan, *given, num_heads=0, **keywords)

    lab.wrap(heads, "rope_write", none)


VICTIM = Victim(
    name="no_heads",
    title="rope_write is asked to turn 0 heads",
    truth=Truth(causes=(Cause.BAD_SCALAR,), kernels=("rope_write",), arguments=("num_heads",)),
    symptom="error",
    source="GRETA CORE",
    plant=plant,
)
