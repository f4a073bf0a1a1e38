"""A weight is freed while plans still point to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypocenter.device import memory
from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

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
    cause=Cause.USE_AFTER_FREE,
    symptom="nonfinite",
    kernel="rms_norm",
    argument="weight",
    source="vllm#44395",
    plant=plant,
    twin=Lab.disarm,
)
