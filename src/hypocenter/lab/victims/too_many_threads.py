"""Warps of 32 lanes were counted, and the GPU's have 64."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

OLD = "num_warps=warps_of_norm(plan, width),\n        BLOCK=triton.next_power_of_2(width),"


def plant(lab: Lab) -> None:
    lab.edit("norm_gpu", (OLD, OLD.replace("warps_of_norm(plan, width)", "32")))


VICTIM = Victim(
    name="too_many_threads",
    title="32 warps of 64 lanes are 2048 threads, and 1024 are allowed",
    cause=Cause.THREAD_LIMIT,
    symptom="error",
    kernel="rms_norm",
    argument="num_warps",
    source="vllm#40827",
    plant=plant,
)
