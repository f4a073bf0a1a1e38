"""Encodes text by ranked merges over its characters, blanks among them; reads no file.

This is `tokenizer.ggml.model` = gemma4, and gpt2 with `tokenizer.ggml.pre` = sarvam-moe. As in
SentencePiece a blank is U+2581 and a character without a token is spelled in byte tokens; merges
have ranks, as those of byte BPE. Merges stay within lines, and in gemma4 a run of line feeds that
is a token is never merged (llama.cpp, `llm_tokenizer_bpe_session`).
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import BPE

from hypocenter.base.errors import TokenizerError
from hypocenter.model.text.spm import BLANK
from hypocenter.model.text.vocabulary import BYTE_TOKEN, TokenKind, Vocabulary

_LINES = re.compile(r"\n+|[^\n]+")


class BlankPairEncoder:
    """Text to ids, through the `tokenizers` library."""

    def __init__(
        self, words: Vocabulary, merges: list[tuple[str, str]], *, keeps_breaks: bool
    ) -> None:
        """`keeps_breaks`: a run of line feeds that is a token is taken as it stands."""
        self._ids, self._keeps_breaks = words.mergeable(), keeps_breaks
        kinds = words.kinds.tolist()
        # Converters of gpt2 files know no byte tokens: to them these are words. Gemma's do.
        of_bytes = (TokenKind.BYTE,) if keeps_breaks else (TokenKind.BYTE, TokenKind.NORMAL)
        bytes_of_text = {
            text: index
            for text, index in words.ids.items()
            if kinds[index] in of_bytes and BYTE_TOKEN.fullmatch(text)
        }
        self._spelled = frozenset(int(text[3:5], 16) for text in bytes_of_text)
        self._library = LibraryTokenizer(
            BPE(vocab=self._ids | bytes_of_text, merges=merges, byte_fallback=True)
        )

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Ids of `text`; raises TokenizerError for a character that the vocabulary cannot spell."""
        text = text.replace(" ", BLANK)
        self._check(text)
        found: list[int] = []
        for line in _LINES.findall(text):
            is_kept = self._keeps_breaks and line[0] == "\n"
            whole = self._ids.get(line) if is_kept else None
            if whole is None:
                found += self._library.encode(line, add_special_tokens=False).ids
            else:
                found.append(whole)
        return found

    def _check(self, text: str) -> None:
        for char in set(text).difference(self._ids):
            if not self._spelled.issuperset(char.encode()):
                raise TokenizerError(
                    f"character {char!r} (U+{ord(char):04X}) has no token, and the vocabulary "
                    "lacks the byte tokens to spell it; leave it out"
                )
