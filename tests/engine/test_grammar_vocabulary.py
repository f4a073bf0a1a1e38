"""Masks over real vocabularies of both forms: byte BPE, and scores with blanks as `▁`."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import ROOT

from hypocenter import SamplingParams
from hypocenter.base.errors import GrammarError, UsageError
from hypocenter.engine.grammar import Grammars
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.text.tokenizer import Tokenizer, load_tokenizer

_TOOL = runpy.run_path(str(ROOT / "tools" / "tokenizer_fixtures.py"))
write_vocabulary: Callable[[Path, dict[str, Any], str, dict[str, Any]], None] = _TOOL[
    "write_vocabulary"
]
SCHEMA = SamplingParams(
    json_schema={
        "type": "object",
        "properties": {"né  me": {"type": "string"}, "list": {"type": "array"}},
        "additionalProperties": False,
    }
)
TEXTS = (
    '{"né  me": "a  b – 日本 🙂\\n", "list": [1, -2.5e3, null, {"x": []}]}',
    "{}",
    '{"list":[]}',
)


def load(folder: Path, name: str, change: Callable[[dict[str, Any]], object] = dict) -> Tokenizer:
    fixtures = ROOT / "tests" / "fixtures" / "tokenizers"
    vocabulary = json.loads((fixtures / f"{name}-vocabulary.json").read_text(encoding="utf-8"))
    change(vocabulary)
    model, extra = ("llama", {}) if name == "spm" else ("gpt2", {"tokenizer.ggml.pre": "llama-bpe"})
    path = folder / "vocabulary.gguf"
    write_vocabulary(path, vocabulary, model, extra)
    with open_gguf(path) as file:
        return load_tokenizer(file)


def bits_of(mask: Any) -> np.ndarray[Any, Any]:
    return np.unpackbits(mask.view(np.uint8), bitorder="little")


def spell(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, at_start=False)


@pytest.fixture(params=["bpe", "spm"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return load(tmp_path, request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_a_valid_text_may_be_spelled_as_the_model_would(tokenizer: Tokenizer, text: str) -> None:
    matcher = Grammars(tokenizer, tokenizer.vocab_size).matcher(SCHEMA)
    assert matcher is not None
    ids = spell(tokenizer, text)
    assert b"".join(map(tokenizer.piece, ids)) == text.encode()
    for token_id in ids[:-1]:
        assert bits_of(matcher.mask())[token_id]
        assert not matcher.accept(token_id)
    assert bits_of(matcher.mask())[ids[-1]]
    assert matcher.accept(ids[-1])


def test_tokens_at_random_make_a_valid_text(tokenizer: Tokenizer) -> None:
    random = np.random.default_rng(1)
    params = SamplingParams(grammar='start: "é 日" /[ a-zß🙂]{3,30}/ "."')
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    for _ in range(10):
        matcher = grammars.matcher(params)
        assert matcher is not None
        text, is_whole = b"", False
        while not is_whole:
            token_id = int(random.choice(bits_of(matcher.mask()).nonzero()[0]))
            assert token_id not in tokenizer.guarded
            text += tokenizer.piece(token_id)
            is_whole = matcher.accept(token_id)
        assert text.decode().startswith("é 日")
        assert text.endswith(b".")


@pytest.mark.parametrize("more", [0, 1, 31, 64, 1000])
def test_logits_beyond_the_vocabulary_and_control_tokens_are_never_allowed(
    tokenizer: Tokenizer, more: int
) -> None:
    size = tokenizer.vocab_size + more
    matcher = Grammars(tokenizer, size).matcher(SamplingParams(grammar="start: /(.|\\n)*/"))
    assert matcher is not None
    mask = matcher.mask()
    assert mask.shape == (-(-size // 32),)
    bits = bits_of(mask)
    assert not bits[tokenizer.vocab_size :].any()
    allowed = set(bits.nonzero()[0].tolist())
    assert tokenizer.guarded & allowed == tokenizer.end_ids
    spelled = {
        token_id
        for token_id in range(tokenizer.vocab_size)
        if tokenizer.piece(token_id) and token_id not in tokenizer.guarded
    }
    # Bytes that no UTF-8 text has, or that cannot begin a character, may not.
    for token_id in spelled - allowed:
        assert tokenizer.piece(token_id)[0] >= 0x80
    assert len(allowed) > 0.9 * len(spelled)


def test_fewer_logits_than_tokens_have_words_for_their_own(tokenizer: Tokenizer) -> None:
    matcher = Grammars(tokenizer, 40).matcher(SamplingParams(grammar="start: /.*/"))
    assert matcher is not None
    mask = matcher.mask()
    assert mask.shape == (2,)
    assert not bits_of(mask)[40:].any()


def test_a_control_token_is_chosen_where_the_grammar_names_it(tokenizer: Tokenizer) -> None:
    name = min(text for text in tokenizer.control_texts if text.startswith("<|"))
    (token_id,) = tokenizer.encode(name, add_special=False, parse_special=True)
    matcher = Grammars(tokenizer, tokenizer.vocab_size).matcher(
        SamplingParams(grammar=f'start: "a" {name} "b"')
    )
    assert matcher is not None
    for wanted in (*spell(tokenizer, "a"), token_id, *spell(tokenizer, "b")):
        assert bits_of(matcher.mask())[wanted]
        assert matcher.accept(wanted) == (tokenizer.piece(wanted) == b"b")


def test_a_text_that_the_vocabulary_cannot_spell_is_refused_or_fails_where_it_comes(
    tmp_path: Path,
) -> None:
    def drop_bytes(vocabulary: dict[str, Any]) -> None:
        kinds = vocabulary["kinds"]
        vocabulary["kinds"] = [5 if kind == 6 else kind for kind in kinds]  # bytes are unused

    tokenizer = load(tmp_path, "spm", drop_bytes)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    told = "the vocabulary has no tokens for the text that must come next"
    with pytest.raises(UsageError, match=told):
        grammars.matcher(SamplingParams(grammar='start: "a" "\U0001f9ff" "b"'))
    matcher = grammars.matcher(SamplingParams(grammar='start: /[a-c]/ "\U0001f9ff" "b"'))
    assert matcher is not None
    (first,) = spell(tokenizer, "c")
    assert not matcher.accept(first)
    matcher.mask()
    with pytest.raises(GrammarError, match=told):
        matcher.accept(first)
