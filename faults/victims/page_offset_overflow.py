"""The offset of a page far back in a large cache needs more than 32 bits."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from faults.victims.key_offset_overflow import far_blocks
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    far_blocks(lab)
    lab.edit(
        "attention_tile_gpu",
        (
            "as_offset(_page(table_ptr, key, last, BLOCK_SIZE), WIDE) * num_kv_heads",
            "_page(table_ptr, key, last, BLOCK_SIZE) * num_kv_heads",
        ),
    )


def twin(lab: Lab) -> None:
    far_blocks(lab)


VICTIM = Victim(
    name="page_offset_overflow",
    title="attention multiplies page and stride in 32 bits",
    truth=Truth(
        causes=(Cause.OFFSET_OVERFLOW,),
        kernels=("attention",),
        arguments=("v_cache", "k_cache"),
        lines=(
            "v_at = (page * BLOCK_SIZE + key % BLOCK_SIZE)[:, None] * value_pitch + d[None, :]",
            "at = (page[None, :] * HEAD_DIM + d[:, None]) * BLOCK_SIZE + within[None, :]",
        ),
    ),
    symptom="crash",
    device="sim:h200",
    source="vllm#47671, sglang#4727",
    plant=plant,
    twin=twin,
)
