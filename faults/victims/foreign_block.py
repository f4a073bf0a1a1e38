"""The second request's table names the first one's block."""

from __future__ import annotations

import numpy as np

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


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
    truth=Truth(causes=(Cause.FOREIGN_BLOCK,), kernels=("attention",), arguments=("block_tables",)),
    symptom="differs",
    on_card=True,
    source="vllm#42971",
    plant=plant,
    twin=twin,
)
