"""What a step reads that no plan makes: its inputs, the KV cache, states of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies
from hypocenter.device.inputs import Inputs
from hypocenter.device.lending import LentRoom, lend_room, room_bytes
from hypocenter.device.memory import allocate, allocate_blocks, allocate_transposed, as_blocks
from hypocenter.kernels.recurrent.sequences import Sequences
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.architecture import Architecture
from hypocenter.wire.messages import SharedPiece

#: Of each sequence, where layers carry a state.
_OF_STATES = ("state_slots", "state_sources", "checkpoint_slots", "checkpoint_stops")


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What changes from step to step, in static buffers of i32.

    token_ids, positions, slots, sequence_rows [max_tokens]; block_tables [max_sequences,
    max_blocks]; logit_rows [max_tokens]; counts: how many tokens and how many logit rows are live.
    state_slots, state_sources, checkpoint_slots and checkpoint_stops [max_sequences], and
    sequence_starts [max_sequences + 1], are there where layers carry a state
    (`kernels/recurrent/sequences.py`). last_seen and text_kinds [max_tokens] are there where a
    token sees those behind it: the position of the last one, and which of two texts it is of.
    hidden_rows [max_tokens], which row of `HiddenStates` stands for the token before, is there in a
    head that drafts. logit_sequences [max_tokens], the row of `block_tables` of each logit row, and
    adapter_scales f32 [max_sequences, num_adapters] are there where there are adapters. All but the
    last lie in `shared`, which fills them.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sequence_rows: Tensor
    logit_rows: Tensor
    counts: Tensor
    block_tables: Tensor
    shared: Inputs
    state_slots: Tensor | None = None
    state_sources: Tensor | None = None
    checkpoint_slots: Tensor | None = None
    checkpoint_stops: Tensor | None = None
    sequence_starts: Tensor | None = None
    last_seen: Tensor | None = None
    text_kinds: Tensor | None = None
    hidden_rows: Tensor | None = None
    logit_sequences: Tensor | None = None
    adapter_scales: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        max_tokens: int,
        max_sequences: int,
        max_blocks: int,
        *,
        device: str,
        has_states: bool = False,
        arch: Architecture | None = None,
        num_adapters: int = 0,
    ) -> StepInputs:
        each_token = ("token_ids", "positions", "slots", "sequence_rows", "logit_rows")
        shapes = {
            **dict.fromkeys(each_token, (max_tokens,)),
            "counts": (2,),
            **(dict.fromkeys(_OF_STATES, (max_sequences,)) if has_states else {}),
            **({"sequence_starts": (max_sequences + 1,)} if has_states else {}),
            **(
                dict.fromkeys(("last_seen", "text_kinds"), (max_tokens,))
                if arch and arch.family.sees_all
                else {}
            ),
            **({"hidden_rows": (max_tokens,)} if arch and arch.is_head else {}),
            **({"logit_sequences": (max_tokens,)} if num_adapters else {}),
            "block_tables": (max_sequences, max_blocks),
        }
        shared = Inputs("inputs", "step", shapes, device=device)
        scales = None
        if num_adapters:
            sizes = (max_sequences, num_adapters)
            scales = allocate("adapter_scales", "step", DType.F32, sizes, device=device)
        return cls(**shared.tensors, shared=shared, adapter_scales=scales)

    @property
    def sequences(self) -> Sequences:
        """Where the tokens and the state of each sequence are; they must be there."""
        given = {name: getattr(self, name) for name in Sequences.__slots__}
        assert None not in given.values(), given
        return Sequences(**given)


@dataclass(frozen=True, slots=True)
class KVPages:
    """The paged cache of layers with attention; layouts as in `kernels/attention/kv_write.py`.

    A layer that reads what another keeps has the pages of that one, and where texts are read in one
    step all have the same. `uses_hadamard`: what they hold went through `hadamard` first.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    uses_hadamard: bool = False

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
        cls,
        arch: Architecture,
        num_blocks: int,
        block_size: int,
        dtype: DType,
        *,
        device: str,
        room: LentRoom | None = None,
        uses_hadamard: bool = False,
    ) -> KVPages:
        """Zeroed pages, or such in `room`, which hold what they held. Raises ValueError where heads
        are no whole blocks of `dtype`."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for index in arch.attention_layers:
            shape = arch.layers[index]
            if index not in arch.layers_with_pages:
                source = 0
                if shape.kv_source is not None:
                    source = arch.attention_layers.index(shape.kv_source)
                keys.append(keys[source])
                values.append(values[source])
                continue
            heads, pitch = (num_blocks, shape.num_kv_heads), shape.value_pitch
            of_keys, of_values = (*heads, shape.head_dim, block_size), (*heads, block_size, pitch)
            keys.append(_pages(f"k_cache.{index}", dtype, of_keys, room or device, along=2))
            values.append(_pages(f"v_cache.{index}", dtype, of_values, room or device, along=3))
        return cls(tuple(keys), tuple(values), uses_hadamard)


def _pages(
    name: str, dtype: DType, shape: tuple[int, ...], device: str | LentRoom, along: int
) -> Tensor:
    """Keys or values of a layer, as `kernels/attention/kv_write.py` says; the columns of a head lie
    along axis `along`."""
    if isinstance(device, LentRoom):
        if not dtype.is_quantised:
            return device.take(name, "kv_cache", dtype, shape)
        sizes = (*shape[:along], dtype.num_bytes(shape[along]), *shape[along + 1 :])
        return as_blocks(device.take(name, "kv_cache", DType.U8, sizes), dtype, shape)
    if dtype.is_quantised:
        return allocate_blocks(name, "kv_cache", dtype, shape, along=along, device=device)
    if device != "cpu":
        return allocate(name, "kv_cache", dtype, shape, device=device)
    return allocate_transposed(name, "kv_cache", dtype, shape)


def lend_pages(
    arch: Architecture, num_blocks: int, block_size: int, dtype: DType, *, device: str
) -> SharedPiece:
    """Zeroed memory for `KVPages.allocate`, and a sum of each block. Raises NotShareable,
    OutOfMemory."""
    num_bytes = room_bytes(num_blocks * 8)
    for index in arch.layers_with_pages:
        shape = arch.layers[index]
        per_head = num_blocks * shape.num_kv_heads * block_size
        of_keys, of_values = per_head * shape.head_dim, per_head * shape.value_pitch
        num_bytes += sum(room_bytes(dtype.num_bytes(size)) for size in (of_keys, of_values))
    return lend_room(device, num_bytes, "shared KV cache (kv_cache)")


@dataclass(frozen=True, slots=True)
class StatePages:
    """What layers carry for each of `num_slots` sequences, by their index.

    convs f32 [num_slots, num_taps - 1, channels], and of delta nets and state spaces states f32
    [num_slots, num_heads, key_dim, value_dim]; the last axes padded to 64 (`kernels/recurrent/`).
    """

    convs: dict[int, Tensor]
    states: dict[int, Tensor]

    @classmethod
    def allocate(cls, arch: Architecture, num_slots: int, *, device: str) -> StatePages | None:
        """None for a model whose layers carry none."""
        recurrence = arch.recurrence
        if recurrence is None:
            return None

        def pages(kind: str) -> dict[int, Tensor]:
            if kind not in recurrence.shapes:
                return {}
            sizes = (num_slots, *recurrence.shapes[kind])
            return {
                layer: allocate(f"{kind}.{layer}", "states", DType.F32, sizes, device=device)
                for layer in arch.state_layers
            }

        return cls(pages("conv"), pages("state"))


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What a model leaves of tokens for the head that drafts for it: `table` f32 [num_rows, width
    padded to 64], behind the last norm.

    It has a row for each of `num_slots` slots of the model's KV cache. Behind these stand the rows
    that the head writes itself, whose numbers are `own_rows` i32, and one of zeros.
    """

    table: Tensor
    own_rows: Tensor
    num_slots: int

    @classmethod
    def allocate(
        cls, arch: Architecture, num_slots: int, num_own: int, *, device: str
    ) -> HiddenStates:
        shape = num_slots + num_own + 1, padded_rows(arch.width)
        table = allocate("hidden_states", "kv_cache", DType.F32, shape, device=device)
        own_rows = allocate("own_rows", "kv_cache", DType.I32, (num_own,), device=device)
        copies.to_device(own_rows, np.arange(num_slots, num_slots + num_own, dtype=np.int32))
        return cls(table, own_rows, num_slots)

    @property
    def zero_row(self) -> int:
        """The row of a token that has none before it."""
        return int(self.table.shape[0]) - 1

    @staticmethod
    def row_bytes(arch: Architecture) -> int:
        """What a token takes."""
        return 4 * padded_rows(arch.width)


@dataclass(frozen=True, slots=True)
class Cache:
    """What a model keeps of sequences between steps: pages, states if its layers have any, and what
    is left of tokens where a head drafts by it."""

    pages: KVPages
    states: StatePages | None = None
    hidden: HiddenStates | None = None
