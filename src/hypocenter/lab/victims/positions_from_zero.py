"""Decode takes every token for the first one of its text."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def from_zero(batch: Any) -> np.ndarray[Any, Any]:
    """Of decode steps alone: a prompt has the right ones."""
    return np.zeros_like(batch.positions) if len(batch.positions) == 1 else batch.positions


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.change_batch(positions=from_zero)


VICTIM = Victim(
    name="positions_from_zero",
    title="decode turns the key of every token as that of position 0",
    cause=Cause.WRONG_INPUT,
    symptom="differs",
    kernel="rope_write",
    argument="positions",
    source="mlx-vlm#1993",
    plant=plant,
    twin=Lab.disarm,
)
