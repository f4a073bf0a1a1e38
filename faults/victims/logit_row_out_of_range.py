"""The row whose logits are wanted is none of the step's."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(logit_rows=lambda batch: batch.logit_rows + 100_000)


VICTIM = Victim(
    name="logit_row_out_of_range",
    title="logits are wanted of row 100002 of 3",
    truth=Truth(causes=(Cause.INDEX_RANGE,), kernels=("gather",), arguments=("rows",)),
    symptom="crash",
    on_card=True,
    device="sim:h200",
    source="vllm#52234",
    plant=plant,
    twin=Lab.disarm,
)
