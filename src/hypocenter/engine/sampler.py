"""Asks the sampling kernels for one token per request; the formula is in `kernels/sampling/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hypocenter.base.dtypes import Int32s
from hypocenter.base.errors import BadLogits
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import memory
from hypocenter.device.launch import Launch
from hypocenter.engine.batch import Chunk
from hypocenter.engine.request import Request
from hypocenter.kernels.sampling.draw import TokenChoice, has_penalties
from hypocenter.kernels.sampling.sampling import HostSampler, launches_of, sample_later
from hypocenter.record.keyed_digest import digest_of
from hypocenter.record.recorder import current

if TYPE_CHECKING:
    from hypocenter.kernels.sampling.sampling_plan import DeviceSampler


class Sampler:
    """Chooses tokens where the logits lie: on a GPU, ids and counts alone come to the host.

    `max_rows` is the most requests of a step, `launch_mode` how its GPU kernels run. On a GPU the
    chosen ids are left in `next_ids` too, where a next step finds them.
    """

    def __init__(
        self, max_rows: int, launch_mode: str = "off", next_ids: Tensor | None = None
    ) -> None:
        self._max_rows, self._launch_mode, self._next_ids = max_rows, launch_mode, next_ids
        self._on_device: DeviceSampler | None = None
        self._on_host = HostSampler()

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the GPU kernels that have chosen tokens so far."""
        return self._on_device.kernels if self._on_device else ()

    @property
    def num_graphs(self) -> int:
        """How many of its plans are replayed as captured graphs."""
        return self._on_device.num_graphs if self._on_device else 0

    def sample(
        self, logits: Tensor, chunks: Sequence[Chunk]
    ) -> Callable[[], list[int | BadLogits]]:
        """What waits for the next token of each chunk's request, chosen from its row of `logits`.

        Logits are f32 [num_drawn, vocab_size]: a row of each chunk, and one more for each of its
        drafts. What follows a draft is chosen as if that had been. The random number depends on the
        request's seed and on the position of the token alone: neither on the batch nor on how the
        request came to stand there.
        """
        if not chunks:  # then the step has no logits, whatever is in their place
            return list
        requests, draws = [], []
        for chunk in chunks:
            requests += [chunk.request.id] * chunk.num_drawn
            draws += [_draw(chunk, number) for number in range(chunk.num_drawn)]
        _record(requests, draws)
        if logits.device != "cpu" and self._on_device is None:
            from hypocenter.kernels.sampling.sampling_plan import DeviceSampler  # needs Triton

            self._on_device = DeviceSampler(
                logits.device, logits.shape[1], self._max_rows, self._launch_mode, self._next_ids
            )
        return sample_later(logits, draws, self._on_device or self._on_host)


def launches_on_host(vocab_size: int, max_rows: int) -> list[Launch]:
    """What sampling on the host launches, to be compiled before the first token needs it."""
    logits = memory.allocate("logits", "sampler", DType.F32, (max_rows, vocab_size))
    return launches_of(logits)


def launches_on_device(
    device: str, vocab_size: int, max_rows: int, next_ids: Tensor
) -> list[Launch]:
    """A launch in each form that sampling on a GPU has, to be compiled before."""
    from hypocenter.kernels.sampling.sampling_plan import every_launch  # needs Triton

    return every_launch(device, vocab_size, max_rows, next_ids)


def _record(requests: Sequence[int], draws: Sequence[TokenChoice]) -> None:
    """Write down what the choices depend on beside the logits."""
    record = current()
    if record.is_on:
        record.record_draws(
            tuple(requests),
            tuple(draw.position for draw in draws),
            masks=tuple(digest_of(draw.mask) for draw in draws),
            biases=tuple(digest_of(draw.bias_ids, draw.biases) for draw in draws),
            counts=tuple(digest_of(draw.context_ids, draw.output_counts) for draw in draws),
        )


def _draw(chunk: Chunk, number: int) -> TokenChoice:
    """What the choice of the token behind the first `number` drafts depends on."""
    request, rules = chunk.request, chunk.request.rules
    position = chunk.stop - len(chunk.drafts) + number
    if chunk.drafts:
        mask = chunk.masks[number]
    else:
        mask = None if request.matcher is None else request.matcher.mask()
        if rules is not None:
            # The position tells how many tokens come before, also where the last one is not known.
            mask = rules.mask(request.output_ids, position - len(request.prompt_ids), mask)
    return token_choice(request, position, chunk.drafts[:number], mask)


def token_choice(
    request: Request, position: int, drafts: Sequence[int], mask: Int32s | None
) -> TokenChoice:
    """What the choice of a request's token at `position` depends on, behind `drafts`."""
    draw = TokenChoice(request.params, position, mask=mask)
    if has_penalties(request.params):
        draw = _with_counts(draw, request.output_counts, drafts)
    if request.rules is not None:
        draw = replace(draw, bias_ids=request.rules.bias_ids, biases=request.rules.biases)
    return draw


def _with_counts(
    draw: TokenChoice, counts: Mapping[int, int], drafts: Sequence[int]
) -> TokenChoice:
    """The draw with the tokens before it: those of the request, and the drafts."""
    if drafts:
        counts = dict(counts)
        for draft in drafts:
            counts[draft] = counts.get(draft, 0) + 1
    return replace(
        draw,
        context_ids=np.fromiter(counts.keys(), np.int32, len(counts)),
        output_counts=np.fromiter(counts.values(), np.int32, len(counts)),
    )
