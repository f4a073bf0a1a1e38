"""The second request's table names the first one's block."""

from __future__ import annotations

import numpy as np

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.run_two_requests()
    lab.change_batch(
        block_tables=lambda batch: np.repeat(
            batch.block_tables[:1], len(batch.block_tables), axis=0
        )
    )


def twin(lab: Lab) -> None:
    lab.disarm()
    lab.run_two_requests()


VICTIM = Victim(
    name="foreign_block",
    title="a request reads the keys of another one",
    cause=Cause.FOREIGN_BLOCK,
    symptom="differs",
    kernel="attention",
    argument="block_tables",
    source="vllm#42971",
    plant=plant,
    twin=twin,
)
