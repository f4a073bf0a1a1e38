"""What a request's own settings say of single tokens: which may come next, and how they are biased.

Chooses no token. What a form allows is told by `grammar.py`, and narrowed here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hypocenter.base.dtypes import Int32s
from hypocenter.base.errors import BadSetting, NoTokenLeft
from hypocenter.kernels.sampling.draw import Biases, mask_of
from hypocenter.settings.config import SamplingParams
from hypocenter.settings.token_settings import NEVER

if TYPE_CHECKING:
    from hypocenter.model.text.tokenizer import Tokenizer


def token_rules(
    params: SamplingParams,
    tokenizer: Tokenizer,
    vocab_size: int,
    bad_word_ids: Iterable[Sequence[int]] | None = None,
) -> TokenRules | None:
    """The rules of a request with these parameters; None where every token is as the logits say.

    `vocab_size` is the number of logits. `bad_word_ids` are the `spellings` of the words to avoid,
    where another process has found them. Raises BadSetting for a token that there is not,
    NoTokenLeft where all are left out, TokenizerError for a word that has no tokens.
    """
    named: dict[str, Iterable[int]] = {
        "logit_bias": dict(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
    }
    for field, ids in named.items():
        for token_id in ids:
            if token_id >= vocab_size:
                limit = f"the vocabulary has {vocab_size} tokens, from 0 on"
                raise BadSetting(field, token_id, limit)
    if not any((params.logit_bias, params.allowed_token_ids, params.min_tokens, params.bad_words)):
        return None
    if bad_word_ids is None:
        bad_word_ids = spellings(params.bad_words, tokenizer)
    return TokenRules(params, ending_ids(params, tokenizer.end_ids), bad_word_ids, vocab_size)


def spellings(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, as they are where a text begins with it, and behind a blank.

    Raises TokenizerError for a word that has no tokens.
    """
    return tuple(ids for word in words for ids in sorted(_spellings(word, tokenizer)))


def ending_ids(params: SamplingParams, end_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end an answer, where the model's own are `end_ids`."""
    return (frozenset() if params.ignore_eos else end_ids).union(params.stop_token_ids)


class TokenRules:
    """Which tokens one request's settings leave out, and what they add to logits.

    `ends` are the tokens that end the answer, `words` the sequences of tokens that do not come.
    `bias_ids` i32 [num_biases] and `biases` f64 are what `TokenChoice` has under these names.
    """

    #: Whether a draft that may not come is left out before it is tried.
    narrows_drafts = True

    def __init__(
        self,
        params: SamplingParams,
        ends: Collection[int],
        words: Iterable[Sequence[int]],
        vocab_size: int,
    ) -> None:
        pairs = dict(params.logit_bias)
        never = {token_id for token_id, bias in pairs.items() if bias == NEVER}
        self.bias_ids: Int32s = np.array(
            [token_id for token_id in pairs if token_id not in never], np.int32
        )
        self.biases: Biases = np.array(
            [pairs[token_id] for token_id in self.bias_ids.tolist()], np.float64
        )
        self._words: list[list[int]] = []
        for ids in words:
            if len(ids) > 1:
                self._words.append(list(ids))
            else:
                never.update(ids)
        self._num_min, self._ends = params.min_tokens, sorted(ends)
        self._params = params
        self._everything = mask_of(np.ones(vocab_size, np.bool_))
        #: What may come whatever stands before it; None: every token.
        self._allowed: Int32s | None = None
        if params.allowed_token_ids is not None or never:
            is_allowed = np.full(vocab_size, params.allowed_token_ids is None)
            is_allowed[list(params.allowed_token_ids or ())] = True
            is_allowed[sorted(never)] = False
            self._allowed = mask_of(is_allowed)
        self._failure: NoTokenLeft | None = None
        if self._allowed is not None and not self._allowed.any():
            raise self._no_token_left()

    @property
    def needs_tokens(self) -> bool:
        """Whether what may come next hangs on the tokens before it, and not on their number."""
        return bool(self._words)

    def mask(
        self, output_ids: Sequence[int], num_output: int, form: Int32s | None
    ) -> Int32s | None:
        """What `mask_or_raise` gives; where nothing is left all, and `require_token` raises."""
        try:
            return self.mask_or_raise(output_ids, num_output, form)
        except NoTokenLeft as error:
            self._failure = error
            return None

    def mask_or_raise(
        self, output_ids: Sequence[int], num_output: int, form: Int32s | None
    ) -> Int32s | None:
        """A bit for each token that may come behind `num_output` tokens; None where all may.

        `output_ids` are these tokens, where `needs_tokens`. `form` is the mask of the request's
        form. Raises NoTokenLeft.
        """
        allowed = self._allowed if form is None else form
        if form is not None and self._allowed is not None:
            allowed = form & self._allowed
        completing = [
            ids[-1] for ids in self._words if list(output_ids[1 - len(ids) :]) == ids[:-1]
        ]
        if completing:
            allowed = _without(self._everything if allowed is None else allowed, completing)
        if allowed is not None and not allowed.any():
            raise self._no_token_left()
        if num_output < self._num_min and self._ends:
            going_on = _without(self._everything if allowed is None else allowed, self._ends)
            allowed = going_on if going_on.any() else allowed
        return allowed

    def draft_mask(
        self, output_ids: Sequence[int], num_output: int, form: Int32s | None
    ) -> Int32s | None:
        """What `mask_or_raise` gives, for what a draft model writes behind these tokens."""
        return self.mask_or_raise(output_ids, num_output, form)

    def require_token(self) -> None:
        """Raises NoTokenLeft where `mask` left nothing to choose from."""
        if self._failure is not None:
            raise self._failure

    def _no_token_left(self) -> NoTokenLeft:
        given = {
            "allowed_token_ids": self._params.allowed_token_ids is not None,
            "logit_bias": NEVER in dict(self._params.logit_bias).values(),
            "bad_words": bool(self._params.bad_words),
        }
        form = self._params.constraint
        fields = [name for name, is_given in given.items() if is_given]
        return NoTokenLeft((*fields, *([] if form is None else [form[0]])))


def _without(mask: Int32s, ids: Sequence[int]) -> Int32s:
    """The mask without the bits of some tokens."""
    words, tokens = mask.copy(), np.array(ids, np.uint32)
    np.bitwise_and.at(words.view(np.uint32), tokens // 32, ~(np.uint32(1) << tokens % 32))
    return words


def _spellings(word: str, tokenizer: Tokenizer) -> set[tuple[int, ...]]:
    """How the tokenizer spells a word where a text begins with it, and behind a blank."""
    bare = word.lstrip() or word
    spelled = (
        tokenizer.encode(text, add_special=False, at_start=False) for text in (bare, f" {bare}")
    )
    return {tuple(ids) for ids in spelled if ids}
