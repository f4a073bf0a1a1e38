"""The sampler takes the element behind the last logit for a logit."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause

OLD = """    live = token < vocab_size
    value = tl.load(
        logits_ptr + as_offset(row, WIDE) * vocab_size + token, mask=live, other=-float("inf")
    )
    num_bad = tl.sum((live & ~(value < float("inf"))).to(tl.int32), axis=0)
    _store_best"""


def plant(lab: Lab) -> None:
    lab.edit("sampling_gpu", (OLD, OLD.replace("token < vocab_size", "token <= vocab_size")))


VICTIM = Victim(
    name="sampler_reads_one_more",
    title="greedy choice looks at 513 logits of 512",
    truth=Truth(
        causes=(Cause.OFF_BY_ONE,),
        kernels=("greedy_blocks",),
        arguments=("logits",),
        lines=("live = token <= vocab_size",),
    ),
    symptom="none",
    source="flashinfer#4237, vllm#50845",
    plant=plant,
)
