"""A position right behind the table of cosines reads what lies next to it."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(positions=lambda batch: batch.positions + 62)


VICTIM = Victim(
    name="position_just_beyond",
    title="positions reach 64, the table ends at 63",
    cause=Cause.POSITION_RANGE,
    symptom="differs",
    kernel="rope_write",
    argument="positions",
    device="sim:h200",
    source="pegainfer#220",
    plant=plant,
    twin=Lab.disarm,
)
