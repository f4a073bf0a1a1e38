"""A token id far behind the vocabulary."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab, alter
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(token_ids=lambda batch: alter(batch.token_ids, 0, 1_000_000))


VICTIM = Victim(
    name="token_beyond_vocabulary",
    title="token 1000000 of a vocabulary of 512",
    cause=Cause.TOKEN_RANGE,
    symptom="crash",
    kernel="lookup_float",
    argument="token_ids",
    device="sim:rx7900xtx",
    source="sglang#27482",
    plant=plant,
    twin=Lab.disarm,
)
