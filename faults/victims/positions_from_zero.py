"""Decode takes every token for the first one of its text."""

from __future__ import annotations

from typing import Any

import numpy as np

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def from_zero(batch: Any) -> np.ndarray[Any, Any]:
    """Of decode steps alone: a prompt has the right ones."""
    return np.zeros_like(batch.positions) if len(batch.positions) == 1 else batch.positions


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(positions=from_zero)


VICTIM = Victim(
    name="positions_from_zero",
    title="decode turns the key of every token as that of position 0",
    truth=Truth(causes=(Cause.WRONG_INPUT,), kernels=("rope_write",), arguments=("positions",)),
    symptom="differs",
    source="mlx-vlm#1993",
    plant=plant,
    twin=Lab.disarm,
)
