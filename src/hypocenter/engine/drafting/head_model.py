"""A head of the model's own file that writes ahead (`model/facts/nextn.py`): what it reads besides
tokens.

It is a draft model of one layer, and all that is said of those holds. Behind each token it reads
what the model left of the token before. Of tokens that it wrote itself it has left that itself,
until the model has read them, and then it reads them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hypocenter.engine.batch import Batch, Chunk, adapter_scales_of
from hypocenter.engine.drafting.draft_model import DraftModel, _Span
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.request import Request

if TYPE_CHECKING:
    from hypocenter.model.layers.step_buffers import HiddenStates


class HeadModel(DraftModel):
    """A DraftModel on the runner of a head; `read_from` must be called before it writes."""

    def read_from(self, cache: KVCache) -> None:
        """Have it read what the model left of the tokens in these slots."""
        self._of_model = cache

    @property
    def _hidden(self) -> HiddenStates:
        assert self.runner.hidden is not None, "a head reads what the model left"
        return self.runner.hidden

    def _stop_in(self, chunk: Chunk) -> int:
        """The first token of a chunk stands behind one that the model has read; those behind it do
        not yet."""
        return chunk.start + 1

    def _num_right(self, request: Request, num_before: int, ids: Sequence[int]) -> int:
        """What it wrote it has read behind what it left itself."""
        return num_before

    def _batch(self, spans: Sequence[_Span], num_drawn: int) -> Batch:
        rows: list[int] = []
        for span in spans:
            rows += self._rows_before(span)
        scales = None
        if self.runner.adapters is not None:
            scales = adapter_scales_of([span.request for span in spans])
        batch = super()._batch(spans, num_drawn)
        return replace(batch, hidden_rows=np.array(rows, np.int32), adapter_scales=scales)

    def _rows_before(self, span: _Span) -> list[int]:
        """The row of what is left of the token before each of a span."""
        hidden, start, stop = self._hidden, span.start, span.start + len(span.token_ids)
        if span.row_before is not None:
            return [hidden.num_slots + span.row_before]
        rows = [] if start else [hidden.zero_row]
        if stop - 1 > max(start - 1, 0):
            rows += self._of_model.retrieve(span.request.id, max(start - 1, 0), stop - 1).slots
        return rows
