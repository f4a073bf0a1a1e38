"""A table that still names a block which was given back."""

from __future__ import annotations

import numpy as np

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(block_tables=lambda batch: np.full_like(batch.block_tables, 3))


VICTIM = Victim(
    name="unowned_block",
    title="a block table names a free block of the cache",
    cause=Cause.FOREIGN_BLOCK,
    symptom="differs",
    kernel="attention",
    argument="block_tables",
    source="vllm#18957",
    plant=plant,
    twin=Lab.disarm,
)
