"""What is checked of settings that name tokens, or words to avoid: types, counts, ranges.

They may come from a stranger. Which tokens a model has, and what becomes of these settings, is the
business of `engine/token_rules.py`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from hypocenter.base.errors import BadSetting, Words

MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 1 << 15
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
#: As far as OpenAI and vLLM let a logit be moved.
MAX_BIAS = 100.0
#: The bias of a token that never comes; False says the same.
NEVER = -math.inf
_MAX_TOKEN_ID = (1 << 31) - 1


def token_ids(name: str, given: object, most: int) -> tuple[int, ...]:
    """The distinct token ids of a setting, in order. Raises BadSetting."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        raise BadSetting(name, _short(given), "must be a list of token ids")
    _require_few(name, given, most)
    ids = tuple(given)
    if not all(
        type(token_id) is int and 0 <= token_id <= _MAX_TOKEN_ID for token_id in ids
    ):  # most often
        ids = tuple(_token_id(name, token_id) for token_id in ids)
    return tuple(dict.fromkeys(ids))


def logit_biases(given: object) -> tuple[tuple[int, float], ...]:
    """Pairs of a token and what is added to its logit, in rising id. Raises BadSetting."""
    name, wanted = "logit_bias", "must be a dict of token ids and numbers, or a list of such pairs"
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, Sequence) or isinstance(pairs, str | bytes | bytearray):
        raise BadSetting(name, _short(given), wanted)
    _require_few(name, pairs, MAX_BIASED_TOKENS)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str | bytes) or len(pair) != 2:
            raise BadSetting(name, _short(given), wanted)
        token_id = _token_id(name, pair[0])
        if token_id in biases:
            raise BadSetting(name, _short(given), f"token {token_id} stands there twice")
        biases[token_id] = _bias(token_id, pair[1])
    return tuple(sorted(biases.items()))


def bad_words(given: object) -> tuple[str, ...]:
    """One text or several as a tuple. Raises BadSetting."""
    name, wanted = "bad_words", "must be a text or a sequence of texts"
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or isinstance(texts, bytes | bytearray):
        raise BadSetting(name, _short(given), wanted)
    _require_few(name, texts, MAX_BAD_WORDS)
    for text in texts:
        if not isinstance(text, str):
            raise BadSetting(name, _short(text), wanted)
        if not text:
            raise BadSetting(name, text, "an empty text is no word; leave it out")
        if len(text) > MAX_BAD_WORD_CHARS:
            limit = f"a word has at most {MAX_BAD_WORD_CHARS} characters"
            raise BadSetting(name, _short(text), limit)
    return tuple(texts)


def _token_id(name: str, given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise BadSetting(name, _short(given), "must name tokens by their ids, whole numbers")
    token_id = int(given)
    if not 0 <= token_id <= _MAX_TOKEN_ID:
        raise BadSetting(name, token_id, f"a token id is from 0 to {_MAX_TOKEN_ID}")
    return token_id


def _bias(token_id: int, given: Any) -> float:
    """-inf for what means never."""
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if given is False or (is_number and given == NEVER):
        return NEVER
    if not is_number or not -MAX_BIAS <= given <= MAX_BIAS:  # NaN is in no range
        limit = f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g}, or False: never"
        raise BadSetting("logit_bias", Words(f"{reprlib.repr(given)} for token {token_id}"), limit)
    return float(given)


def _require_few(name: str, given: Sequence[object], most: int) -> None:
    if len(given) > most:
        raise BadSetting(name, Words(f"a list of {len(given)}"), f"at most {most} are allowed")


def _short(value: object) -> object:
    return Words(reprlib.repr(value))
