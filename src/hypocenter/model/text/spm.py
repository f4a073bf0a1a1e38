"""Encodes text by merging neighbours into the token of highest score; reads no file.

This is `tokenizer.ggml.model` = llama. Our own and not the `tokenizers` library's, because its BPE
ranks pairs where this form scores results: equal scores go to the leftmost pair, and a character
that is no token may still merge. The rule is that of llama.cpp's `llm_tokenizer_spm`, with one
difference: control and byte tokens never come from merging, as in SentencePiece itself.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from hypocenter.base.errors import TokenizerError
from hypocenter.model.text.vocabulary import TokenKind, Vocabulary

BLANK = "▁"
_MAX_CACHED = 1 << 16
_MAX_CACHED_CHARS = 64


class ScoreEncoder:
    """Text to ids. Takes O(n log n) for n characters, however long a word is."""

    def __init__(self, words: Vocabulary, *, add_space_prefix: bool) -> None:
        assert words.scores is not None
        self._prefix = BLANK if add_space_prefix else ""
        self._ids = words.mergeable()
        # Negated, because a heap gives the smallest first.
        self._ranks: list[float] = (-words.scores).tolist()
        self._max_chars = max(map(len, self._ids), default=0)
        self._neighbours = _neighbours(self._ids)
        self._byte_ids: dict[int, int] = {}
        for index in np.flatnonzero(words.kinds == TokenKind.BYTE).tolist():
            self._byte_ids[int(words.texts[index][3:5], 16)] = index
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Ids of `text`, which begins a line of text or follows a special token if so told.

        Raises TokenizerError for a character without a token when there are no byte tokens.
        """
        text = (self._prefix if after_special else "") + text.replace(" ", BLANK)
        ids: list[int] = []
        for part in self._parts(text):
            found = self._cache.get(part)
            if found is None:
                found = self._merge(part)
                if len(part) <= _MAX_CACHED_CHARS:
                    if len(self._cache) >= _MAX_CACHED:
                        self._cache.clear()
                    self._cache[part] = found
            ids += found
        return ids

    def _parts(self, text: str) -> list[str]:
        """`text` cut wherever no token holds the two characters side by side.

        No merge can cross such a place, so the parts encode on their own.
        """
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)  # [num_chars]
        pairs = _pairs(points)
        at = np.minimum(np.searchsorted(self._neighbours, pairs), len(self._neighbours) - 1)
        cuts = np.flatnonzero(self._neighbours[at] != pairs) + 1
        edges = [0, *cuts.tolist(), len(text)]
        return [text[low:high] for low, high in itertools.pairwise(edges) if low < high]

    def _merge(self, text: str) -> list[int]:
        """Ids of one part. A symbol is the characters from its start to `ends[start]`."""
        num_chars = len(text)
        ids, ranks, max_chars = self._ids, self._ranks, self._max_chars
        ends = list(range(1, num_chars + 1))  # 0: merged into an earlier symbol
        starts_before = list(range(-1, num_chars))  # start of the symbol that ends at a position
        heap: list[tuple[float, int, int, int]] = []

        def offer(left: int, middle: int, end: int) -> None:
            if end - left <= max_chars and (index := ids.get(text[left:end])) is not None:
                heapq.heappush(heap, (ranks[index], left, middle, end))

        for left in range(num_chars - 1):
            offer(left, left + 1, left + 2)
        while heap:
            _, left, middle, end = heapq.heappop(heap)
            # Stale when either symbol has grown or gone since.
            if ends[left] != middle or ends[middle] != end:
                continue
            ends[left], ends[middle] = end, 0
            starts_before[end] = left
            if left > 0:
                offer(starts_before[left], left, end)
            if end < num_chars:
                offer(left, end, ends[end])
        found: list[int] = []
        start = 0
        while start < num_chars:
            symbol = text[start : ends[start]]
            index = ids.get(symbol)
            found += self._spell(symbol) if index is None else [index]
            start = ends[start]
        return found

    def _spell(self, symbol: str) -> list[int]:
        try:
            return [self._byte_ids[byte] for byte in symbol.encode()]
        except KeyError:
            raise TokenizerError(
                f"character {symbol!r} (U+{ord(symbol[0]):04X}) has no token, and the vocabulary "
                "has no byte tokens to spell it; leave it out"
            ) from None


def _neighbours(ids: dict[str, int]) -> np.ndarray:
    """Sorted codes of all character pairs that stand side by side in a token: u64 [num_pairs]."""
    texts = [text for text in ids if len(text) > 1]
    joined = "".join(texts).encode("utf-32-le")
    pairs = _pairs(np.frombuffer(joined, np.uint32))
    if not pairs.size:
        return np.full(1, np.iinfo(np.uint64).max)
    # Drop the pairs that span two tokens.
    seams = np.cumsum([len(text) for text in texts])[:-1] - 1
    return np.unique(np.delete(pairs, seams))


def _pairs(points: np.ndarray) -> np.ndarray:
    codes: np.ndarray = (points[:-1].astype(np.uint64) << np.uint64(32)) | points[1:]
    return codes
