"""The sampler takes the element behind the last logit for a logit."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

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
    cause=Cause.OFF_BY_ONE,
    symptom="none",
    kernel="greedy_blocks",
    argument="logits",
    line="live = token <= vocab_size",
    source="flashinfer#4237, vllm#50845",
    plant=plant,
)
