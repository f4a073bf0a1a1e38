"""A head of an odd number of elements cannot be turned in pairs."""

from __future__ import annotations

from typing import Any

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
from hypocenter.model.layers import heads


def plant(lab: Lab) -> None:
    def odd(original: Any, plan: Any, *given: Any, head_dim: int, **keywords: Any) -> None:
        original(plan, *given, head_dim=head_dim - 1, **keywords)

    lab.wrap(heads, "rope_write", odd)


VICTIM = Victim(
    name="odd_head_dim",
    title="rope_write is asked to turn heads of 15 elements",
    cause=Cause.BAD_SCALAR,
    symptom="error",
    kernel="rope_write",
    argument="head_dim",
    source="GRETA CORE",
    plant=plant,
)
