"""A weight is freed while plans still point to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.device import memory
from hypocenter.doctor.causes import Cause

if TYPE_CHECKING:
    from hypocenter.engine.llm import LLM


def plant(lab: Lab) -> None:
    lab.after_load(_free_norm)
    lab.disarm()


def _free_norm(llm: LLM) -> None:
    norm = llm.engine.runner.weights.layers[1].ffn_norm
    assert norm is not None
    memory.free(norm)


VICTIM = Victim(
    name="freed_weight",
    title="the norm of a layer is freed after loading",
    truth=Truth(causes=(Cause.USE_AFTER_FREE,), kernels=("rms_norm",), arguments=("weight",)),
    symptom="nonfinite",
    on_card=True,
    source="vllm#44395",
    plant=plant,
    twin=Lab.disarm,
)
