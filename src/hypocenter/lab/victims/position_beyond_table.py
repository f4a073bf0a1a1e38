"""A position far behind the table of cosines."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(positions=lambda batch: batch.positions + 5_000_000)


VICTIM = Victim(
    name="position_beyond_table",
    title="positions of another sequence, 5 million further on",
    cause=Cause.POSITION_RANGE,
    symptom="crash",
    kernel="rope_write",
    argument="positions",
    source="sglang#10788",
    plant=plant,
    twin=Lab.disarm,
)
