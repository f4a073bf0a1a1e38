"""The tokenizers of encoders, both run by the `tokenizers` library: WordPiece and Unigram.

`tokenizer.ggml.model` is `bert` for the first and `t5` for the second. Ids equal those of the
library by which the models were trained, where llama.cpp's differ from these (accents, words of
more than 100 characters). Texts of the first are as llama.cpp's converter writes them: a blank
before what begins a word, nothing before what goes on with one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import Unigram, WordPiece

from hypocenter.base.errors import MISSING, BadModelFile
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.text.spm import BLANK
from hypocenter.model.text.vocabulary import Vocabulary

_GOES_ON = "##"
#: Of a table of what characters are replaced by.
MAX_CHARSMAP_BYTES = 1 << 24


class LibraryEncoder:
    """Plain text to ids by a tokenizer of the library; `first` is that for what begins a text."""

    def __init__(self, first: LibraryTokenizer, other: LibraryTokenizer | None = None) -> None:
        self._first, self._other = first, other or first

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Ids of `text`. Of a batch other threads run meanwhile."""
        library = self._first if after_special else self._other
        [found] = library.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = found.ids
        return ids


def word_piece_encoder(file: GGUFFile, words: Vocabulary) -> LibraryEncoder:
    """Raises BadModelFile for a vocabulary without a token for what is unknown."""
    lowers = file.flag("tokenizer.ggml.normalizer.lowercase", True)
    strips = file.flag("tokenizer.ggml.normalizer.strip_accents", lowers)
    unknown = _unknown(file, words)
    pieces = {_piece_of(text): index for text, index in words.mergeable().items()}
    name = words.texts[unknown]
    library = LibraryTokenizer(
        WordPiece(pieces | {name: unknown}, unk_token=name, max_input_chars_per_word=100)
    )
    library.normalizer = normalizers.BertNormalizer(lowercase=lowers, strip_accents=strips)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return LibraryEncoder(library)


def unigram_encoder(file: GGUFFile, words: Vocabulary, *, add_space_prefix: bool) -> LibraryEncoder:
    """Raises BadModelFile without scores, for one that is infinite, or for a table of characters
    that is none."""
    if words.scores is None:
        limit = "a 't5' tokenizer weighs tokens by them"
        raise BadModelFile(file.path, "tokenizer.ggml.scores", MISSING, limit)
    apart = set(range(len(words.texts))) - set(words.mergeable().values())
    scored = [
        # No text has a blank any more where tokens are looked for: a mark is never made of letters.
        (f" {index}" if index in apart else text, float(score))
        for index, (text, score) in enumerate(zip(words.texts, words.scores, strict=True))
    ]
    cleaning = _cleaning(file)

    def library(scheme: str) -> LibraryTokenizer:
        tokenizer = LibraryTokenizer(Unigram(scored, _unknown(file, words), byte_fallback=False))
        tokenizer.normalizer = cleaning
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, prepend_scheme=scheme)
        return tokenizer

    plain = library("never")
    return LibraryEncoder(library("always") if add_space_prefix else plain, plain)


def _cleaning(file: GGUFFile) -> Any:
    """What happens to characters first, and to blanks in a row."""
    steps: list[Any] = []
    key = "tokenizer.ggml.precompiled_charsmap"
    if key in file.metadata:
        table = file.numbers(key)
        if table.dtype.itemsize != 1 or len(table) > MAX_CHARSMAP_BYTES:
            limit = f"must be at most {MAX_CHARSMAP_BYTES} bytes"
            raise BadModelFile(file.path, f"{key} length", table.nbytes, limit)
        try:
            steps.append(normalizers.Precompiled(np.ascontiguousarray(table).tobytes()))
        except Exception as error:  # the library has no class of its own for it
            limit = f"it is no table of characters ({error})"
            raise BadModelFile(file.path, key, f"{len(table)} bytes", limit) from None
    if file.flag("tokenizer.ggml.remove_extra_whitespaces", True):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    return normalizers.Sequence(steps)


def _unknown(file: GGUFFile, words: Vocabulary) -> int:
    if "unknown" not in words.roles:
        limit = "a model of this tokenizer needs it"
        raise BadModelFile(file.path, "tokenizer.ggml.unknown_token_id", MISSING, limit)
    return words.roles["unknown"]


def _piece_of(text: str) -> str:
    """A token as the library has it."""
    begins_word = text.startswith(BLANK) and len(text) > 1
    return text[1:] if begins_word else _GOES_ON + text
