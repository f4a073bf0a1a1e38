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
    """The paged cache of every layer; layouts as in `kernels/attention/kv_write.py`.

    A layer that reads what another keeps has the pages of that one.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def each(self) -> tuple[Tensor, ...]:
        """All pages, those that several layers read once."""
        return tuple({id(tensor): tensor for tensor in (*self.keys, *self.values)}.values())

    @property
    def kinds(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys and values of one layer for each shape that there is."""
        pairs = zip(self.keys, self.values, strict=True)
        return tuple({pair[0].shape: pair for pair in pairs}.values())

    @classmethod
    def allocate(
        cls, facts: Architecture, num_blocks: int, block_size: int, dtype: DType, *, device: str
    ) -> KVPages:
        # `kernels/attention/kv_write.py` says why.
        make = allocate_turned if device == "cpu" else partial(allocate, device=device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for index, shape in enumerate(facts.layers):
            if shape.kv_source is not None:
                keys.append(keys[shape.kv_source])
                values.append(values[shape.kv_source])
                continue
            heads, pitch = (num_blocks, shape.num_kv_heads), shape.value_pitch
            of_keys, of_values = (*heads, shape.head_dim, block_size), (*heads, block_size, pitch)
            keys.append(make(f"k_cache.{index}", "kv_cache", dtype, of_keys))
            values.append(make(f"v_cache.{index}", "kv_cache", dtype, of_values))
        return cls(tuple(keys), tuple(values))
