"""The same entry with the checks on: refused before it reaches the device."""

from __future__ import annotations

from faults.lab import Lab, alter
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.change_batch(block_tables=lambda batch: alter(batch.block_tables, (0, 0), 40_000))


VICTIM = Victim(
    name="block_table_refused",
    title="a block table names block 40000, and the check sees it",
    truth=Truth(causes=(Cause.BLOCK_TABLE_RANGE,), kernels=("step",), arguments=("block_tables",)),
    symptom="error",
    on_card=True,
    source="vllm#47056",
    plant=plant,
)
