"""One pinned buffer for two copies: the second fills it before the first has read it."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.device import copies, memory
from hypocenter.doctor.causes import Cause

COPIED = ("token_ids", "positions")


def through_pinned(*, shares: bool) -> Any:
    buffers: dict[str, Any] = {}

    def copy(original: Any, tensor: Any, values: Any, **keywords: Any) -> None:
        if tensor.name not in COPIED:
            original(tensor, values, **keywords)
            return
        key = "ids and positions" if shares else f"{tensor.name} alone"
        if key not in buffers:
            buffers[key] = memory.allocate_pinned(
                key, "staging", tensor.dtype, tensor.shape, device=tensor.device
            )
        copies.fill_pinned(buffers[key], values)
        copies.copy_in_pinned(tensor, buffers[key])

    return copy


def plant(lab: Lab) -> None:
    lab.disarm()
    for name in COPIED:
        lab.set_apart(name)
    lab.wrap(copies, "to_device", through_pinned(shares=True))


def twin(lab: Lab) -> None:
    lab.disarm()
    for name in COPIED:
        lab.set_apart(name)
    lab.wrap(copies, "to_device", through_pinned(shares=False))


VICTIM = Victim(
    name="pinned_rewritten",
    title="positions are put into the pinned buffer that token ids are still copied from",
    truth=Truth(
        causes=(Cause.REWRITTEN_IN_FLIGHT,), kernels=("lookup_float",), arguments=("token_ids",)
    ),
    symptom="differs",
    source="Megatron-LM#5715, vllm#24527",
    plant=plant,
    twin=twin,
)
