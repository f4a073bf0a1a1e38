"""Finds the tokens of a text that are read as a whole before any other rule; encodes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np

from hypocenter.model.text.vocabulary import TokenKind, Vocabulary

#: So many texts of one length are looked for together; fewer are found faster one by one.
MANY = 256
#: Any large odd number: hashes are taken modulo 2^64, where it has an inverse.
_BASE = 0x9E3779B97F4A7C15

#: A token's text and its id.
Special: TypeAlias = tuple[str, int]


class SpecialTexts:
    """Finds the tokens that are read as a whole before any other rule: longest first, then left.

    This is llama.cpp's order (`tokenizer_st_partition`) and not leftmost-first: a long token wins
    over a shorter one that begins before it.
    """

    def __init__(self, words: Vocabulary, strip_after: frozenset[int]) -> None:
        user_defined = (words.kinds == TokenKind.USER_DEFINED).nonzero()[0].tolist()
        special = words.guarded.union(user_defined)
        texts = [(words.texts[index], index) for index in special if words.texts[index]]
        # By length in bytes, as llama.cpp does; the number of characters would order differently.
        texts.sort(key=lambda item: (-_num_bytes(item[0]), item[1]))
        self._all = _groups(texts)
        self._unguarded = _groups(item for item in texts if item[1] not in words.guarded)
        self._strip_after = strip_after

    def split(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """`text` in order: special tokens as ids, what lies between them as strings."""
        found = self._find(text, parse_special)
        position = 0
        for start in sorted(found):
            end, token_id = found[start]
            if position < start:
                yield text[position:start]
            if token_id is not None:
                yield token_id
            position = end
        if position < len(text):
            yield text[position:]

    def _find(self, text: str, parse_special: bool) -> dict[int, tuple[int, int | None]]:
        """Start to (end, id) of every special token, with id None for text that is dropped."""
        found: dict[int, tuple[int, int | None]] = {}
        taken = bytearray(len(text))
        hashes: _Hashes | None = None
        for group in self._all if parse_special else self._unguarded:
            if isinstance(group, _ManyTexts):
                hashes = hashes or _Hashes(text)
                for start, end, token_id in group.occurrences(text, hashes):
                    if not (taken[start] or taken[end - 1]):
                        self._take(text, found, taken, (start, end, token_id))
                continue
            special, token_id = group
            start = text.find(special)
            while start >= 0:
                end = start + len(special)
                # No taken place is shorter than `special` in bytes, so none hides between its ends.
                if taken[start] or taken[end - 1]:
                    start = text.find(special, start + 1)
                else:
                    end = self._take(text, found, taken, (start, end, token_id))
                    start = text.find(special, end)
        return found

    def _take(
        self,
        text: str,
        found: dict[int, tuple[int, int | None]],
        taken: bytearray,
        place: tuple[int, int, int],
    ) -> int:
        """Put (start, end, id) among what was found, with the blanks that it swallows; its end."""
        start, end, token_id = place
        found[start] = (end, token_id)
        if token_id in self._strip_after:
            behind = _skip_blanks(text, taken, end)
            if behind > end:
                found[end] = (behind, None)
            end = behind
        taken[start:end] = b"\1" * (end - start)
        return end


class _Hashes:
    """The sums of a text that give the hash of each of its windows: u64 [num_chars + 1]."""

    def __init__(self, text: str) -> None:
        codes = _codes(text)
        self.powers = _powers(_BASE, len(codes))
        self._inverses = _powers(pow(_BASE, -1, 1 << 64), len(codes))
        self._sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum(codes * self.powers, out=self._sums[1:])

    def windows(self, num_chars: int) -> np.ndarray:
        """The hash of the `num_chars` characters from each place on: u64 [num_windows]."""
        sums = self._sums[num_chars:] - self._sums[: len(self._sums) - num_chars]  # [num_windows]
        hashes: np.ndarray = sums * self._inverses[: len(sums)]
        return hashes


class _ManyTexts:
    """Texts of one length in bytes, found by their hashes all at once."""

    def __init__(self, specials: list[Special]) -> None:
        self._ids = dict(specials)
        #: By the number of characters, which may differ: the hashes of those texts, sorted.
        self._hashes: dict[int, np.ndarray] = {}
        by_length = sorted(self._ids, key=len)
        for num_chars, same in itertools.groupby(by_length, key=len):
            codes = _codes("".join(same)).reshape(-1, num_chars)  # [num_texts, num_chars]
            self._hashes[num_chars] = np.unique((codes * _powers(_BASE, num_chars)).sum(axis=1))

    def occurrences(self, text: str, hashes: _Hashes) -> list[tuple[int, int, int]]:
        """(start, end, id) of each, those that overlap as well: by id, and then from the left."""
        found = []
        for num_chars, wanted in self._hashes.items():
            if num_chars > len(text):
                continue
            places = np.flatnonzero(np.isin(hashes.windows(num_chars), wanted)).tolist()
            for start in places:
                end = start + num_chars
                # Others may have the same hash.
                if (token_id := self._ids.get(text[start:end])) is not None:
                    found.append((start, end, token_id))
        return sorted(found, key=lambda place: (place[2], place[0]))


def _groups(specials: Iterable[Special]) -> list[Special | _ManyTexts]:
    """The texts in their order, with those that are many of one length put together."""
    groups: list[Special | _ManyTexts] = []
    for _, group in itertools.groupby(specials, key=lambda item: _num_bytes(item[0])):
        same = list(group)
        groups += same if len(same) < MANY else [_ManyTexts(same)]
    return groups


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def _codes(text: str) -> np.ndarray:
    """The code points of a text: u64 [num_chars]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)


def _powers(base: int, count: int) -> np.ndarray:
    """1, base, base^2, ... modulo 2^64: u64 [count]."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors)


def _skip_blanks(text: str, taken: bytearray, position: int) -> int:
    while position < len(text) and not taken[position] and text[position] in " \t\n\v\f\r":
        position += 1
    return position
