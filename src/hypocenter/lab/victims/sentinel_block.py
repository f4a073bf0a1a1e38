"""An entry of a block table that is still -1 is read as a block."""

from __future__ import annotations

import numpy as np

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(block_tables=lambda batch: np.full_like(batch.block_tables, -1))


VICTIM = Victim(
    name="sentinel_block",
    title="attention reads through a block table that was never filled",
    cause=Cause.SENTINEL_CONSUMED,
    symptom="nonfinite",
    kernel="attention",
    argument="block_tables",
    source="vllm#57036",
    plant=plant,
    twin=Lab.disarm,
)
