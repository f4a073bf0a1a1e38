"""Token ids are copied in a stream of their own, and nobody waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.base.tensor import DType
from hypocenter.device import copies, devices, memory
from hypocenter.doctor.causes import Cause


def in_its_own_stream(*, waits: bool) -> Any:
    kept: list[Any] = []

    def copy(original: Any, tensor: Any, values: Any, **keywords: Any) -> None:
        if tensor.name != "token_ids":
            original(tensor, values, **keywords)
            return
        device, zeros = tensor.device, np.zeros(64, np.float32)
        if not kept:
            kept.append(memory.allocate("prefetched", "lab", DType.F32, (64,), device=device))
        with devices.stream(device, "copies"):
            for _ in range(40):  # the stream has other work before
                original(kept[0], zeros)
            original(tensor, values)
            event = devices.record_event(device)
        if waits:
            devices.wait_event(device, event)

    return copy


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.set_apart("token_ids")
    lab.wrap(copies, "to_device", in_its_own_stream(waits=False))


def twin(lab: Lab) -> None:
    lab.disarm()
    lab.set_apart("token_ids")
    lab.wrap(copies, "to_device", in_its_own_stream(waits=True))


VICTIM = Victim(
    name="missing_wait",
    title="lookup runs before the copy of its token ids, in another stream, has",
    truth=Truth(causes=(Cause.MISSING_WAIT,), kernels=("lookup_float",), arguments=("token_ids",)),
    symptom="differs",
    device="sim:h200",
    hides=True,
    source="club-3090#1061, vllm#36013",
    plant=plant,
    twin=twin,
)
