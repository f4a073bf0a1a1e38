"""The id -1, which pads a batch, reaches the embedding."""

from __future__ import annotations

from faults.lab import Lab, alter
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(token_ids=lambda batch: alter(batch.token_ids, -1, -1))


VICTIM = Victim(
    name="padding_token",
    title="a padding id of -1 is looked up",
    truth=Truth(
        causes=(Cause.SENTINEL_CONSUMED,), kernels=("lookup_float",), arguments=("token_ids",)
    ),
    symptom="crash",
    # A row before the first has an offset below 0, which is 2 GiB and more without a sign. There
    # AMD's buffer ends, and its loads give 0.
    as_machine_code="differs",
    on_card=True,
    source="vllm#50021",
    plant=plant,
    twin=Lab.disarm,
)
