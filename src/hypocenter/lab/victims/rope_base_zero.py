"""A rope base of 0: every frequency but the first is infinite."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.model import model_path
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.model = model_path(rope_base=0.0)


VICTIM = Victim(
    name="rope_base_zero",
    title="the file asks for a rope base of 0",
    cause=Cause.BAD_SCALAR,
    symptom="error",
    kernel="rope",
    argument="freq_base",
    also=("rope_base", "base", "rope.freq_base", "llama.rope.freq_base"),
    source="GRETA CORE",
    plant=plant,
)
