"""Weights of 0 times values that nobody has written: NaN."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause
from hypocenter.model.layers.step_buffers import KVPages

OLD = "v = tl.load(v_cache_ptr + v_at, mask=(key <= last)[:, None] & column[None, :], other=0.0)"
NEW = OLD.replace("key <=", "key // 16 * 16 <=")


def plant(lab: Lab) -> None:
    lab.leave_undefined(KVPages)
    lab.edit("attention_tile_gpu", (OLD, NEW))


def twin(lab: Lab) -> None:
    lab.leave_undefined(KVPages)


VICTIM = Victim(
    name="padding_times_zero",
    title="attention weighs unwritten values with 0",
    truth=Truth(
        causes=(Cause.NONFINITE_PADDING,),
        kernels=("attention",),
        arguments=("v_cache",),
        lines=(NEW,),
    ),
    symptom="nonfinite",
    source="vllm#641",
    plant=plant,
    twin=twin,
)
