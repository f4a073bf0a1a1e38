"""A slot that keeps a state for others is given to the next checkpoint all the same."""

from __future__ import annotations

from faults.lab import Lab
from faults.model import state_model_path
from faults.truth import Truth
from faults.victim import Victim
from faults.victims.state_not_restored import ENDING, PREFIX
from hypocenter.doctor.causes import Cause
from hypocenter.engine.state_slots import StateSlots


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
    # Which is wrong, the entry that gives the slot away or the one that reads it, a good run says.
    truth=Truth(
        causes=(Cause.FOREIGN_STATE,),
        kernels=("short_conv",),
        arguments=("checkpoint_slots", "state_sources"),
    ),
    symptom="differs",
    source="vllm#55600",
    plant=plant,
    twin=twin,
)
