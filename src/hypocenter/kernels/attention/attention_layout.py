"""How attention on the CPU cuts its work: keys of a tile, heads of a block, what a tile leaves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hypocenter.device.cpu.target import cpu_features

#: Lanes of a vector.
_LANES = 16
#: Keys of a tile; the bits of results depend on it. Larger tiles are folded less often, smaller
#: ones give more threads something to do where tokens are few.
KEYS = 512
# As many sums (heads x vectors) as hide the latency of a multiply-add and fit the registers.
WIDE = "avx512f" in cpu_features()
VECTORS = 2 if WIDE else 1
VECTORS_OF_ONE_HEAD = 4


def heads_per_block(group: int) -> int:
    """The block, of those that there are, that a group fills best; the larger if alike."""
    if group == 1:
        return 1
    return 8 if WIDE and -group % 8 == -group % 4 else 4


def value_width(heads: int) -> int:
    """Values of a head that are summed at once: rows of results are padded to it."""
    return _LANES * (VECTORS_OF_ONE_HEAD if heads == 1 else VECTORS)


#: So many pairs of a token and a KV head, and more, are not cut any further.
MANY_PAIRS = 16
#: In place of room for codes, scales, sums and weighted sums: none are made.
NO_CODES = {
    "codes": np.zeros((0, 0, 1, 8), np.int32),
    "scales": np.zeros((0, 0, 1), np.float32),
    "sums": np.zeros((0, 0, 3, 1), np.int32),
    "weighted": np.zeros((0, 0, 3, 1), np.float32),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """What a pair of a token and a KV head leaves: f32 [heads, pitch + 16], a row as in `tile`.

    `heads_per_block`: those that `tile` takes at once. Heads are padded to whole blocks with heads
    of q = 0.
    """

    heads_per_block: int
    num_padded: int
    pitch: int

    @classmethod
    def of(cls, group: int, value_pitch: int) -> Layout:
        """The tiles for `group` query heads to a KV head whose values have rows of
        `value_pitch`."""
        heads = heads_per_block(group)
        width = value_width(heads)
        return cls(heads, -(-group // heads) * heads, -(-value_pitch // width) * width)

    @property
    def size(self) -> int:
        return self.num_padded * (self.pitch + _LANES)

    @property
    def arguments(self) -> dict[str, int]:
        """The arguments as contracts and kernels name them."""
        return {"heads": self.heads_per_block, "pitch": self.pitch, "size": self.size}


def num_part_floats(
    max_tokens: int, num_heads: int, num_kv_heads: int, value_pitch: int, max_context: int
) -> int:
    """The room that `parts` has to have for every tile of every pair, where pairs are few."""
    num_tiles = -(-max_context // KEYS)
    num_tokens = min(max_tokens, (MANY_PAIRS - 1) // num_kv_heads) if num_tiles > 1 else 0
    size = Layout.of(num_heads // num_kv_heads, value_pitch).size
    return num_tokens * num_kv_heads * num_tiles * size
