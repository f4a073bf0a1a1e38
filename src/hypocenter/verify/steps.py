"""Steps of a runner on fixed prompts, without scheduler and sampler: whole, in chunks, together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hypocenter.base.dtypes import Array, Int32s
from hypocenter.base.tensor import Tensor
from hypocenter.device import copies
from hypocenter.engine.batch import Batch
from hypocenter.engine.runner import Runner

#: One sequence of a step: all its token ids, and the positions that are run.
TokenSpan = tuple[Int32s, int, int]


class PromptSteps:
    """Runs spans of sequences; each sequence has pages of its own, in no order."""

    def __init__(self, runner: Runner, max_sequences: int, max_tokens: int) -> None:
        self.runner = runner
        per_sequence = -(-max_tokens // runner.block_size)
        order = np.random.default_rng(7).permutation(runner.num_blocks)
        most = min(max_sequences, runner.max_batch_requests)
        num = min(most, runner.num_blocks // per_sequence)
        self.tables = order[: num * per_sequence].reshape(num, per_sequence).astype(np.int32)

    @property
    def num_sequences(self) -> int:
        """How many sequences of the length asked for have room in the cache."""
        return len(self.tables)

    def launch(self, spans: Sequence[TokenSpan], *, last_only: bool = False) -> Tensor:
        """Run a step; its logits on the device, of every token or of each span's last one."""
        return self.runner.run(self.batch(spans, last_only=last_only))

    def batch(self, spans: Sequence[TokenSpan], *, last_only: bool = False) -> Batch:
        """The batch of a step whose spans have the rows of the tables in order."""
        size, parts = self.runner.block_size, []
        for row, (ids, start, stop) in enumerate(spans):
            positions = np.arange(start, stop, dtype=np.int32)
            slots = self.tables[row, positions // size] * size + positions % size
            parts.append((ids[start:stop], positions, slots, np.full_like(positions, row)))
        token_ids, positions, slots, rows = (
            np.concatenate(part).astype(np.int32) for part in zip(*parts, strict=True)
        )
        wanted = np.arange(len(token_ids), dtype=np.int32)
        if last_only:
            wanted = np.cumsum([stop - start for _, start, stop in spans]).astype(np.int32) - 1
        tables, adapters, scales = self.tables[: len(spans)], self.runner.adapters, None
        if adapters is not None and (own := adapters.scales(None)):
            scales = np.tile(np.array(own, np.float32), (len(spans), 1))
        found = Batch(token_ids, positions, slots, rows, tables, wanted)
        return replace(found, adapter_scales=scales)

    def run(self, spans: Sequence[TokenSpan], *, last_only: bool = False) -> Array:
        """The result of `launch`, f32 [rows, vocab_size], on the host."""
        found: Array = copies.to_host(self.launch(spans, last_only=last_only))
        return found[:, : self.width]

    @property
    def width(self) -> int:
        """Columns of a result: logits, or what a model without logits says of a token."""
        has_logits = self.runner.weights.makes_logits
        return self.runner.vocab_size if has_logits else self.runner.arch.width


def prompt(vocab_size: int, num_tokens: int, seed: int) -> Int32s:
    """A fixed prompt: the same ids on every machine."""
    ids = np.random.default_rng([seed, 59]).integers(2, vocab_size, num_tokens)
    return ids.astype(np.int32)
