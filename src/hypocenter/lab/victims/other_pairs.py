"""Rope pairs neighbours where the model pairs halves, or the other way round."""

from __future__ import annotations

from typing import Any

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
from hypocenter.model.layers import heads


def plant(lab: Lab) -> None:
    def other(original: Any, plan: Any, *given: Any, style: str, **keywords: Any) -> None:
        original(plan, *given, style="neox" if style == "normal" else "normal", **keywords)

    lab.wrap(heads, "rope_write", other)


VICTIM = Victim(
    name="other_pairs",
    title="rope_write is called with the pairing of another family",
    cause=Cause.WRONG_ANSWER,
    symptom="differs",
    kernel="rope_write",
    argument="style",
    also=("NEIGHBOURS",),
    source="llama.cpp#3670",
    plant=plant,
)
