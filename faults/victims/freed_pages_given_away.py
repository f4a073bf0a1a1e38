"""The pages of a layer are freed, and another tensor gets their memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.base.tensor import DType
from hypocenter.device import copies, memory
from hypocenter.doctor.causes import Cause


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
    truth=Truth(causes=(Cause.USE_AFTER_FREE,), kernels=("rope_write",), arguments=("v_cache",)),
    symptom="differs",
    device="sim:h200",
    source="vllm#44483",
    plant=plant,
    twin=Lab.disarm,
)
