"""A slot behind the last one of the cache."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(slots=lambda batch: batch.slots + 1_000_000)


VICTIM = Victim(
    name="slot_beyond_cache",
    title="slots were worked out for a cache a million tokens larger",
    cause=Cause.INDEX_RANGE,
    symptom="crash",
    kernel="rope_write",
    argument="slots",
    device="sim:h200",
    source="vllm#47056",
    plant=plant,
    twin=Lab.disarm,
)
