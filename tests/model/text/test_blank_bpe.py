"""The form gemma4, and sarvam-moe, against llama.cpp's rules, written out here, and the library.

llama.cpp itself compares in `tests/peer`, on the vocabulary of a family.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Replace

from hypocenter.base.errors import BadModelFile, BadSetting, TokenizerError
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.text.tokenizer import Tokenizer, load_tokenizer

_TOOL = runpy.run_path(str(ROOT / "tools" / "tokenizer_fixtures.py"))
TEXTS: list[str] = json.loads((ROOT / "tests/fixtures/tokenizers/texts.json").read_text())
#: With their kinds. Files have channels as user-defined tokens.
MARKS = {"<|channel>": 4, "<channel|>": 4, "<turn|>": 3, "<|think|>": 3}


@functools.cache
def vocabulary(num_merges: int = 300) -> dict[str, Any]:
    """Most frequent pairs of the texts, merged one after the other; rare characters have none."""
    words = [list(line) for text in TEXTS for line in text.replace(" ", "▁").split("\n") if line]
    chars = Counter(itertools.chain(*words))
    # Of line feeds four are a token that no merge makes.
    tokens = [char for char, number in chars.most_common(120) if "\0" not in char]
    tokens += ["\n" * number for number in (1, 2, 3, 4)]
    merges = [("\n", "\n"), ("\n\n", "\n")]
    known = set(tokens)
    for _ in range(num_merges):
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        pair = next(
            pair for pair, _ in pairs.most_common()
            if pair[0] in known and pair[1] in known and "".join(pair) not in known
        )  # fmt: skip
        merges.append(pair)
        tokens.append("".join(pair))
        known.add(tokens[-1])
        words = [_merged(word, pair) if pair[0] in word else word for word in words]
    plain = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [3, 3, 3, 2] + [6] * 256 + [1] * len(tokens)
    return {
        "tokens": [*plain, *tokens, *MARKS],
        "kinds": [*kinds, *MARKS.values()],
        "merges": [" ".join(pair) for pair in merges],
        "roles": {"bos": 2, "eos": 1, "unknown": 3, "padding": 0},
    }


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    made: list[str] = []
    at = 0
    while at < len(word):
        is_pair = tuple(word[at : at + 2]) == pair
        made.append("".join(pair) if is_pair else word[at])
        at += 2 if is_pair else 1
    return made


@functools.cache
def ids_of_texts() -> dict[str, int]:
    return {text: index for index, text in enumerate(vocabulary()["tokens"])}


@functools.cache
def ranks_of_merges() -> dict[tuple[str, ...], int]:
    merges = [*enumerate(vocabulary()["merges"])]
    return {tuple(line.split(" ")): rank for rank, line in reversed(merges)}


def _reference(text: str, *, keeps_breaks: bool = True) -> list[int]:
    """Lines and runs of line feeds; the pair of lowest rank first, the leftmost of equals."""
    ids: list[int] = []
    for line in re.findall(r"\n+|[^\n]+", text.replace(" ", "▁")):
        is_kept = keeps_breaks and line[0] == "\n" and line in ids_of_texts()
        word = [line] if is_kept else list(line)
        while True:
            ranked = [
                (ranks_of_merges()[pair], at)
                for at, pair in enumerate(itertools.pairwise(word))
                if pair in ranks_of_merges()
            ]
            if not ranked:
                break
            _, at = min(ranked)
            word[at : at + 2] = [word[at] + word[at + 1]]
        for symbol in word:
            spelled = [ids_of_texts()[f"<0x{byte:02X}>"] for byte in symbol.encode()]
            ids += [ids_of_texts()[symbol]] if symbol in ids_of_texts() else spelled
    return ids


def _load(folder: Path, *, model: str = "gemma4", **changes: Any) -> Tokenizer:
    path = folder / "vocabulary.gguf"
    extra = changes.pop("extra", {})
    _TOOL["write_vocabulary"](path, {**vocabulary(), **changes}, model, extra)
    with open_gguf(path) as file:
        return load_tokenizer(file)


def _texts() -> list[str]:
    """Those of the fixtures, and random ones of their characters with long runs of line feeds."""
    source = random.Random(5)
    chars = [*dict.fromkeys("".join(TEXTS)), *"  \n\n\n\n"]
    return [*TEXTS, *("".join(source.choices(chars, k=60)) for _ in range(40)), "a\n\n\n\n\n\n\nb"]


def test_ids_are_those_of_the_rules(tmp_path: Path) -> None:
    tokenizer = _load(tmp_path)
    for text in _texts():
        assert tokenizer.encode(text, add_special=False) == _reference(text), text
    assert tokenizer.encode("a") == [2, *_reference("a")]


def test_ids_are_those_of_the_library(tmp_path: Path) -> None:
    """As the model's own tokenizer.json has it: blanks replaced, nothing cut beforehand."""
    tokenizer = _load(tmp_path)
    in_words = {text: index for text, index in ids_of_texts().items() if text not in MARKS}
    merges = [(left, right) for left, right in ranks_of_merges()]
    merges.sort(key=lambda pair: ranks_of_merges()[pair])
    library = LibraryTokenizer(
        BPE(vocab=in_words, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    library.normalizer = Replace(" ", "▁")
    for text in _texts():
        if "\n\n\n\n" in text:
            continue  # real vocabularies have a merge for each such token
        assert tokenizer.encode(text, add_special=False) == library.encode(text).ids, text


def test_any_text_comes_back(tmp_path: Path) -> None:
    tokenizer = _load(tmp_path)
    for text in _texts():
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_marks_of_channels_are_shown_and_no_text_of_a_user_makes_them(tmp_path: Path) -> None:
    tokenizer = _load(tmp_path)
    marks = [ids_of_texts()["<|channel>"], ids_of_texts()["<channel|>"]]
    assert tokenizer.encode("<|channel><channel|>", add_special=False, parse_special=True) == marks
    assert not {*marks} & {*tokenizer.encode("<|channel><channel|>")}
    assert tokenizer.decode([*marks, ids_of_texts()["<turn|>"]]) == "<|channel><channel|>"
    assert ids_of_texts()["<turn|>"] in tokenizer.end_ids


def test_control_tokens_that_mark_thoughts_are_shown(tmp_path: Path) -> None:
    known = copy.deepcopy(vocabulary())
    for text in ("<think>", "</think>"):
        known["tokens"].append(text)
        known["kinds"].append(3)
    ids = {text: index for index, text in enumerate(known["tokens"])}
    tokenizer = _load(tmp_path, **known)
    marks = [ids["<think>"], ids["</think>"]]
    assert tokenizer.decode([*marks, ids["<turn|>"]]) == "<think></think>"
    assert not {*marks} & {*tokenizer.encode("<think></think>")}


def test_bos_begins_every_text_whatever_the_file_says(tmp_path: Path) -> None:
    assert _load(tmp_path, extra={"tokenizer.ggml.add_bos_token": False}).add_bos
    with pytest.raises(BadModelFile, match="bos_token_id"):
        _load(tmp_path, roles={"eos": 1})


def test_what_cannot_be_spelled_is_refused(tmp_path: Path) -> None:
    tokens = [text.replace("<0x", "<0y") for text in vocabulary()["tokens"]]
    kinds = [1 if kind == 6 else kind for kind in vocabulary()["kinds"]]
    tokenizer = _load(tmp_path, tokens=tokens, kinds=kinds)
    assert tokenizer.encode("a", add_special=False) == [ids_of_texts()["a"]]
    with pytest.raises(TokenizerError, match=r"U\+1F9FF\) has no token"):
        tokenizer.encode("\U0001f9ff")


def test_it_has_no_pre_tokenizer(tmp_path: Path) -> None:
    _load(tmp_path)
    with open_gguf(tmp_path / "vocabulary.gguf") as file, pytest.raises(BadSetting, match="leave"):
        load_tokenizer(file, "qwen2")


@pytest.mark.parametrize("has_kinds", [True, False])
def test_sarvam_merges_line_feeds_too_and_has_no_bos(tmp_path: Path, *, has_kinds: bool) -> None:
    """Its files are gpt2 files, whose converters take byte tokens for words."""
    kinds = [kind if has_kinds or kind != 6 else 1 for kind in vocabulary()["kinds"]]
    of_sarvam = {"tokenizer.ggml.pre": "sarvam-moe"}
    tokenizer = _load(tmp_path, model="gpt2", kinds=kinds, extra=of_sarvam)
    for text in _texts():
        ids = _reference(text, keeps_breaks=False)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text
    assert not tokenizer.add_bos
    kept = [_reference(text) for text in _texts()]
    assert kept != [_reference(text, keeps_breaks=False) for text in _texts()]
