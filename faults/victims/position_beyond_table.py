"""A position far behind the table of cosines."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(positions=lambda batch: batch.positions + 5_000_000)


VICTIM = Victim(
    name="position_beyond_table",
    title="positions of another sequence, 5 million further on",
    truth=Truth(causes=(Cause.POSITION_RANGE,), kernels=("rope_write",), arguments=("positions",)),
    symptom="crash",
    on_card=True,
    source="sglang#10788",
    plant=plant,
    twin=Lab.disarm,
)
