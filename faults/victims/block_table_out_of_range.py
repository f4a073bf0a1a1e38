"""A block table names a block far behind the cache."""

from __future__ import annotations

from faults.lab import Lab, alter
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(block_tables=lambda batch: alter(batch.block_tables, (0, 0), 40_000))


VICTIM = Victim(
    name="block_table_out_of_range",
    title="a block table names block 40000 of a cache of 4",
    truth=Truth(
        causes=(Cause.BLOCK_TABLE_RANGE,), kernels=("attention",), arguments=("block_tables",)
    ),
    symptom="crash",
    on_card=True,
    source="vllm#47056, flash-attention#2711",
    plant=plant,
    twin=Lab.disarm,
)
