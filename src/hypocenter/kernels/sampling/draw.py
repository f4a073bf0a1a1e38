"""All that the choice of one token depends on besides its logits, and its random number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hypocenter.contracts.draws import uniform
from hypocenter.settings.config import SamplingParams

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
