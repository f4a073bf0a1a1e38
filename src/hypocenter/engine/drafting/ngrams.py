"""Finds where the last tokens of a text stood in it before. Says nothing of what may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Fewer equal tokens are no match: in code two in a row are found everywhere.
MIN_MATCH = 3
#: A match is followed back so far.
MAX_MATCH = 32
#: Of several matches the newest ones are compared.
_MAX_COMPARED = 16
#: Only so many of the newest tokens are searched, which takes some 50 µs.
MAX_SEARCHED = 1 << 17
#: A token id has at most 21 bits (`kernels/sampling/sampling.py`), so three of them are one number.
_ID_BITS = 21
_BACK = np.arange(MAX_MATCH)
#: Places of a table that tells in a microsecond that three tokens are new together.
_NUM_PLACES = 1 << 16
#: Odd numbers of 20 bits that spread three ids over these places.
_SPREAD = (792_377, 651_491, 937_253)
#: So many new tokens are noted one by one; more by numpy, which takes longer to begin.
_FEW = 32


class Match(NamedTuple):
    """The text goes on at `start` after the `num_tokens` tokens that are its last ones, too."""

    start: int
    num_tokens: int


class Ngrams:
    """The tokens of one text that only grows, ready to be searched: 12 bytes a token, and 64 KiB.

    Each token has a key made of itself and the two before it. So all places of the last three
    tokens come of one comparison of an array. Most often a table tells before that there is none.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        # No id is -1, so that no match reaches beyond the first token.
        self._ids = np.full(MAX_MATCH, -1, np.int32)
        self._keys = np.zeros(0, np.int64)
        self._is_met = bytearray(_NUM_PLACES)
        self._num_noted, self._may_match = MIN_MATCH - 1, False

    def find(self, token_ids: Sequence[int]) -> Match | None:
        """Where the longest sequence of last tokens stood before; of equal ones the newest.

        Only the end of `token_ids` may be new since the last call.
        """
        if not self.may_match(token_ids):
            return None
        self._follow(token_ids)
        return self._longest()

    def may_match(self, token_ids: Sequence[int]) -> bool:
        """Whether the last tokens may have stood together before, as the table has it, which may
        take others for them. Only the end of `token_ids` may be new since the last call."""
        first, second, third = _SPREAD
        if len(token_ids) - self._num_noted > _FEW:
            ids = np.array(token_ids[self._num_noted - 2 : -1], np.int64)
            places = ids[:-2] * first + ids[1:-1] * second + ids[2:] * third
            np.frombuffer(self._is_met, np.uint8)[places % _NUM_PLACES] = 1
            self._num_noted = len(token_ids) - 1
        for at in range(self._num_noted, len(token_ids)):
            before, last, this = token_ids[at - 2 : at + 1]
            place = (before * first + last * second + this * third) % _NUM_PLACES
            self._may_match, self._is_met[place] = bool(self._is_met[place]), 1
        self._num_noted = max(len(token_ids), self._num_noted)
        return self._may_match

    def _follow(self, token_ids: Sequence[int]) -> None:
        before, now = self._num_tokens, len(token_ids)
        if now <= before:
            return
        if now > len(self._keys):
            room = 2 * now
            self._ids = np.concatenate([self._ids, np.zeros(room - len(self._keys), np.int32)])
            self._keys = np.concatenate([self._keys, np.zeros(room - len(self._keys), np.int64)])
        ids = self._ids[before + MAX_MATCH - 2 : now + MAX_MATCH]
        ids[2:] = token_ids[before:]
        wide = ids.astype(np.int64)
        self._keys[before:now] = wide[2:] | wide[1:-1] << _ID_BITS | wide[:-2] << 2 * _ID_BITS
        self._num_tokens = now

    def _longest(self) -> Match | None:
        last = self._num_tokens - 1
        if last < MIN_MATCH:
            return None
        first = max(last - MAX_SEARCHED, MIN_MATCH - 1)
        places = np.flatnonzero(self._keys[first:last] == self._keys[last])[-_MAX_COMPARED:]
        if not places.size:
            return None
        places = places[::-1] + first
        back = places[:, None] + MAX_MATCH - _BACK
        is_equal = self._ids[back] == self._ids[last + MAX_MATCH - _BACK]
        lengths = np.logical_and.accumulate(is_equal, axis=1).sum(axis=1)
        best = int(lengths.argmax())
        return Match(int(places[best]) + 1, int(lengths[best]))
