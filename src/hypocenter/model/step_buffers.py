"""What a step reads that no plan makes: its inputs, and the pages of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from hypocenter.device.inputs import Inputs
from hypocenter.device.memory import allocate, allocate_turned
from hypocenter.model.architecture import Architecture
from hypocenter.tensor import DType, Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What changes from step to step, in static buffers of i32.

    token_ids, positions, slots, sequence_rows [max_tokens]; block_tables [max_sequences,
    max_blocks]; logit_rows [max_tokens]; counts: how many tokens and how many logit rows are live.
    All lie in `shared`, which fills them.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sequence_rows: Tensor
    logit_rows: Tensor
    counts: Tensor
    block_tables: Tensor
    shared: Inputs

    @classmethod
    def allocate(
        cls, max_tokens: int, max_sequences: int, max_blocks: int, *, device: str
    ) -> StepInputs:
        each_token = ("token_ids", "positions", "slots", "sequence_rows", "logit_rows")
        shapes = {
            **dict.fromkeys(each_token, (max_tokens,)),
            "counts": (2,),
            "block_tables": (max_sequences, max_blocks),
        }
        shared = Inputs("inputs", "step", shapes, device=device)
        return cls(**shared.tensors, shared=shared)


@dataclass(frozen=True, slots=True)
class KVPages:
    """The paged cache of every layer; layouts as in `kernels/attention/kv_write.py`."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls, facts: Architecture, num_blocks: int, block_size: int, dtype: DType, *, device: str
    ) -> KVPages:
        heads, head_dim = facts.num_kv_heads, facts.head_dim
        key_shape = (num_blocks, heads, head_dim, block_size)
        value_shape = (num_blocks, heads, block_size, -(-head_dim // 16) * 16)

        # `kernels/attention/kv_write.py` says why.
        make = allocate_turned if device == "cpu" else partial(allocate, device=device)

        def pages(kind: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
            names = (f"{kind}_cache.{index}" for index in range(facts.num_layers))
            return tuple(make(name, "kv_cache", dtype, shape) for name in names)

        return cls(pages("k", key_shape), pages("v", value_shape))
