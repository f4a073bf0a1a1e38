"""The engine comes upon something of its own that must not be so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause
from hypocenter.model.layers.decoder import Decoder

PLANTED_AT = 1


def plant(lab: Lab) -> None:
    def lose(original: Any, self: Any, plan: Any, b: Any, index: int, w: Any, *rest: Any) -> None:
        found = replace(w, attn_output=None) if index == PLANTED_AT else w
        original(self, plan, b, index, found, *rest)

    lab.wrap(Decoder, "_attention", lose)


VICTIM = Victim(
    name="output_matrix_lost",
    title="the planner finds a layer of attention without its output matrix",
    truth=Truth(causes=(Cause.BROKEN_CHECK,), kernels=("",)),
    symptom="error",
    source="aiter#2608",
    plant=plant,
)
