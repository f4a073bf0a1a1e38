"""Positions in elements of 2 bytes, read as 4-byte integers: the case that began it all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.memory import allocate
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    def narrow(max_tokens: int, device: str) -> Tensor:
        positions = allocate("positions", "step", DType.I16, (max_tokens,), device=device)
        # A pointer of C has no type: the kernel takes it for one of 4-byte integers.
        wide = lab.backend.argument(positions.address, DType.I32, max_tokens // 2)
        return replace(positions, data=wide)

    lab.disarm()
    lab.set_apart("positions", narrow)
    lab.before_step(lambda _, batch: replace(batch, positions=batch.positions.astype(np.int16)))


VICTIM = Victim(
    name="positions_of_two_bytes",
    title="the position buffer holds 2-byte elements, rope_write reads 4-byte integers",
    truth=Truth(
        causes=(Cause.DTYPE_WIDTH,),
        kernels=("rope_write",),
        arguments=("positions",),
        lines=("position = as_offset(tl.load(positions_ptr + token), WIDE)",),
    ),
    symptom="crash",
    on_card=True,
    plant=plant,
    twin=Lab.disarm,
    source="GRETA CORE; vllm#55147",
)
