"""A head of an odd number of elements cannot be turned in pairs."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause
from hypocenter.model.layers import heads


def plant(lab: Lab) -> None:
    def odd(original: Any, plan: Any, *given: Any, head_dim: int, **keywords: Any) -> None:
        original(plan, *given, head_dim=head_dim - 1, **keywords)

    lab.wrap(heads, "rope_write", odd)


VICTIM = Victim(
    name="odd_head_dim",
    title="rope_write is asked to turn heads of 15 elements",
    truth=Truth(causes=(Cause.BAD_SCALAR,), kernels=("rope_write",), arguments=("head_dim",)),
    symptom="error",
    source="GRETA CORE",
    plant=plant,
)
