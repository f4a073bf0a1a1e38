"""The first id behind the vocabulary: memory that is there, and wrong."""

from __future__ import annotations

from faults.lab import Lab, alter
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(token_ids=lambda batch: alter(batch.token_ids, 0, 512))


VICTIM = Victim(
    name="token_is_vocabulary_size",
    title="the sampler's id 512 of a vocabulary of 512 is fed back",
    truth=Truth(causes=(Cause.TOKEN_RANGE,), kernels=("lookup_float",), arguments=("token_ids",)),
    symptom="differs",
    on_card=True,
    source="vllm#50845",
    plant=plant,
    twin=Lab.disarm,
)
