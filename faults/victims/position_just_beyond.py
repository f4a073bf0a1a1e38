"""A position right behind the table of cosines reads what lies next to it."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(positions=lambda batch: batch.positions + 62)


VICTIM = Victim(
    name="position_just_beyond",
    title="positions reach 64, the table ends at 63",
    truth=Truth(causes=(Cause.POSITION_RANGE,), kernels=("rope_write",), arguments=("positions",)),
    symptom="differs",
    device="sim:h200",
    source="pegainfer#220",
    plant=plant,
    twin=Lab.disarm,
)
