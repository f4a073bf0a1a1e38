"""A sum is begun with whatever a fresh buffer holds."""

from __future__ import annotations

from typing import Any

from hypocenter.diagnosis import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
from hypocenter.model import decoder


def plant(lab: Lab) -> None:
    def add(
        original: Any, plan: Any, x: Any, weight: Any, out: Any, *given: Any, **names: Any
    ) -> None:
        names["accumulate"] = names.get("accumulate") or out.name == "q"
        original(plan, x, weight, out, *given, **names)

    lab.leave_undefined(decoder._Buffers)
    lab.wrap(decoder, "linear", add)


def twin(lab: Lab) -> None:
    lab.leave_undefined(decoder._Buffers)


VICTIM = Victim(
    name="added_to_nothing",
    title="linear adds to q, which nobody has written",
    cause=Cause.UNINITIALISED_READ,
    symptom="nonfinite",
    kernel="linear",
    argument="out",
    device="sim:h200",
    source="sglang#9346",
    plant=plant,
    twin=twin,
)
