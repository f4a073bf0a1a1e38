"""The pages of a layer are freed, and another tensor gets their memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.base.tensor import DType
from hypocenter.device import copies, memory
from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    def give_away(llm: Any) -> None:
        pages = llm.engine.runner._decoder.pages.values[0]
        memory.free(pages)
        shape = (pages.num_elements // 2,)
        scratch = memory.allocate("scratch", "lab", DType.F32, shape, device=lab.device)
        lab.after_step(lambda _: copies.to_device(scratch, np.ones(shape, np.float32)))

    lab.disarm()
    lab.after_load(give_away)


VICTIM = Victim(
    name="freed_pages_given_away",
    title="a layer's values lie in memory that is another tensor's by now",
    cause=Cause.USE_AFTER_FREE,
    symptom="differs",
    kernel="rope_write",
    argument="v_cache",
    device="sim:h200",
    source="vllm#44483",
    plant=plant,
    twin=Lab.disarm,
)
