"""Reads and checks the vocabulary of a GGUF file and the roles of its tokens; encodes nothing.

Keys: GGUF specification, `tokenizer.ggml.*`. The texts that give a token its role and the default
ids are those that `src/llama-vocab.cpp` of llama.cpp gathers.
"""

from __future__ import annotations

import enum
import logging
import re
from dataclasses import dataclass, field

import numpy as np

from hypocenter.base.errors import BadModelFile
from hypocenter.conversation.thoughts import marks_of_thoughts
from hypocenter.model.gguf.file import GGUFFile

_log = logging.getLogger("hypocenter.model")
MAX_TOKENS = 1 << 21
MAX_TOKEN_BYTES = 64 * 1024
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenKind(enum.IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    }
)
# They open a turn. A model that writes one speaks for somebody else, and has answered: first those
# that a role follows, then those of others than the assistant. Not `<|start|>` of gpt-oss nor
# `<|assistant|>` of GLM-4, which begin another message of the same answer.
_TURN_TEXTS = frozenset(
    {
        "<|im_start|>",
        "<start_of_turn>",
        "<|start_header_id|>",
        "<|header_start|>",
        "<|start_of_role|>",
        "<|START_OF_TURN_TOKEN|>",
        "<|turn>",
        "<|user|>",
        "<|system|>",
        "<|observation|>",
        "<|User|>",
        "<｜User｜>",
        "<|im_user|>",
        "<|im_system|>",
        "<|prompter|>",
        "[INST]",
    }
)
# Marks by their form, as llama.cpp's converter tells them (`does_token_look_special`).
_MARK = re.compile(r"<\|[^<>|\s]{1,60}\|>|<｜[^<>｜\s]{1,60}｜>")
# Fill-in-the-middle tokens, by the metadata key that names them or else by their text.
_INFILL_TEXTS = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> "
    "<|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> "
    "<|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> "
    "<|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
_INFILL_ENDS = ("fim_pad", "fim_rep", "fim_sep")
# gpt-oss writes its channels with these, Gemma 4 channels and calls with the others: control tokens
# that are shown. llama.cpp would also read them in the text of a user; we do not.
_VISIBLE_TEXTS = (
    "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>",
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<tool_response|>", '<|"|>',
)  # fmt: skip
# The format spells it "seperator".
_ROLES = (
    "bos", "cls", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask",
    *_INFILL_TEXTS,
)  # fmt: skip
#: Those by which texts begin and answers end.
_NEEDED_ROLES = frozenset({"bos", "eos", "eot", "eom"})
#: What first files call them.
_OLD_ROLES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
#: Of files that name none, by their form.
_DEFAULT_ROLES = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102},
    "t5": {"eos": 1, "unknown": 2},
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model and what each is for. All ids are below `len(texts)`.

    `ids`: text to id, without empty texts. `scores`: f32 [num_tokens], None when the file has none.
    `guarded`: ids that text may name only when asked to (parse_special). `hidden`: those of them
    that are not shown when special tokens are skipped.
    `end_ids`: what ends an answer. `turn_ids`: what opens another's turn.
    """

    texts: list[str]
    ids: dict[str, int]
    kinds: np.ndarray  # i32 [num_tokens]
    scores: np.ndarray | None
    roles: dict[str, int]
    guarded: frozenset[int] = field(default=frozenset())
    hidden: frozenset[int] = field(default=frozenset())
    end_ids: frozenset[int] = field(default=frozenset())
    turn_ids: frozenset[int] = field(default=frozenset())

    def mergeable(self) -> dict[str, int]:
        """The tokens that merging may make: by their kind no control or byte tokens, and Unicode.

        A token that is guarded for its text alone may be made: to such a model `</s>` is a word.
        """
        kinds = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.BYTE)
        apart = set(np.flatnonzero(np.isin(self.kinds, kinds)).tolist())
        ids = {text: index for text, index in self.ids.items() if index not in apart}
        try:
            "".join(ids).encode()
        except UnicodeEncodeError:
            return {text: index for text, index in ids.items() if _is_unicode(text)}
        return ids


def read_vocabulary(file: GGUFFile, model: str) -> Vocabulary:
    """The vocabulary of `file`, whose `tokenizer.ggml.model` is `model`.

    Raises BadModelFile: no tokens or too many, a token that is too long or occurs twice, arrays of
    other lengths, a kind that is not defined, a score that is no number, a special id outside.
    """
    texts = _read_texts(file)
    ids = {text: index for index, text in enumerate(texts) if text}
    if len(ids) != len(texts) - texts.count(""):
        twice = next(text for index, text in enumerate(texts) if text and ids[text] != index)
        raise _bad_field(file, "tokens", twice, "a token may occur only once")
    kinds = _read_kinds(file, len(texts))
    for index in np.flatnonzero(kinds == TokenKind.BYTE).tolist():
        if not BYTE_TOKEN.fullmatch(texts[index]):
            limit = "a byte token must be named <0x00> to <0xFF>"
            raise _bad_field(file, f"token {index}", texts[index], limit)
    _retype_marks(texts, kinds)
    scores = _read_scores(file, len(texts))
    roles = _read_roles(file, len(texts), _DEFAULT_ROLES.get(model, {}))
    return _assign(Vocabulary(texts, ids, kinds, scores, roles))


def _read_texts(file: GGUFFile) -> list[str]:
    tokens = file.strings("tokenizer.ggml.tokens")
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise _bad_field(
            file, "number of tokens", len(tokens), f"it must be from 1 to {MAX_TOKENS}"
        )
    texts = list(tokens)
    # A character takes 4 bytes at most, so only long texts need counting.
    for index, text in enumerate(texts):
        if len(text) * 4 > MAX_TOKEN_BYTES:
            num_bytes = len(text.encode("utf-8", "surrogateescape"))
            if num_bytes > MAX_TOKEN_BYTES:
                limit = f"the limit is {MAX_TOKEN_BYTES}"
                raise _bad_field(file, f"bytes of token {index}", num_bytes, limit)
    return texts


def _read_kinds(file: GGUFFile, num_tokens: int) -> np.ndarray:
    if "tokenizer.ggml.token_type" not in file.metadata:
        return np.full(num_tokens, TokenKind.NORMAL, np.int32)
    kinds = file.numbers("tokenizer.ggml.token_type")
    _check_length(file, "token_type", len(kinds), num_tokens)
    wrong = np.flatnonzero((kinds < min(TokenKind)) | (kinds > max(TokenKind)))
    if wrong.size:
        field_name = f"token_type of token {wrong[0]}"
        raise _bad_field(file, field_name, kinds[wrong[0]].item(), "it must be from 0 to 6")
    return kinds.astype(np.int32)


def _retype_marks(texts: list[str], kinds: np.ndarray) -> None:
    """Make control tokens of marks that a file types as words; `kinds` is written to.

    Early converters typed all tokens so. A mark that were read as letters would be none to the
    model, and one that is a word could be written by whoever types its text. llama.cpp does this
    with marks that end an answer, by their texts.
    """
    kinds_of_words = (TokenKind.NORMAL, TokenKind.USER_DEFINED)
    for index in np.flatnonzero(np.isin(kinds, kinds_of_words)).tolist():
        text = texts[index]
        if not text.startswith(("<", "[")):
            continue
        is_mark = kinds[index] == TokenKind.NORMAL and _MARK.fullmatch(text)
        if text in _TURN_TEXTS or is_mark:
            kinds[index] = TokenKind.CONTROL


def _read_scores(file: GGUFFile, num_tokens: int) -> np.ndarray | None:
    if "tokenizer.ggml.scores" not in file.metadata:
        return None
    scores = file.numbers("tokenizer.ggml.scores")
    _check_length(file, "scores", len(scores), num_tokens)
    scores = scores.astype(np.float32)
    wrong = np.flatnonzero(np.isnan(scores))
    if wrong.size:
        raise _bad_field(file, f"score of token {wrong[0]}", "not a number", "scores are compared")
    return scores


def _read_roles(file: GGUFFile, num_tokens: int, defaults: dict[str, int]) -> dict[str, int]:
    """Role (`bos`, `eos`, ...) to token id, for the roles that the file or its format names.

    An id beyond the tokens is passed over, with a warning, for a role that decides nothing here.
    """
    roles = {role: index for role, index in defaults.items() if index < num_tokens}
    for role in _ROLES:
        keys = (f"tokenizer.ggml.{name}_token_id" for name in (role, _OLD_ROLES.get(role, role)))
        key = next((key for key in keys if key in file.metadata), None)
        if key is None:
            continue
        index = file.metadata[key]
        is_outside = type(index) is int and not 0 <= index < num_tokens
        if is_outside and role not in _NEEDED_ROLES:
            text = "%s: %s is %s, but there are %d tokens; it is passed over"
            _log.warning(text, file.path.name, key, index, num_tokens)
        else:
            roles[role] = file.integer(key, low=0, high=num_tokens - 1)
    return roles


def _assign(words: Vocabulary) -> Vocabulary:
    """`words` with guarded, hidden and end ids: from kinds, from roles, and from known texts."""
    ids, roles = words.ids, words.roles
    kinds = words.kinds
    guarded = set(
        np.flatnonzero((kinds == TokenKind.CONTROL) | (kinds == TokenKind.UNKNOWN)).tolist()
    )
    ends = {ids[text] for text in _END_TEXTS if text in ids}
    guarded |= ends
    for role, texts in _INFILL_TEXTS.items():
        found = [ids[text] for text in texts.split() if text in ids]
        index = roles.get(role, min(found, default=None))
        if role not in roles and index is not None:
            guarded.add(index)
        if role in _INFILL_ENDS and index is not None:
            ends.add(index)
    ends |= {roles[role] for role in ("eos", "eot", "eom") if role in roles}
    visible = {ids[text] for text in _VISIBLE_TEXTS if text in ids}
    # In most vocabularies these are user-defined, and no control tokens at all.
    visible |= guarded & {ids[text] for text in marks_of_thoughts() if text in ids}
    end_texts = {words.texts[index] for index in ends}
    if {"<|return|>", "<|call|>"} <= end_texts or (
        "<|flush|>" in end_texts and end_texts & {"<|call|>", "<|calls|>"}
    ):
        # Answers of these models have several messages, and <|end|> ends only one of them.
        ends.discard(ids.get("<|end|>", -1))
        visible |= {ids["<|end|>"]} if "<|end|>" in ids else set()
    if end_texts & {"<|tool_response>", "<|plamo:eos|>"} and "</s>" in ids:
        ends.discard(ids["</s>"])
        guarded.discard(ids["</s>"])
    hidden = guarded - visible
    return Vocabulary(
        words.texts,
        ids,
        kinds,
        words.scores,
        roles,
        frozenset(guarded | visible),
        frozenset(hidden),
        frozenset(ends),
        frozenset(ids[text] for text in _TURN_TEXTS if text in ids) & guarded,
    )


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _check_length(file: GGUFFile, name: str, length: int, num_tokens: int) -> None:
    if length != num_tokens:
        limit = f"the file has {num_tokens} tokens"
        raise _bad_field(file, f"length of tokenizer.ggml.{name}", length, limit)


def _bad_field(file: GGUFFile, name: str, value: object, limit: str) -> BadModelFile:
    return BadModelFile(file.path, name, value, limit, "convert the model again")
