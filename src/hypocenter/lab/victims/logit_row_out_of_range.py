"""The row whose logits are wanted is none of the step's."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(logit_rows=lambda batch: batch.logit_rows + 100_000)


VICTIM = Victim(
    name="logit_row_out_of_range",
    title="logits are wanted of row 100002 of 3",
    cause=Cause.INDEX_RANGE,
    symptom="crash",
    kernel="gather",
    argument="rows",
    device="sim:h200",
    source="vllm#52234",
    plant=plant,
    twin=Lab.disarm,
)
