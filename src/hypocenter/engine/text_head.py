"""What stands for a whole text: a vector, or a score, of what the last layer says of its tokens.

The host does this, in f32: of each text a few rows are left. Formulas: mean pooling as Reimers and
Gurevych have it (arXiv 1908.10084); heads as in llama.cpp's `llm_graph_context::build_pooling`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hypocenter.base.dtypes import Array, Float32s
from hypocenter.base.errors import BadLogits
from hypocenter.engine.request import Request
from hypocenter.model.facts.architecture import Architecture


class TextHead:
    """Makes the vector of a text; `tensors` are those of the file's own head, f32, by name."""

    def __init__(self, arch: Architecture, tensors: Mapping[str, Array]) -> None:
        self._pooling, self._width, self._tensors = arch.pooling, arch.width, tensors

    @property
    def num_columns(self) -> int:
        """How long a vector is; of scores the first one is told."""
        if self._pooling is None or self._pooling.scores:
            return 1
        return next(
            (rows for rows, _ in reversed(list(self._pooling.shapes.values()))), self._width
        )

    def vector(self, rows: Array) -> Float32s:
        """The vector f32 [num_columns] of rows f32 [num_tokens, >= width], its score [1], or
        without pooling f32 [num_tokens, num_columns].

        Raises BadLogits for what is no number.
        """
        assert self._pooling is not None
        rows = rows[:, : self._width].astype(np.float32)
        kind = self._pooling.kind
        text = rows.mean(axis=0, dtype=np.float64).astype(np.float32) if kind == "mean" else rows
        found = self._scores(rows[0]) if kind == "rank" else self._through(text, "plain")
        found = found.reshape(-1, self.num_columns) if kind == "none" else found.reshape(-1)
        if num_bad := int(np.count_nonzero(~np.isfinite(found))):
            raise BadLogits(0, num_bad, found.size)
        return found

    def _scores(self, row: Float32s) -> Float32s:
        """The first of a head's scores; of several labels its probability."""
        scores = self._through(row, "tanh")
        if len(scores) > 1:
            weights = np.exp(scores - scores.max())
            scores = weights / weights.sum()
        return scores[:1]

    def _through(self, x: Float32s, between: str) -> Float32s:
        """`x` through the head's matrices, and what stands `between` them."""
        assert self._pooling is not None
        names = list(self._pooling.shapes)
        for name in names:
            x = x @ self._tensors[name].T
            bias = name.removesuffix(".weight") + ".bias"
            if bias in self._tensors:
                x = x + self._tensors[bias]
            if between == "tanh" and name != names[-1]:
                x = np.tanh(x)
        return x


def vector_of(request: Request, dimensions: int | None = None, *, normalise: bool) -> Float32s:
    """What came of a request for a vector, cut and divided by its length as asked. Raises the
    request's own error."""
    if request.error is not None:
        raise request.error
    assert request.vector is not None, "it ran to its end"
    vector: Float32s = request.vector
    return of_unit_length(vector, dimensions) if normalise else vector[..., :dimensions]


def of_unit_length(vectors: Float32s, num_columns: int | None = None) -> Float32s:
    """The first so many columns of each vector, divided by their length; of zeros, zeros."""
    cut = vectors[..., :num_columns]
    lengths = np.sqrt(np.square(cut, dtype=np.float64).sum(axis=-1, keepdims=True))
    return (cut / np.where(lengths == 0, 1, lengths)).astype(np.float32)
