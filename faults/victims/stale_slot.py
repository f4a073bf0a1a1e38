"""A step writes its keys where the step before it wrote its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    seen: list[np.ndarray[Any, Any]] = []

    def of_the_step_before(batch: Any) -> np.ndarray[Any, Any]:
        seen.append(batch.slots)
        return seen[-2] if len(seen) > 2 else batch.slots

    lab.disarm()
    lab.change_batch(slots=of_the_step_before)


VICTIM = Victim(
    name="stale_slot",
    title="decode writes into the slot of the step before",
    truth=Truth(causes=(Cause.STALE_SLOT,), kernels=("rope_write",), arguments=("slots",)),
    symptom="differs",
    on_card=True,
    source="sglang#10892, vllm#18957",
    plant=plant,
    twin=Lab.disarm,
)
