"""The epsilon of the norms is 1, and much else is changed that does no harm."""

from __future__ import annotations

from faults.harmless import find
from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from faults.victims import eps_is_one
from hypocenter.doctor.causes import Cause

HARMLESS = ("renamed_buffers", "longer_context", "norm_made_twice")


def plant(lab: Lab) -> None:
    for change in find(HARMLESS):
        change.plant(lab)
    eps_is_one.plant(lab)


VICTIM = Victim(
    name="eps_among_other_changes",
    title="rms_norm is called with eps = 1, among three changes that do no harm",
    truth=Truth(causes=(Cause.WRONG_ANSWER,), kernels=("rms_norm",), arguments=("eps",)),
    symptom="differs",
    plant=plant,
    source="sglang#30989",
)
