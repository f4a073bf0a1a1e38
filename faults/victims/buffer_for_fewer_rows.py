"""A buffer for two rows, with a view of four over it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.base.tensor import DType
from hypocenter.device import memory
from hypocenter.doctor.causes import Cause
from hypocenter.model.layers.activations import Activations


def short(make: Any, cls: Any, *given: Any, device: str) -> Any:
    buffers = make(cls, *given, device=device)
    small = memory.allocate("attended", "decoder", DType.F32, (2, 64), device=device)
    view = replace(buffers.attended, allocation=small.allocation, data=small.data)
    return replace(buffers, attended=view)


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.wrap(Activations, "allocate", short)


VICTIM = Victim(
    name="buffer_for_fewer_rows",
    title="attention writes rows 2 and 3 into whatever follows a buffer of two rows",
    truth=Truth(causes=(Cause.BUFFER_TOO_SMALL,), kernels=("attention",), arguments=("out",)),
    symptom="none",
    source="vllm#13693, trtllm#16290",
    plant=plant,
    twin=Lab.disarm,
)
