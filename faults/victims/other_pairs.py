"""Rope pairs neighbours where the model pairs halves, or the other way round."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause
from hypocenter.model.layers import heads


def plant(lab: Lab) -> None:
    def other(original: Any, plan: Any, *given: Any, style: str, **keywords: Any) -> None:
        original(plan, *given, style="neox" if style == "normal" else "normal", **keywords)

    lab.wrap(heads, "rope_write", other)


VICTIM = Victim(
    name="other_pairs",
    title="rope_write is called with the pairing of another family",
    truth=Truth(
        causes=(Cause.WRONG_ANSWER,), kernels=("rope_write",), arguments=("style", "NEIGHBOURS")
    ),
    symptom="differs",
    source="llama.cpp#3670",
    plant=plant,
)
