"""A request adopts the blocks of a beginning, and reads the state that its slot was left with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from faults.lab import Lab
from faults.model import state_model_path
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause

#: A block, and as many tokens as may open an answer.
PREFIX = [72, 105, 300, 301, 9, 14, 33, 250, 17, 80, 91, 400, 12, 6, 77, 210]
ENDING = [5, 8, 201, 44, 61, 300, 7, 19, 30]


def plant(lab: Lab) -> None:
    def from_own_slots(batch: Any) -> Any:
        return replace(batch.states, sources=batch.states.slots)

    twin(lab)
    lab.change_batch(states=from_own_slots)


def twin(lab: Lab) -> None:
    lab.disarm()
    lab.model = state_model_path()
    lab.config |= {"max_batch_tokens": 32, "block_size": 16, "state_checkpoints": 2}
    lab.warm_up = [[*PREFIX, *ENDING]]
    lab.prompts = [[*PREFIX, 201, 8]]


VICTIM = Victim(
    name="state_not_restored",
    title="a slot is handed over with the state of its last request",
    truth=Truth(
        causes=(Cause.FOREIGN_STATE,), kernels=("short_conv",), arguments=("state_sources",)
    ),
    symptom="differs",
    source="tpu-inference#3412, sglang#24717",
    plant=plant,
    twin=twin,
)
