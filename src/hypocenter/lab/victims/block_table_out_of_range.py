"""A block table names a block far behind the cache."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab, alter
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(block_tables=lambda batch: alter(batch.block_tables, (0, 0), 40_000))


VICTIM = Victim(
    name="block_table_out_of_range",
    title="a block table names block 40000 of a cache of 4",
    cause=Cause.BLOCK_TABLE_RANGE,
    symptom="crash",
    kernel="attention",
    argument="block_tables",
    source="vllm#47056, flash-attention#2711",
    plant=plant,
    twin=Lab.disarm,
)
