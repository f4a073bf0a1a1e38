"""The first id behind the vocabulary: memory that is there, and wrong."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab, alter
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(token_ids=lambda batch: alter(batch.token_ids, 0, 512))


VICTIM = Victim(
    name="token_is_vocabulary_size",
    title="the sampler's id 512 of a vocabulary of 512 is fed back",
    cause=Cause.TOKEN_RANGE,
    symptom="differs",
    kernel="lookup_float",
    argument="token_ids",
    source="vllm#50845",
    plant=plant,
    twin=Lab.disarm,
)
