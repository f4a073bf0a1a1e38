"""Texts that are read as a whole: many are found together as each would be found by itself."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypocenter.model.text import special_texts
from hypocenter.model.text.special_texts import SpecialTexts
from hypocenter.model.text.vocabulary import TokenKind, Vocabulary

#: Characters of one to four bytes, white space, and a byte that is no UTF-8.
CHARACTERS = "ab é漢🙂\n\udcff"
pieces = st.text(CHARACTERS, max_size=6)


def _split(
    texts: list[str], text: str, many: int, strip_after: frozenset[int] = frozenset()
) -> list[str | int]:
    kinds = np.full(len(texts), TokenKind.USER_DEFINED, np.int32)
    words = Vocabulary(texts, {t: i for i, t in enumerate(texts)}, kinds, None, {})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(special_texts, "MANY", many)
        return list(SpecialTexts(words, strip_after).split(text, parse_special=False))


@settings(max_examples=300, deadline=None)
@given(st.sets(pieces, max_size=12).map(sorted), st.text(CHARACTERS, max_size=60), st.booleans())
def test_together_is_as_one_by_one(texts: list[str], text: str, strips: bool) -> None:
    strip_after = frozenset(range(0, len(texts), 2)) if strips else frozenset()
    one_by_one = _split(texts, text, len(texts) + 1, strip_after)
    assert _split(texts, text, 1, strip_after) == one_by_one


def test_a_longer_text_wins_over_one_that_begins_before_it() -> None:
    for many in (1, 99):
        assert _split(["ab", "bcd", "x"], "abcdx", many) == ["a", 1, 2]


def test_hundred_thousands_of_texts_are_not_searched_one_by_one() -> None:
    numbers = [f"{number:x}" for number in range(1 << 20, (1 << 20) + 200_000)]
    text = "0123456789abcdef" * 3000
    kinds = np.full(len(numbers), TokenKind.USER_DEFINED, np.int32)
    words = Vocabulary(numbers, dict(zip(numbers, range(200_000), strict=True)), kinds, None, {})
    texts = SpecialTexts(words, frozenset())
    began = time.process_time()
    list(texts.split(text, parse_special=False))
    assert time.process_time() - began < 1.0  # one by one it is ten times as much
