"""The epsilon of the norms is 1, and much else is changed that does no harm."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.harmless import find
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
from hypocenter.lab.victims import eps_is_one

HARMLESS = ("renamed_buffers", "longer_context", "norm_made_twice")


def plant(lab: Lab) -> None:
    for change in find(HARMLESS):
        change.plant(lab)
    eps_is_one.plant(lab)


VICTIM = Victim(
    name="eps_among_other_changes",
    title="rms_norm is called with eps = 1, among three changes that do no harm",
    cause=Cause.WRONG_ANSWER,
    symptom="differs",
    kernel="rms_norm",
    argument="eps",
    plant=plant,
    source="sglang#30989",
)
