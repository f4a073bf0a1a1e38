"""Warps of 32 lanes were counted, and the GPU's have 64."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause

OLD = "num_warps=warps_of_norm(plan, width),\n        BLOCK=triton.next_power_of_2(width),"


def plant(lab: Lab) -> None:
    lab.edit("norm_gpu", (OLD, OLD.replace("warps_of_norm(plan, width)", "32")))


VICTIM = Victim(
    name="too_many_threads",
    title="32 warps of 64 lanes are 2048 threads, and 1024 are allowed",
    truth=Truth(causes=(Cause.THREAD_LIMIT,), kernels=("rms_norm",), arguments=("num_warps",)),
    symptom="error",
    source="vllm#40827",
    plant=plant,
)
