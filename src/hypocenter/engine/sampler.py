"""Asks the sampling kernel for one token per request; the formula is in `kernels/sampling.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hypocenter.device import memory
from hypocenter.device.launch import Progress
from hypocenter.engine.request import Request
from hypocenter.errors import BadLogits
from hypocenter.kernels.sampling import Draw, compile_kernels, sample
from hypocenter.tensor import DType, Tensor


def sample_requests(logits: Tensor, requests: Sequence[Request]) -> list[int | BadLogits]:
    """The next token of each request, from the row of `logits` f32 [num_requests, vocab_size].

    The random number depends on the request's seed and on the position of the token alone: neither
    on the batch nor on how the request came to stand there.
    """
    if logits.device != "cpu":
        values = memory.to_host(logits)
        logits = memory.adopt(
            logits.name, "sampler", DType.F32, logits.shape, values, values.nbytes
        )
    return sample(logits, [_draw(request) for request in requests])


def compile_sampler(vocab_size: int, max_rows: int, progress: Progress | None = None) -> None:
    """Compile the sampling kernels now, so that the first token need not wait for them."""
    logits = memory.allocate("logits", "sampler", DType.F32, (max_rows, vocab_size))
    compile_kernels(logits, progress)


def _draw(request: Request) -> Draw:
    counts = request.output_counts
    return Draw(
        request.params,
        position=len(request.token_ids),
        context_ids=np.fromiter(counts.keys(), np.int32, len(counts)),
        output_counts=np.fromiter(counts.values(), np.int32, len(counts)),
    )
