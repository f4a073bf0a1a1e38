"""All tokens of a batch say that they belong to its first request."""

from __future__ import annotations

import numpy as np

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.run_two_requests()
    lab.change_batch(sequence_rows=lambda batch: np.zeros_like(batch.sequence_rows))


def twin(lab: Lab) -> None:
    lab.disarm()
    lab.run_two_requests()


VICTIM = Victim(
    name="wrong_sequence_row",
    title="sequence_rows sends every token to row 0 of the block tables",
    truth=Truth(
        causes=(Cause.FOREIGN_BLOCK,), kernels=("attention",), arguments=("sequence_rows",)
    ),
    symptom="differs",
    device="sim:h200",
    source="sglang#18803",
    plant=plant,
    twin=twin,
)
