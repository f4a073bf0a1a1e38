"""The same entry with the checks on: refused before it reaches the device."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab, alter
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.change_batch(block_tables=lambda batch: alter(batch.block_tables, (0, 0), 40_000))


VICTIM = Victim(
    name="block_table_refused",
    title="a block table names block 40000, and the check sees it",
    cause=Cause.BLOCK_TABLE_RANGE,
    symptom="error",
    kernel="step",
    argument="block_tables",
    source="vllm#47056",
    plant=plant,
)
