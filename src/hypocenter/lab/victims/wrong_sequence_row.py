"""All tokens of a batch say that they belong to its first request."""

from __future__ import annotations

import numpy as np

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


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
    cause=Cause.FOREIGN_BLOCK,
    symptom="differs",
    kernel="attention",
    argument="sequence_rows",
    device="sim:h200",
    source="sglang#18803",
    plant=plant,
    twin=twin,
)
