"""All that the choice of one token depends on besides its logits, and its random number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hypocenter.config import SamplingParams

Ids = npt.NDArray[np.int32]
Biases = npt.NDArray[np.float64]


def _no_ids() -> Ids:
    return np.zeros(0, np.int32)


def _no_biases() -> Biases:
    return np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class TokenChoice:
    """All that the choice of one token depends on, besides its logits.

    `position` is the absolute position that the chosen token will have. `context_ids` [n] are the
    distinct tokens of prompt and output, `output_counts` [n] how often each stands in the output;
    both may stay empty where `has_penalties(params)` is false. `mask` i32 [num_words] has a bit for
    each token that may be chosen (token t is bit t % 32 of word t // 32); without it all may.
    `biases` f64 [m], finite, are added to the logits of the distinct tokens `bias_ids` [m].
    """

    params: SamplingParams
    position: int
    context_ids: Ids = field(default_factory=_no_ids)
    output_counts: Ids = field(default_factory=_no_ids)
    mask: Ids | None = None
    bias_ids: Ids = field(default_factory=_no_ids)
    biases: Biases = field(default_factory=_no_biases)

    @property
    def random_number(self) -> float:
        """The number in [0, 1) that chooses among the tokens."""
        return uniform(self.params.seed or 0, self.position)


def has_penalties(params: SamplingParams) -> bool:
    """Whether the choice of a token depends on the tokens before it, beyond their logits."""
    return (
        params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    )


def masks_of(draws: Sequence[TokenChoice], vocab_size: int) -> Ids | None:
    """The masks of several draws, i32 [num_draws, num_words]; None where all tokens are free."""
    if all(draw.mask is None for draw in draws):
        return None
    masks = np.full((len(draws), num_mask_words(vocab_size)), -1, np.int32)
    for row, draw in enumerate(draws):
        if draw.mask is not None:
            masks[row] = draw.mask
    return masks


def mask_of(is_allowed: npt.NDArray[np.bool_]) -> Ids:
    """The mask of the tokens that are true in bool [vocab_size]; bits beyond these are not set."""
    bits = np.zeros(num_mask_words(is_allowed.size) * 32, np.bool_)
    bits[: is_allowed.size] = is_allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position, with 53 bits: no state, so no order matters."""
    counter = (position & _WORD, position >> 32 & _WORD, 0, 0)
    words = philox4x32(counter, (seed & _WORD, seed >> 32 & _WORD))
    return (words[0] << 21 | words[1] >> 11) * 2.0**-53


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words from a counter and a key.

    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011), section 4.3;
    the constants are those of its reference library Random123.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


_WORD = 0xFFFFFFFF


def settings_of(draw: TokenChoice) -> tuple[float, ...]:
    """A draw as the columns that the kernel's `settings` has: those of its params, and a number."""
    return (*columns_of(draw.params), draw.random_number if draw.params.temperature else 0.0)


def columns_of(params: SamplingParams) -> tuple[float, ...]:
    """The columns of the kernel's `settings` that stay the same from token to token."""
    return (
        params.repeat_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
    )
