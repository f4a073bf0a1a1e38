"""Log probabilities of the tokens of one place, from its raw logits; chooses no token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hypocenter.base.errors import BadLogits
from hypocenter.base.results import TokenLogprob, TopLogprob
from hypocenter.kernels.sampling.sampling import Logits


def token_logprob(
    logits: Logits, token_id: int, num_top: int, piece: Callable[[int], bytes], *, row: int = 0
) -> TokenLogprob:
    """What the token `token_id` and the `num_top` likeliest ones have in logits f32 [vocab_size].

    log-softmax in float64: l - log(sum(exp(l))). Of tokens with the same logit the lower id comes
    first. `piece` gives the bytes of a token. Raises BadLogits, with `row`, where NaN or +inf among
    the logits leaves no distribution.
    """
    values = logits.astype(np.float64)
    highest = values.max()
    if not np.isfinite(highest):
        num_bad = int(np.count_nonzero(np.isnan(values) | (values == np.inf)))
        raise BadLogits(row, num_bad, len(values))
    log_total = highest + np.log(np.exp(values - highest).sum())

    def logprob(index: int) -> float:
        return float(values[index] - log_total)

    top = tuple(
        TopLogprob(likely_id, piece(likely_id), logprob(likely_id))
        for likely_id in likeliest(logits, num_top)
    )
    return TokenLogprob(token_id, piece(token_id), logprob(token_id), top)


def likeliest(logits: Logits, num_top: int) -> list[int]:
    """The ids of the `num_top` highest logits, falling, ties in rising id; of all when they are
    fewer."""
    num_top = min(num_top, len(logits))
    if not num_top:
        return []
    cutoff = np.partition(logits, -num_top)[-num_top]
    candidates = np.flatnonzero(logits >= cutoff)  # a few more where several are equal
    falling = np.argsort(-logits[candidates], kind="stable")
    return [int(token_id) for token_id in candidates[falling][:num_top]]
