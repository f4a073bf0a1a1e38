"""The id -1, which pads a batch, reaches the embedding."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab, alter
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(token_ids=lambda batch: alter(batch.token_ids, -1, -1))


VICTIM = Victim(
    name="padding_token",
    title="a padding id of -1 is looked up",
    cause=Cause.SENTINEL_CONSUMED,
    symptom="crash",
    kernel="lookup_float",
    argument="token_ids",
    source="vllm#50021",
    plant=plant,
    twin=Lab.disarm,
)
