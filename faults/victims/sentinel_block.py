"""An entry of a block table that is still -1 is read as a block."""

from __future__ import annotations

import numpy as np

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(block_tables=lambda batch: np.full_like(batch.block_tables, -1))


VICTIM = Victim(
    name="sentinel_block",
    title="attention reads through a block table that was never filled",
    truth=Truth(
        causes=(Cause.SENTINEL_CONSUMED,), kernels=("attention",), arguments=("block_tables",)
    ),
    symptom="nonfinite",
    # The offset of block -1 is below 0, which is 2 GiB and more without a sign. There AMD's buffer
    # ends: its loads give 0, where the interpreter reads what lies before the cache.
    as_machine_code="differs",
    source="vllm#57036",
    plant=plant,
    twin=Lab.disarm,
)
