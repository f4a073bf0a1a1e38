"""The offset of a key far back in a large cache needs more than 32 bits."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause
from hypocenter.engine.kv_cache import KVCache
from hypocenter.model.layers.step_buffers import KVPages

FAR = 4_400_000


def last_blocks(make: Any, cache: Any, *given: Any, **more: Any) -> None:
    make(cache, *given, **more)
    blocks: Any = {FAR + number: block for number, block in enumerate(cache._blocks)}
    cache._blocks, cache._blank = blocks, [FAR + number for number in cache._blank]


def far_blocks(lab: Lab) -> None:
    """More than 2**31 elements of cache, of which requests get the last blocks.

    It is not cleared, so that hardly a page of it is touched.
    """

    def huge(make: Any, cls: Any, facts: Any, num_blocks: int, *sizes: Any, **more: Any) -> Any:
        return make(cls, facts, FAR + num_blocks, *sizes, **more)

    lab.disarm()
    lab.leave_undefined(KVPages)
    lab.wrap(KVPages, "allocate", huge)
    lab.wrap(KVCache, "__init__", last_blocks)


def plant(lab: Lab) -> None:
    far_blocks(lab)
    lab.edit(
        "rope_write_gpu",
        (
            "slot = as_offset(tl.load(slots_ptr + token), WIDE)",
            "slot = tl.load(slots_ptr + token)",
        ),
    )


def twin(lab: Lab) -> None:
    far_blocks(lab)


VICTIM = Victim(
    name="key_offset_overflow",
    title="rope_write works out offsets in 32 bits, for a cache of 2.2e9 elements",
    truth=Truth(
        causes=(Cause.OFFSET_OVERFLOW,),
        kernels=("rope_write",),
        arguments=("k_cache", "v_cache"),
        # Offsets of keys and of values wrap, each in its own line.
        lines=(
            "return (page * head_dim + d) * block_size + slot % block_size",
            "return (page * block_size + slot % block_size) * value_pitch + d",
        ),
    ),
    symptom="crash",
    on_card=True,
    source="vllm#47671",
    plant=plant,
    twin=twin,
)
