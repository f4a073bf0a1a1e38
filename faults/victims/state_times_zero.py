"""A state is begun by weighing what the slot's last request left with 0: NaN stays NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from faults.lab import Lab
from faults.model import state_model_path
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.device import copies, memory
from hypocenter.doctor.causes import Cause
from hypocenter.engine.state_slots import StateSlots
from hypocenter.model.layers.step_buffers import StatePages

OLD = "state = tl.load(state_at + source, mask=live & goes_on, other=0.0)"
NEW = "state = tl.load(state_at + source, mask=live, other=0.0) * goes_on"


def plant(lab: Lab) -> None:
    twin(lab)
    lab.edit("delta_rule_gpu", (OLD, NEW))


def twin(lab: Lab) -> None:
    """What is given back is spoilt, so that nobody goes on from it unseen."""
    made: list[StatePages] = []

    def allocate(original: Any, cls: Any, *given: Any, **named: Any) -> StatePages:
        made.append(original(cls, *given, **named))
        return made[-1]

    def give_back(original: Any, states: Any, request_id: int, **named: Any) -> None:
        slot = states.slot_of(request_id)
        original(states, request_id, **named)
        for page in (*made[-1].convs.values(), *made[-1].states.values()):
            left = memory.rows(page, slot, slot + 1)
            copies.to_device(left, np.full(left.shape, np.nan, np.float32))

    lab.model = state_model_path()
    lab.warm_up = [[72, 105]]
    lab.wrap(StatePages, "allocate", allocate)
    lab.wrap(StateSlots, "give_back", give_back)


VICTIM = Victim(
    name="state_times_zero",
    title="a request begins with 0 times the NaN that the last one's slot holds",
    truth=Truth(
        causes=(Cause.NONFINITE_PADDING,),
        kernels=("delta_rule",),
        arguments=("state",),
        lines=(NEW,),
    ),
    symptom="nonfinite",
    source="TensorRT-LLM#14509, vllm#56524",
    plant=plant,
    twin=twin,
)
