"""Parts of a model that several GPUs hold together.

Heads and the inner columns of a feed-forward are split (Shoeybi et al., 2019, Megatron-LM): what
makes them is cut by rows, what reads them by columns. So each part gives a sum of its own, and the
sums of all are added up. Where there are more parts than heads of keys and values, several parts
have the same one. The vocabulary is split where it has equal parts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Part `rank` of `num_parts`; the first one has the rank 0."""

    rank: int = 0
    num_parts: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share_of(self, num_tokens: int) -> int:
        """The tokens of a vocabulary that this part makes logits of: all without equal parts."""
        share, rest = divmod(num_tokens, self.num_parts)
        return num_tokens if rest else share


#: A model that one process has for itself.
WHOLE = Part()
