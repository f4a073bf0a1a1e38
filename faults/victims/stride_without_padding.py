"""The stride of padded rows is taken for the width of their contents."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.edit(
        "rope_write_gpu",
        (
            "value_pitch=v_cache.shape[3],",
            "value_pitch=v_cache.shape[3], k_stride=num_kv_heads * head_dim,",
        ),
    )


VICTIM = Victim(
    name="stride_without_padding",
    title="rope_write steps over k by 32 columns where rows are 64 apart",
    truth=Truth(causes=(Cause.WRONG_STRIDE,), kernels=("rope_write",), arguments=("k", "k_stride")),
    symptom="differs",
    device="sim:h200",
    source="flash-attention#2666",
    plant=plant,
)
