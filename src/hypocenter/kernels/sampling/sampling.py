"""Choosing the next token: formula, plain reference and public op.

Holds no engine: who asks for a token, and what becomes of it, is decided in `engine/`.

The order of the filters is that of llama.cpp (`common_params_sampling::samplers`):

    mask -> bias -> penalties -> top_k -> top_p -> min_p -> temperature -> draw

0. mask: where a draw has one, every token that it leaves out counts as -inf.
1. bias: l + b for each token that has a bias b (llama.cpp `llama_sampler_logit_bias_apply`).
2. penalties, on the logit l of each token that stands in the context:
   repeat_penalty r over the whole context, prompt and output: l <= 0 ? l * r : l / r, once per
   token however often it occurs (llama.cpp `llama_sampler_penalties_apply`, but without a window);
   presence p and frequency f over the n occurrences in the output only, as OpenAI's API and vLLM
   have it (llama.cpp counts the prompt too): l - (n * f + p), for n > 0.
3. top_k: the k most likely tokens stay.
4. top_p: of these, the shortest prefix in falling probability that holds at least p of their mass.
5. min_p: of these, the tokens at least min_p times as likely as the most likely token.
6. temperature t: the weights are exp((l - max) / t). t = 0 takes the most likely token.
7. draw: the first token, in rising id, whose cumulated weight exceeds uniform * total.

Each filter keeps a prefix of the tokens in falling logit, ties in rising id; so its outcome is a
single cutoff (value, id), and only what lies before the cutoff is ever sorted.

Everything runs in float64, added up in rising id (in step 4: along the prefix), with an exp of our
own, so that the reference and the compiled kernel choose the same token bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hypocenter.base.dtypes import Float64s
from hypocenter.base.errors import BadLogits, LaunchRejected
from hypocenter.base.refusals import EntryOutOfRange, Refused
from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Rule, Scalar
from hypocenter.device import launch, memory
from hypocenter.device.cpu.kernel_forms import named_kernel
from hypocenter.kernels.sampling.draw import (
    Ids,
    TokenChoice,
    has_penalties,
    masks_of,
    num_mask_words,
    settings_of,
)
from hypocenter.kernels.sampling.exponential import (
    EXP_COEFFICIENTS,
    EXP_LOWEST,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    POWERS_OF_TWO,
)
from hypocenter.settings.config import SamplingParams

if TYPE_CHECKING:
    from hypocenter.kernels.sampling.sampling_plan import DeviceSampler

_MIN_PARALLEL_ROWS = 4
_SAMPLE = "kernels.sampling.sampling_cpu._sample_cpu"

CONTRACT = Contract(
    "sampling",
    Arg("logits", (DType.F32,), "num_rows, vocab_size"),
    Scalar("num_draws"),
    Rule("num_draws == num_rows", "each row of logits takes one draw"),
    Rule("0 < vocab_size <= 1 << 21", "a vocabulary has 1 to 2097152 tokens"),
)

Logits = npt.NDArray[np.float32]


def sample(
    logits: Tensor, draws: Sequence[TokenChoice], sampler: DeviceSampler | HostSampler | None = None
) -> list[int | BadLogits]:
    """Choose one token for each row of `logits` f32 [num_rows, vocab_size], deterministically.

    Where the logits lie on a GPU it chooses, in the buffers of `sampler` or in some of its own,
    and only ids and counts come back. Its sums run in another order than the reference's: a token
    differs only where the random number or top_p lies within 2**-40 of a boundary, relative to the
    total weight. A row with NaN or +inf, or of whose tokens all that may be chosen have -inf,
    yields a BadLogits in its place and leaves the other rows alone. Raises LaunchRejected where the
    arguments do not fit each other.
    """
    if sampler is not None:
        return sample_later(logits, draws, sampler)()
    if logits.device == "cpu" or not draws:
        return sample_later(logits, draws, HostSampler())()
    from hypocenter.kernels.sampling.sampling_plan import DeviceSampler  # needs Triton

    sampler = DeviceSampler(logits.device, logits.shape[1], logits.shape[0])
    try:
        return sample_later(logits, draws, sampler)()
    finally:
        sampler.free()


class HostSampler:
    """Draws on the host. What that needs is kept for the next logits that lie in the same place.

    Not safe from two threads.
    """

    def __init__(self) -> None:
        self._kept: launch.Launch | None = None

    def sample(
        self, logits: Tensor, draws: Sequence[TokenChoice]
    ) -> Callable[[], list[tuple[int, int]]]:
        """Does what `DeviceSampler.sample` does; nothing is left to wait for."""
        if any(
            draw.context_ids.size or draw.bias_ids.size or draw.mask is not None for draw in draws
        ):
            prepared = _prepare(logits, draws)
        else:
            prepared = self._of_params_alone(logits, draws)
        launch.run([prepared])
        *_, chosen, num_bad = prepared.args
        found = [(int(id), int(bad)) for id, bad in zip(chosen, num_bad, strict=True)]
        return lambda: found

    def _of_params_alone(self, logits: Tensor, draws: Sequence[TokenChoice]) -> launch.Launch:
        kept = self._kept
        if kept is None or kept.given[0] is not logits or len(draws) != logits.shape[0]:
            kept = self._kept = _prepare(logits, draws)
        kept.args[1][:] = [settings_of(draw) for draw in draws]
        return kept


def sample_later(
    logits: Tensor, draws: Sequence[TokenChoice], sampler: DeviceSampler | HostSampler
) -> Callable[[], list[int | BadLogits]]:
    """`sample` without the wait for a GPU: what is returned waits."""
    _check(logits, draws)
    if not draws:
        return list
    vocab_size = logits.shape[1]

    def outcomes(found: Iterable[tuple[int, int]]) -> list[int | BadLogits]:
        return [_as_outcome(*pair, row, vocab_size) for row, pair in enumerate(found)]

    if logits.device != "cpu":
        CONTRACT.check(logits=logits, num_draws=len(draws))
    waited = sampler.sample(logits, draws)
    return lambda: outcomes(waited())


def launches_of(logits: Tensor) -> list[launch.Launch]:
    """What `sample` runs on rows of `logits` f32 [num_rows, vocab_size], to be compiled before."""
    draw = TokenChoice(SamplingParams(), 0)
    sizes = {1, min(logits.shape[0], _MIN_PARALLEL_ROWS)}
    return [_prepare(memory.rows(logits, 0, size), [draw] * size) for size in sizes]


def sample_reference(logits: Logits, draws: Sequence[TokenChoice]) -> list[int | BadLogits]:
    """`sample` in plain numpy: sorts everything, saves nothing, and is easy to read."""
    return [
        _as_outcome(*_choose_reference(logits[row], draw), row, logits.shape[1])
        for row, draw in enumerate(draws)
    ]


def _check(logits: Tensor, draws: Sequence[TokenChoice]) -> None:
    vocab_size = logits.shape[-1]
    for row, draw in enumerate(draws):
        _check_ids(row, "context_ids", draw.context_ids, draw.output_counts, "counts", vocab_size)
        _check_ids(row, "bias_ids", draw.bias_ids, draw.biases, "biases", vocab_size)
        num_words = num_mask_words(vocab_size)
        if draw.mask is not None and draw.mask.shape != (num_words,):
            wrong_mask = f"row {row}: the mask has {draw.mask.size} words, not {num_words}"
            raise LaunchRejected("sampling", Refused(what=wrong_mask))


def _check_ids(
    row: int, name: str, ids: Ids, values: npt.NDArray[Any], of_values: str, vocab_size: int
) -> None:
    """Raises LaunchRejected for ids outside the vocabulary, and where each has not one value."""
    if ids.shape != values.shape:
        what = name.replace("_", " ")
        differ = Refused(what=f"row {row}: {ids.size} {what}, but {values.size} {of_values}")
        raise LaunchRejected("sampling", differ)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        outside = EntryOutOfRange(
            argument=name,
            entry=(row, wrong),
            value=int(ids[wrong]),
            of="the vocabulary",
            bound=vocab_size,
        )
        raise LaunchRejected("sampling", outside)


def _prepare(logits: Tensor, draws: Sequence[TokenChoice]) -> launch.Launch:
    masks = masks_of(draws, logits.shape[1])
    arguments = (
        logits,
        np.array([settings_of(draw) for draw in draws], np.float64),
        np.concatenate([draw.context_ids for draw in draws]),
        np.concatenate([draw.output_counts for draw in draws]),
        np.cumsum([0] + [draw.context_ids.size for draw in draws], dtype=np.int64),
        np.concatenate([draw.bias_ids for draw in draws]),
        np.concatenate([draw.biases for draw in draws]),
        np.cumsum([0] + [draw.bias_ids.size for draw in draws], dtype=np.int64),
        np.empty((0, 0), np.int32) if masks is None else masks,
        np.empty((len(draws), 2, logits.shape[1])),
        np.empty(len(draws), np.int32),
        np.empty(len(draws), np.int32),
    )
    parallel = len(draws) >= _MIN_PARALLEL_ROWS
    checked = {"logits": logits, "num_draws": len(draws)}
    return launch.prepare(named_kernel(_SAMPLE), arguments, CONTRACT, checked, parallel=parallel)


def _as_outcome(token_id: int, num_bad: int, row: int, vocab_size: int) -> int | BadLogits:
    return int(token_id) if token_id >= 0 else BadLogits(row, int(num_bad), vocab_size)


def _choose_reference(logits: Logits, draw: TokenChoice) -> tuple[int, int]:
    """Chosen id and 0, or -1 and the number of bad values."""
    num_bad = int(np.count_nonzero(np.isnan(logits) | (logits == np.inf)))
    if draw.mask is not None:
        bits = np.unpackbits(draw.mask.view(np.uint8), bitorder="little")
        logits = np.where(bits[: logits.size], logits, np.float32(-np.inf))
    if num_bad or logits.max() == -np.inf:
        return -1, num_bad
    params = draw.params
    values = logits.astype(np.float64)
    values[draw.bias_ids] += draw.biases
    values = _penalise_reference(values, draw)
    if params.temperature == 0:
        return int(values.argmax()), 0
    likely_first = np.argsort(-values, kind="stable")
    relative = values - values[likely_first[0]]
    weights = exp_reference(relative)
    kept = likely_first[: params.top_k or None]
    if params.top_p < 1:
        mass = np.cumsum(weights[np.sort(kept)])[-1]
        num_short = int(np.count_nonzero(np.cumsum(weights[kept]) < params.top_p * mass))
        kept = kept[: num_short + 1]
    kept = np.sort(kept[weights[kept] >= params.min_p])
    with np.errstate(over="ignore"):
        cumulated = np.cumsum(exp_reference(relative[kept] / params.temperature))
    above = cumulated > draw.random_number * cumulated[-1]
    return int(kept[above.argmax()]), 0


def _penalise_reference(values: Float64s, draw: TokenChoice) -> Float64s:
    params, ids = draw.params, draw.context_ids
    if has_penalties(params) and ids.size:
        some = values[ids]
        some = np.where(some <= 0, some * params.repeat_penalty, some / params.repeat_penalty)
        counts = draw.output_counts.astype(np.float64)
        offset = counts * params.frequency_penalty + params.presence_penalty
        values[ids] = np.where(counts > 0, some - offset, some)
    return values


def exp_reference(x: Float64s) -> Float64s:
    """exp(x) for x <= 0, within 2 units in the last place; 0 below `EXP_LOWEST` and for NaN.

    No weight exceeds 1, that of the most likely token: x > 0 counts as 0, infinity too.
    x = k ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite, 1980), exp(r) by its Taylor series. numpy's
    own exp differs from one machine and vector width to the next; this one does not.
    """
    is_weight = x >= EXP_LOWEST
    clamped = np.where(is_weight, np.minimum(x, 0.0), 0.0)
    k = np.floor(clamped * LOG2_E + 0.5)
    r = (clamped - k * LN2_HIGH) - k * LN2_LOW
    series = np.zeros_like(r)
    for coefficient in EXP_COEFFICIENTS:
        series = series * r + coefficient
    scaled = series * POWERS_OF_TWO[k.astype(np.int64) + POWERS_OF_TWO.size - 1]
    return np.where(is_weight, scaled, 0.0)
