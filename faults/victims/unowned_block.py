"""A table that still names a block which was given back."""

from __future__ import annotations

import numpy as np

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(block_tables=lambda batch: np.full_like(batch.block_tables, 3))


VICTIM = Victim(
    name="unowned_block",
    title="a block table names a free block of the cache",
    truth=Truth(causes=(Cause.FOREIGN_BLOCK,), kernels=("attention",), arguments=("block_tables",)),
    symptom="differs",
    source="vllm#18957",
    plant=plant,
    twin=Lab.disarm,
)
