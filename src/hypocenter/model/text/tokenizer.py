"""Turns text into token ids and back with the tokenizer that a GGUF file carries; owns no template.

Forms: byte BPE (`gpt2`), run by the `tokenizers` library, the score-driven `llama` form, and those
of encoders (`word_pieces.py`).
Ids equal llama.cpp's, except that text never becomes a control token by merging. What is wrong or
unknown is refused: there is no fallback that would tokenise differently from the model's training.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from tokenizers import Regex
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from hypocenter.base.errors import (
    MISSING,
    BadModelFile,
    BadSetting,
    TokenizerError,
    UnsupportedModel,
    UsageError,
)
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.text.blank_bpe import BlankPairEncoder
from hypocenter.model.text.pretokenizers import (
    OF_EMBEDDINGS,
    PRE_TOKENIZERS,
    UNCUT,
    PreTokenizer,
    known_names,
)
from hypocenter.model.text.special_texts import SpecialTexts
from hypocenter.model.text.spm import BLANK, ScoreEncoder
from hypocenter.model.text.vocabulary import BYTE_TOKEN, TokenKind, Vocabulary, read_vocabulary
from hypocenter.model.text.word_pieces import unigram_encoder, word_piece_encoder

#: More text than any context holds, and less than makes the regex engine give up (10^7 retries).
MAX_TEXT_CHARS = 1 << 22
MAX_MERGES = 1 << 22


#: Up to so many characters a text takes no longer than a step.
_SHORT_CHARS = 1 << 14


class TextEncoder(Protocol):
    """Plain text to ids; `after_special`: it begins the text or follows a special token."""

    def encode(self, text: str, *, after_special: bool) -> list[int]: ...


def load_tokenizer(file: GGUFFile, pre: str | None = None) -> Tokenizer:
    """The tokenizer of `file`; `pre` overrides its `tokenizer.ggml.pre`.

    Raises UnsupportedModel for another form or an unknown `pre`, UsageError for an unknown
    override, BadModelFile for a vocabulary that contradicts itself.
    """
    model = file.text("tokenizer.ggml.model")
    if model in _WITHOUT_PRE:
        if pre is not None:
            limit = f"{file.path} has a {model!r} tokenizer and no pre-tokenizer; leave it out"
            raise BadSetting("tokenizer_pre", pre, limit)
        return _WITHOUT_PRE[model](file)
    if model == "gpt2":
        if (pre or file.text("tokenizer.ggml.pre", None)) in UNCUT:
            return _load_uncut(file)
        return _load_gpt2(file, _choose_pre(file, pre))
    limit = (
        "hypocenter runs 'gpt2' (byte BPE), 'llama' (SentencePiece with scores), 'gemma4', 'bert' "
        "(WordPiece) and 't5' (Unigram)"
    )
    if model in OF_EMBEDDINGS:
        limit = known_names(model)
    raise UnsupportedModel(file.path, "tokenizer.ggml.model", model, limit)


class Tokenizer:
    """Text to ids and back. Not bound to the file it came from, which may be closed."""

    def __init__(
        self,
        words: Vocabulary,
        encoder: TextEncoder,
        pieces: list[bytes],
        *,
        add_bos: bool,
        add_eos: bool,
        add_space_prefix: bool = False,
        strip_after: frozenset[int] = frozenset(),
    ) -> None:
        #: What stands between the two texts of a pair; empty: the model has no pairs.
        self.between: tuple[int, ...] = ()
        self.vocab_size = len(words.texts)
        self.bos_id = words.roles.get("bos")
        self.eos_id = words.roles.get("eos")
        self.end_ids, self.turn_ids = words.end_ids, words.turn_ids
        #: What `encode` reads as one token only with `parse_special`: ids, and their texts.
        self.guarded = words.guarded
        self.control_ids = {words.texts[i]: i for i in sorted(words.guarded) if words.texts[i]}
        self.control_texts = tuple(sorted(self.control_ids))
        self.add_bos = add_bos
        self.add_eos = add_eos
        self._encoder = encoder
        self._hidden = words.hidden
        self._pieces = pieces
        self._add_space_prefix = add_space_prefix
        self._special_texts = SpecialTexts(words, strip_after)

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        at_start: bool = True,
    ) -> list[int]:
        """Ids of `text`.

        `add_special` adds BOS and EOS where the model wants them. `parse_special` reads control
        tokens that stand in the text as such; leave it off for text of a user. User-defined tokens
        are always read. Say `at_start` False when the text goes on after another, so that the blank
        that some models begin with stays away. Raises TokenizerError for text that is too long, is
        not valid Unicode, or has a character without a token.
        """
        _check_text(text)
        ids: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        after_special = at_start
        for part in self._special_texts.split(text, parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encoder.encode(part, after_special=after_special)
            after_special = isinstance(part, int)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Ids of two texts that are read together, and how many of them are the first one's, what
        stands between included. Raises UsageError for a model that has no such pairs."""
        if not self.between:
            raise UsageError("the tokenizer of this model joins no two texts")
        begin = self.encode(first, add_special=False)
        if self.add_bos and self.bos_id is not None:
            begin.insert(0, self.bos_id)
        begin += self.between
        end = self.encode(second, add_special=False)
        return begin + end + ([] if self.eos_id is None else [self.eos_id]), len(begin)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids` as a `Detokenizer` gives it; raises TokenizerError for an id outside."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.flush()

    def piece(self, token_id: int) -> bytes:
        """The bytes that a token stands for, not always UTF-8; special tokens give their name."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError.outside(token_id, self.vocab_size)
        return self._pieces[token_id]

    def shown_piece(self, token_id: int) -> bytes:
        """The bytes that a token of the model adds to a text.

        None for a special token, nor for one of those rows that some models have beyond their
        vocabulary.
        """
        is_shown = token_id < self.vocab_size and not self.is_special(token_id)
        return self.piece(token_id) if is_shown else b""

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out; False for an id outside the vocabulary."""
        return token_id in self._hidden

    def detokenizer(self, *, skip_special: bool = True, at_start: bool = True) -> Detokenizer:
        """A decoder for ids that come one by one.

        `at_start`: the first token shown begins a text, so the blank that encoding put before it is
        taken off again. Say False when the ids continue a text.
        """
        strip_blank = at_start and self._add_space_prefix
        return Detokenizer(self, skip_special=skip_special, strip_blank=strip_blank)


class Detokenizer:
    """Ids one by one to text, whole characters only."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool, strip_blank: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._strip_blank = strip_blank
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that became whole with this token; bytes that are no UTF-8 become U+FFFD.

        Raises TokenizerError for an id outside the vocabulary.
        """
        piece = self._tokenizer.piece(token_id)
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        if self._strip_blank:
            piece = piece.removeprefix(b" ")
            self._strip_blank = False
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What is held back: U+FFFD for a character that never became whole, else nothing."""
        return self._decoder.decode(b"", final=True)


class BytePairEncoder:
    """Byte BPE through the `tokenizers` library."""

    def __init__(
        self, words: Vocabulary, merges: list[tuple[str, str]], pre: PreTokenizer, path: object
    ) -> None:
        ids = words.mergeable()
        self._missing = frozenset(
            byte for char, byte in _BYTE_OF_CHAR.items() if char not in ids and byte in _UTF8_BYTES
        )
        self._path = path
        self._library = LibraryTokenizer(
            BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges)
        )
        splits = [Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
        self._library.pre_tokenizer = PreTokenizers([*splits, to_bytes])

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """Ids of `text`; raises TokenizerError for a byte that the vocabulary cannot spell."""
        if self._missing and (missing := self._missing.intersection(text.encode())):
            raise TokenizerError(
                f"byte 0x{min(missing):02X} of the text has no token: the vocabulary of "
                f"{self._path} lacks {len(self._missing)} bytes; leave that character out"
            )
        # Of a batch other threads run meanwhile, a step of other requests for one.
        if len(text) > _SHORT_CHARS:
            [found] = self._library.encode_batch_fast([text], add_special_tokens=False)
        else:
            found = self._library.encode(text, add_special_tokens=False)
        ids: list[int] = found.ids
        return ids


def _choose_pre(file: GGUFFile, override: str | None) -> PreTokenizer:
    if override is not None:
        if override not in PRE_TOKENIZERS:
            raise BadSetting("tokenizer_pre", override, known_names(override))
        return PRE_TOKENIZERS[override]
    name = file.text("tokenizer.ggml.pre", None)
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    value = MISSING if name is None else name
    way_out = "say by tokenizer_pre which one the model was trained with"
    if name in OF_EMBEDDINGS:
        raise UnsupportedModel(file.path, "tokenizer.ggml.pre", value, known_names(name))
    error = UnsupportedModel(
        file.path, "tokenizer.ggml.pre", value, known_names(name or ""), way_out
    )
    error.settings = ("tokenizer_pre",)
    raise error


def _load_gpt2(file: GGUFFile, pre: PreTokenizer) -> Tokenizer:
    words = read_vocabulary(file, "gpt2")
    encoder = BytePairEncoder(words, _read_merges(file, words), pre, file.path)
    add_bos, add_eos = _read_additions(file, words, pre.add_bos)
    pieces = _pieces(words, _bytes_of_chars)
    return Tokenizer(words, encoder, pieces, add_bos=add_bos, add_eos=add_eos)


def _load_llama(file: GGUFFile) -> Tokenizer:
    # remove_extra_whitespaces is not read: llama.cpp heeds it for T5 alone, and equal ids matter.
    words = read_vocabulary(file, "llama")
    if words.scores is None:
        limit = "a 'llama' tokenizer merges by them"
        raise BadModelFile(file.path, "tokenizer.ggml.scores", MISSING, limit)
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    add_bos, add_eos = _read_additions(file, words, True)
    return Tokenizer(
        words,
        ScoreEncoder(words, add_space_prefix=prefix),
        _pieces(words, _bytes_of_text),
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=prefix,
        strip_after=_strip_after(file, words),
    )


def _load_gemma4(file: GGUFFile) -> Tokenizer:
    words = read_vocabulary(file, "gemma4")
    # BOS begins every text, whatever the file says: first files said wrongly that none does.
    if "bos" not in words.roles:
        limit = "every text of this model has a BOS token added"
        raise BadModelFile(file.path, "tokenizer.ggml.bos_token_id", MISSING, limit)
    _, add_eos = _read_additions(file, words, True)
    encoder = BlankPairEncoder(words, _read_merges(file, words), keeps_breaks=True)
    pieces = _pieces(words, _bytes_of_text)
    return Tokenizer(words, encoder, pieces, add_bos=True, add_eos=add_eos)


def _load_uncut(file: GGUFFile) -> Tokenizer:
    words = read_vocabulary(file, "gpt2")
    encoder = BlankPairEncoder(words, _read_merges(file, words), keeps_breaks=False)
    add_bos, add_eos = _read_additions(file, words, False)
    pieces = _pieces(words, _bytes_of_word)
    return Tokenizer(words, encoder, pieces, add_bos=add_bos, add_eos=add_eos)


def _load_bert(file: GGUFFile) -> Tokenizer:
    """A text is a class, its tokens and a separator: what others call BOS and EOS."""
    words = read_vocabulary(file, "bert")
    named = {role: words.roles.get(role) for role in ("cls", "seperator")}
    roles = dict(words.roles)
    # Older files name BOS alone, and newer ones may say of it what chats need.
    if named["cls"] is not None:
        roles["bos"] = named["cls"]
    if named["seperator"] is not None:
        roles["eos"] = named["seperator"]
    words = replace(words, roles=roles)
    add_bos, _ = _read_additions(file, words, True)
    if "eos" not in roles:
        limit = "every text of this model ends with it"
        raise BadModelFile(file.path, "tokenizer.ggml.seperator_token_id", MISSING, limit)
    adds_end = file.flag("tokenizer.ggml.add_sep_token", True)
    tokenizer = Tokenizer(
        words,
        word_piece_encoder(file, words),
        _pieces(words, _bytes_of_text),
        add_bos=add_bos,
        add_eos=adds_end,
        add_space_prefix=True,
    )
    tokenizer.between = (roles["eos"],)
    return tokenizer


def _load_t5(file: GGUFFile) -> Tokenizer:
    words = read_vocabulary(file, "t5")
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    add_bos, add_eos = _read_additions(file, words, False)
    end = words.roles.get("eos")
    tokenizer = Tokenizer(
        words,
        unigram_encoder(file, words, add_space_prefix=prefix),
        _pieces(words, _bytes_of_text),
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=prefix,
    )
    tokenizer.between = () if end is None else (end, words.roles.get("seperator", end))
    return tokenizer


_WITHOUT_PRE = {
    "llama": _load_llama,
    "gemma4": _load_gemma4,
    "bert": _load_bert,
    "t5": _load_t5,
}


def _read_merges(file: GGUFFile, words: Vocabulary) -> list[tuple[str, str]]:
    """The merges that text can reach, first to last; each is checked to make a known token."""
    lines = file.strings("tokenizer.ggml.merges")
    if len(lines) > MAX_MERGES:
        limit = f"the limit is {MAX_MERGES}"
        raise BadModelFile(file.path, "number of merges", len(lines), limit)
    ids, mergeable = words.ids, words.mergeable()
    merges: dict[tuple[str, str], None] = {}  # a dict, for a pair that comes twice keeps its rank
    for rank, line in enumerate(lines):
        left, _, right = line.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            limit = "it must be two tokens, a blank between them, that make a third"
            raise BadModelFile(file.path, f"merge {rank}", line, limit, "convert the model again")
        if left in mergeable and right in mergeable and left + right in mergeable:
            merges[left, right] = None
    return list(merges)


def _read_additions(file: GGUFFile, words: Vocabulary, bos_default: bool) -> tuple[bool, bool]:
    """(add_bos, add_eos); raises BadModelFile when a token is to be added that nobody named."""
    add_bos = file.flag("tokenizer.ggml.add_bos_token", bos_default)
    add_eos = file.flag("tokenizer.ggml.add_eos_token", False)
    for role, wanted in (("bos", add_bos), ("eos", add_eos)):
        if wanted and role not in words.roles:
            limit = f"every text of this model has a {role.upper()} token added"
            raise BadModelFile(file.path, f"tokenizer.ggml.{role}_token_id", MISSING, limit)
    return add_bos, add_eos


def _strip_after(file: GGUFFile, words: Vocabulary) -> frozenset[int]:
    """Ids of the special tokens that swallow the white space behind them: those of Phi-3.

    The file does not carry this; llama.cpp knows it by the model's name, and so do we.
    """
    name = file.text("general.name", "").lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    user_defined = (words.kinds == TokenKind.USER_DEFINED).nonzero()[0].tolist()
    kept = {words.ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
    return words.guarded.union(user_defined) - kept


def _pieces(words: Vocabulary, to_bytes: Callable[[str], bytes]) -> list[bytes]:
    """The bytes of each token; `to_bytes` turns the text of a normal one into them."""
    pieces = []
    for index, (text, kind) in enumerate(zip(words.texts, words.kinds.tolist(), strict=True)):
        if index in words.guarded or kind == TokenKind.USER_DEFINED:
            pieces.append(text.encode("utf-8", "surrogateescape"))
        elif kind == TokenKind.NORMAL:
            pieces.append(to_bytes(text))
        elif kind == TokenKind.BYTE:
            pieces.append(bytes([int(text[3:5], 16)]))
        else:  # unused and undefined tokens stand for nothing
            pieces.append(b"")
    return pieces


def _bytes_of_text(text: str) -> bytes:
    return text.replace(BLANK, " ").encode("utf-8", "surrogateescape")


def _bytes_of_word(text: str) -> bytes:
    """The same where byte tokens are words."""
    if BYTE_TOKEN.fullmatch(text):
        return bytes([int(text[3:5], 16)])
    return _bytes_of_text(text)


def _bytes_of_chars(text: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, text))
    except KeyError:  # not in the byte alphabet: added to the vocabulary as plain text
        return text.encode("utf-8", "surrogateescape")


def _byte_of_char() -> dict[str, int]:
    """The byte alphabet of GPT-2: printable bytes are themselves, the rest count up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted(set(range(256)).difference(printable))
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTE_OF_CHAR = _byte_of_char()
_UTF8_BYTES = frozenset([*range(0x00, 0xC0), *range(0xC2, 0xF5)])  # those that UTF-8 may hold


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise UsageError(f"the text is {type(text).__name__}, but must be a str")
    if len(text) > MAX_TEXT_CHARS:
        raise TokenizerError(
            f"the text has {len(text)} characters, but the limit is {MAX_TEXT_CHARS}; split it"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text holds U+{ord(text[error.start]):04X} at character {error.start}, but a "
            "surrogate alone is not valid Unicode; decode the text anew"
        ) from None
