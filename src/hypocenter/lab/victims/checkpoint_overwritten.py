"""A slot that keeps a state for others is given to the next checkpoint all the same."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.engine.state_slots import StateSlots
from hypocenter.lab.lab import Lab
from hypocenter.lab.model import state_model_path
from hypocenter.lab.victim import Victim
from hypocenter.lab.victims.state_not_restored import ENDING, PREFIX


def plant(lab: Lab) -> None:
    twin(lab)
    lab.patch(StateSlots, "_blank_slot", lambda states, *_: states.num_running)


def twin(lab: Lab) -> None:
    lab.disarm()
    lab.model = state_model_path()
    lab.config |= {"max_batch_tokens": 32, "block_size": 16, "state_checkpoints": 2}
    lab.warm_up = [[*PREFIX, *ENDING], [*PREFIX[::-1], *ENDING]]
    lab.prompts = [[*PREFIX, 201, 8]]


VICTIM = Victim(
    name="checkpoint_overwritten",
    title="a request begins with the checkpoint of another one",
    cause=Cause.FOREIGN_STATE,
    symptom="differs",
    kernel="short_conv",
    # Which is wrong, the entry that gives the slot away or the one that reads it, a good run says.
    argument="checkpoint_slots",
    also=("state_sources",),
    source="vllm#55600",
    plant=plant,
    twin=twin,
)
