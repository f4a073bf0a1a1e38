"""Pages are freed and given away between two replays of a graph that reads and writes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.base.tensor import DType
from hypocenter.device import copies, memory
from hypocenter.device.graph import Graphs
from hypocenter.doctor.causes import Cause


def give_away() -> Any:
    kept: list[Any] = []

    def after(runner: Any) -> None:
        if not kept and runner.route().num_graphs:
            pages = runner._decoder.pages.values[0]
            memory.free(pages)
            shape = (pages.num_elements // 2,)
            kept.append(memory.allocate("scratch", "lab", DType.F32, shape, device=pages.device))
        for scratch in kept:
            copies.to_device(scratch, np.ones(scratch.shape, np.float32))

    return after


def plant(lab: Lab) -> None:
    lab.simulate(graphs=True)
    lab.patch(Graphs, "refuse_free", lambda *given: None)
    lab.num_tokens = 5
    lab.after_step(give_away())


def twin(lab: Lab) -> None:
    lab.simulate(graphs=True)
    lab.num_tokens = 5


VICTIM = Victim(
    name="captured_pointer_freed",
    title="a graph goes on with pages that were freed after its capture",
    truth=Truth(causes=(Cause.CAPTURED_POINTER,), kernels=("rope_write",), arguments=("v_cache",)),
    symptom="differs",
    on_card=True,
    source="vllm#52540, trtllm#16176",
    hides=True,
    plant=plant,
    twin=twin,
)
