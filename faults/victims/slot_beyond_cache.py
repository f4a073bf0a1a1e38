"""A slot behind the last one of the cache."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(slots=lambda batch: batch.slots + 1_000_000)


VICTIM = Victim(
    name="slot_beyond_cache",
    title="slots were worked out for a cache a million tokens larger",
    truth=Truth(causes=(Cause.INDEX_RANGE,), kernels=("rope_write",), arguments=("slots",)),
    symptom="crash",
    on_card=True,
    device="sim:h200",
    source="vllm#47056",
    plant=plant,
    twin=Lab.disarm,
)
