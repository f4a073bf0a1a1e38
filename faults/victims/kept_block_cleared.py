"""A clean-up clears the blocks of a request that has ended, and the cache keeps them for others."""

from __future__ import annotations

from typing import Any

import numpy as np

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.device import copies, memory
from hypocenter.doctor.causes import Cause
from hypocenter.engine.step import Steps
from hypocenter.model.layers.step_buffers import KVPages

PREFIX = [72, 105, 300, 301, 9, 14, 33, 250, 17, 80, 91, 400, 12, 6, 77, 210]


def plant(lab: Lab) -> None:
    made: list[KVPages] = []

    def allocate(original: Any, cls: Any, *given: Any, **named: Any) -> KVPages:
        made.append(original(cls, *given, **named))
        return made[-1]

    def settle(original: Any, steps: Any, step: Any, outcomes: Any) -> None:
        original(steps, step, outcomes)
        if all(chunk.request.done for chunk in step.chunks):
            keys = memory.rows(made[-1].keys[0], 0, 1)
            copies.to_device(keys, np.zeros(keys.shape, np.uint16))

    twin(lab)
    lab.wrap(KVPages, "allocate", allocate)
    lab.wrap(Steps, "settle", settle)


def twin(lab: Lab) -> None:
    lab.config |= {"max_batch_tokens": 20, "block_size": 16}
    lab.warm_up = [[*PREFIX, 5]]
    lab.prompts = [[*PREFIX, 201, 8]]


VICTIM = Victim(
    name="kept_block_cleared",
    title="the blocks of a request that ended are cleared, though the cache keeps them",
    truth=Truth(causes=(Cause.KEPT_BLOCK_CHANGED,), kernels=("",)),
    symptom="differs",
    source="tt-xla#4190, kvcached#362",
    plant=plant,
    twin=twin,
)
