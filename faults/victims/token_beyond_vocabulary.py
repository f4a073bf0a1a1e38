"""A token id far behind the vocabulary."""

from __future__ import annotations

from faults.lab import Lab, alter
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(token_ids=lambda batch: alter(batch.token_ids, 0, 1_000_000))


VICTIM = Victim(
    name="token_beyond_vocabulary",
    title="token 1000000 of a vocabulary of 512",
    truth=Truth(causes=(Cause.TOKEN_RANGE,), kernels=("lookup_float",), arguments=("token_ids",)),
    symptom="crash",
    on_card=True,
    device="sim:rx7900xtx",
    source="sglang#27482",
    plant=plant,
    twin=Lab.disarm,
)
