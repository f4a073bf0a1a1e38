"""Tokenizers against llama.cpp's ids for small vocabularies, and what they refuse.

`tools/tokenizer_fixtures.py` made tests/fixtures/tokenizers; its head says how.
"""

from __future__ import annotations

import hashlib
import json
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.gguf_files import STRING, GGUFWriter, Item, array_of, write
from repository import ROOT
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from hypocenter.base.errors import BadModelFile, TokenizerError, UnsupportedModel, UsageError
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.text.pretokenizers import OF_EMBEDDINGS, PRE_TOKENIZERS, category
from hypocenter.model.text.tokenizer import MAX_TEXT_CHARS, Tokenizer, load_tokenizer

FIXTURES = ROOT / "tests" / "fixtures" / "tokenizers"
_TOOL = runpy.run_path(str(ROOT / "tools" / "tokenizer_fixtures.py"))
write_vocabulary: Callable[[Path, dict[str, Any], str, dict[str, Any]], None] = _TOOL[
    "write_vocabulary"
]


def _fixture(name: str) -> Any:
    return json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))


TEXTS: list[str] = _fixture("texts")
BPE = _fixture("bpe-vocabulary")
SPM = _fixture("spm-vocabulary")
BPE_EXPECTED = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(FIXTURES.glob("bpe-*.json"))
    if path.stem != "bpe-vocabulary"
}

Load = Callable[..., Tokenizer]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a vocabulary file and load it: `load(vocabulary, model, override, **metadata)`."""

    def write_and_load(
        vocabulary: dict[str, Any], model: str, override: str | None = None, **metadata: Any
    ) -> Tokenizer:
        path = tmp_path / "vocabulary.gguf"
        extra = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
        write_vocabulary(path, vocabulary, model, extra)
        with open_gguf(path) as file:
            return load_tokenizer(file, override)

    return write_and_load


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _loaded(tmp_path_factory, BPE, "gpt2", {"tokenizer.ggml.pre": "qwen2"})


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _loaded(tmp_path_factory, SPM, "llama", {})


def _loaded(
    factory: pytest.TempPathFactory, vocabulary: dict[str, Any], model: str, extra: dict[str, Any]
) -> Tokenizer:
    path = factory.mktemp("vocabulary") / "vocabulary.gguf"
    write_vocabulary(path, vocabulary, model, extra)
    with open_gguf(path) as file:
        return load_tokenizer(file)


def _token(vocabulary: dict[str, Any], text: str) -> int:
    token_id: int = vocabulary["tokens"].index(text)
    return token_id


# Equality with llama.cpp


def _check_against(tokenizer: Tokenizer, expected: dict[str, Any]) -> None:
    for index, (text, ids) in enumerate(zip(TEXTS, expected["ids"], strict=True)):
        assert tokenizer.encode(text, add_special=False) == ids, (index, text)
        parsed = expected["ids_parsed"].get(str(index), ids)
        found = tokenizer.encode(text, add_special=False, parse_special=True)
        assert found == parsed, (index, text)
    for index, ids in expected["ids_with_special"].items():
        assert tokenizer.encode(TEXTS[int(index)]) == ids
    assert (tokenizer.add_bos, tokenizer.add_eos) == (expected["add_bos"], expected["add_eos"])
    assert sorted(tokenizer.end_ids) == expected["ends"]
    special = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
    assert special == expected["hidden"]


@pytest.mark.parametrize("family", BPE_EXPECTED)
def test_ids_of_every_pre_tokenizer(load: Load, family: str) -> None:
    # llama.cpp was asked under each of these names, and gave the same ids.
    first, *others = BPE_EXPECTED[family]["names"]
    _check_against(load(BPE, "gpt2", pre=first), BPE_EXPECTED[family])
    for name in others:
        assert PRE_TOKENIZERS[name] == PRE_TOKENIZERS[first]


def test_fixtures_hold_every_pre_tokenizer_once() -> None:
    names = [name for expected in BPE_EXPECTED.values() for name in expected["names"]]
    assert sorted(names) == list(PRE_TOKENIZERS)
    # The vocabulary and the texts tell all of them apart.
    assert len(BPE_EXPECTED) == len(set(PRE_TOKENIZERS.values()))


@pytest.mark.parametrize("name", _TOOL["SPM_CASES"])
def test_ids_of_the_score_driven_form(tmp_path: Path, name: str) -> None:
    expected = _fixture(name)
    path = tmp_path / "vocabulary.gguf"
    write_vocabulary(path, SPM, "llama", expected["metadata"])
    with open_gguf(path) as file:
        _check_against(load_tokenizer(file), expected)


#: Category to number and digest of its code points below 0x33480 in llama.cpp's unicode-data.cpp.
UNICODE_15 = {
    "N": (1831, "aa6de455e438f674"),
    "L": (136726, "286cceb9a6fb3f42"),
    "P": (842, "3f235208285e40ac"),
    "M": (2210, "8eaa53d41a969ee4"),
    "S": (7775, "33be275501c85996"),
}


@pytest.mark.parametrize("name", UNICODE_15)
def test_categories_are_those_of_unicode_15(name: str) -> None:
    points = [point for point in range(0x33480) if not 0xD800 <= point <= 0xDFFF]
    split = Split(Regex(category(name)), "removed")
    pieces = split.pre_tokenize_str("".join(map(chr, points)))
    left = {ord(char) for piece, _ in pieces for char in piece}
    found = [point for point in points if point not in left]
    digest = hashlib.sha256(" ".join(map(str, found)).encode()).hexdigest()[:16]
    assert (len(found), digest) == UNICODE_15[name]


# Special tokens


@pytest.mark.parametrize(("vocabulary", "model"), [(BPE, "gpt2"), (SPM, "llama")])
def test_text_injects_no_control_token(load: Load, vocabulary: Any, model: str) -> None:
    tokenizer = load(vocabulary, model, **({"pre": "llama-bpe"} if model == "gpt2" else {}))
    control = {i for i, kind in enumerate(vocabulary["kinds"]) if kind in (2, 3)}
    assert len(control) > 4
    for token_id in control:
        name = vocabulary["tokens"][token_id]
        for text in (name, f"a{name}b", f" {name} "):
            assert control.isdisjoint(tokenizer.encode(text, add_special=False))
            assert token_id in tokenizer.encode(text, add_special=False, parse_special=True)


def test_merging_makes_no_control_token(load: Load) -> None:
    # llama.cpp's rule alone would merge these two tokens into BOS.
    vocabulary = TINY_SPM | {"tokens": ["<unk>", "<s>", "</s>", "<0x41>", "<", "s>"]}
    vocabulary["tokens"] += ["s", ">"]
    vocabulary |= {"kinds": [*TINY_SPM["kinds"], 1, 1], "scores": [*TINY_SPM["scores"], -3.0, -3.0]}
    tokenizer = load(vocabulary, "llama", add_space_prefix=False)
    assert tokenizer.encode("<s>", add_special=False) == [4, 5]
    assert tokenizer.encode("<s>", add_special=False, parse_special=True) == [1]


def test_user_defined_tokens_are_always_read(bpe: Tokenizer) -> None:
    think = _token(BPE, "<think>")
    assert think in bpe.encode("a<think>b")


def test_longer_special_token_wins_over_earlier_one(bpe: Tokenizer) -> None:
    long, early = _token(BPE, "[[ab]]"), _token(BPE, "x[[a")
    assert bpe.encode("x[[ab]]", add_special=False)[1:] == [long]
    assert bpe.encode("x[[ab", add_special=False)[0] == early


def test_end_ids_gather_roles_and_known_texts(load: Load) -> None:
    extra = {"tokens": [*TINY["tokens"], "<|eom_id|>", "odd", "<end_of_turn>"]}
    vocabulary = TINY | extra | {"kinds": [*TINY["kinds"], 1, 3, 3]}
    vocabulary["roles"] = TINY["roles"] | {"eot": 6}
    tokenizer = load(vocabulary, "gpt2", pre="gpt-2")
    assert tokenizer.end_ids == {4, 5, 6, 7}
    assert tokenizer.is_special(5)  # by its text, although its kind is normal
    assert not tokenizer.is_special(0)
    assert not tokenizer.is_special(10**9)


def test_call_and_return_take_end_off_the_ends(load: Load) -> None:
    texts = ["<|end|>", "<|return|>", "<|call|>", "<|channel|>"]
    vocabulary = TINY | {"tokens": [*TINY["tokens"], *texts], "kinds": [*TINY["kinds"], 3, 3, 3, 3]}
    tokenizer = load(vocabulary, "gpt2", pre="gpt-4o")
    assert tokenizer.end_ids == {4, 6, 7}
    assert tokenizer.decode([5, 6, 8]) == "<|end|><|channel|>"


def test_marks_are_marks_however_a_file_types_them(load: Load) -> None:
    marks = {
        "<|im_start|>": 1,
        "<|x|>": 1,
        "<start_of_turn>": 4,
        "[INST]": 1,
        "<|header_start|>": 4,
    }
    words = {"<|y|>": 4, "<b>": 1}  # the file's own wish, and no mark
    old = [text for text in BPE["tokens"] if text not in {*marks, *words}]
    kinds = [kind for text, kind in zip(BPE["tokens"], BPE["kinds"], strict=True) if text in old]
    new = marks | words
    tokens = [*old, *new]
    vocabulary = BPE | {"tokens": tokens, "kinds": [*kinds, *new.values()], "roles": {}}
    tokenizer = load(vocabulary, "gpt2", pre="gpt-2", add_bos_token=False)
    ids = {text: tokens.index(text) for text in new}
    control = {ids[text] for text in marks}
    for text in marks:
        assert tokenizer.encode(f"a{text}b", parse_special=True).count(ids[text]) == 1
        assert control.isdisjoint(tokenizer.encode(f"a{text}b")), "nobody types one"
        assert tokenizer.is_special(ids[text])
    assert tokenizer.encode("<|y|>", add_special=False) == [ids["<|y|>"]]
    assert not tokenizer.is_special(ids["<b>"])
    assert {ids[text] for text in marks if text != "<|x|>"} <= tokenizer.turn_ids
    assert ids["<|x|>"] not in tokenizer.turn_ids
    # Words that would merge to one do not, though the file types it as a word.
    halves = ["<|", "x|>", "<|x|>"]
    vocabulary = TINY_SPM | {"tokens": [*TINY_SPM["tokens"], *halves]}
    vocabulary |= {
        "kinds": [*TINY_SPM["kinds"], 1, 1, 1],
        "scores": [*TINY_SPM["scores"], -3, -3, -1],
    }
    vocabulary["tokens"] += ["<", "|", "x", ">"]
    vocabulary["kinds"] += [1] * 4
    vocabulary["scores"] = [float(score) for score in [*vocabulary["scores"], -9, -9, -9, -9]]
    spelled = load(vocabulary, "llama", add_space_prefix=False)
    assert 8 not in spelled.encode("<|x|>", add_special=False)
    assert spelled.encode("<|x|>", add_special=False, parse_special=True) == [8]


def test_bos_and_eos_follow_the_file_and_then_the_pre_tokenizer(load: Load) -> None:
    assert load(TINY, "gpt2", pre="gpt-2").encode("ab") == [2]
    assert load(TINY, "gpt2", pre="llama-bpe").encode("ab") == [3, 2]
    told = load(TINY, "gpt2", pre="llama-bpe", add_bos_token=False, add_eos_token=True)
    assert told.encode("ab") == [2, 4]
    assert told.encode("ab", add_special=False) == [2]
    assert told.encode("") == [4]


# Detokenizing


def test_decode_gives_the_text_back(bpe: Tokenizer, spm: Tokenizer) -> None:
    for text in TEXTS:
        assert bpe.decode(bpe.encode(text, parse_special=True), skip_special=False) == text
        if "<think>" not in text:  # encoding puts a blank after a special token, for good
            assert spm.decode(spm.encode(text)) == text


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=40))
def test_any_text_comes_back(bpe: Tokenizer, spm: Tokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text
    # The mark that stands for a blank cannot be told from one.
    assert spm.decode(spm.encode(text)) == text.replace("▁", " ")


@settings(deadline=None)
@given(data=st.data(), skip_special=st.booleans())
def test_stream_equals_the_bytes_of_all_pieces(
    bpe: Tokenizer, spm: Tokenizer, data: st.DataObject, skip_special: bool
) -> None:
    for tokenizer in (bpe, spm):
        # Low ids are single bytes in both, so that broken UTF-8 is common.
        token = st.one_of(st.integers(0, 260), st.integers(0, tokenizer.vocab_size - 1))
        ids = data.draw(st.lists(token, max_size=30))
        stream = tokenizer.detokenizer(skip_special=skip_special)
        parts = [stream.push(token_id) for token_id in ids] + [stream.flush()]
        shown = [i for i in ids if not (skip_special and tokenizer.is_special(i))]
        pieces = [tokenizer.piece(token_id) for token_id in shown]
        if tokenizer is spm and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        assert "".join(parts) == b"".join(pieces).decode("utf-8", "replace")
        assert tokenizer.decode(ids, skip_special=skip_special) == "".join(parts)


def test_stream_holds_back_half_a_character(bpe: Tokenizer) -> None:
    ids = [_token(BPE, char) for char in ("ð", "Ł", "¦", "Ļ")]  # U+1F999, byte by byte
    stream = bpe.detokenizer()
    assert [stream.push(token_id) for token_id in ids] == ["", "", "", "\U0001f999"]
    stream.push(ids[0])
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_leading_blank_is_dropped_at_the_start_alone(spm: Tokenizer, load: Load) -> None:
    ids = [_token(SPM, "▁"), _token(SPM, "▁"), _token(SPM, "a")]
    assert spm.decode(ids) == " a"
    assert spm.decode([_token(SPM, "<s>"), *ids]) == " a"
    going_on = spm.detokenizer(at_start=False)
    assert "".join(map(going_on.push, ids)) == "  a"
    assert load(SPM, "llama", add_space_prefix=False).decode(ids) == "  a"


def test_pieces_of_every_kind(bpe: Tokenizer, spm: Tokenizer) -> None:
    assert spm.piece(_token(SPM, "<0xE4>")) == b"\xe4"
    assert spm.piece(_token(SPM, "<s>")) == b"<s>"
    assert spm.piece(_token(SPM, "▁")) == b" "
    assert bpe.piece(_token(BPE, "Ġ")) == b" "
    assert bpe.piece(_token(BPE, "[PAD7]")) == b""
    with pytest.raises(TokenizerError, match=f"token id is -1, .* has {bpe.vocab_size} tokens"):
        bpe.piece(-1)
    with pytest.raises(TokenizerError, match="token id is"):
        bpe.decode([bpe.vocab_size])


# Refusals

TINY: dict[str, Any] = {
    "tokens": ["a", "b", "ab", "<bos>", "<eos>"],
    "kinds": [1, 1, 1, 3, 3],
    "merges": ["a b"],
    "roles": {"bos": 3, "eos": 4},
}
TINY_SPM: dict[str, Any] = {
    "tokens": ["<unk>", "<s>", "</s>", "<0x41>", "a", "ab"],
    "kinds": [2, 3, 3, 6, 1, 1],
    "scores": [0.0, 0.0, 0.0, 0.0, -1.0, -2.0],
    "roles": {},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": [1, 1, 1, 3]}, "length of tokenizer.ggml.token_type is 4, .* has 5 tokens"),
        ({"kinds": [1, 1, 1, 3, 3, 1]}, "length of tokenizer.ggml.token_type is 6, .* 5 tokens"),
        ({"kinds": [1, 1, 7, 3, 3]}, "token_type of token 2 is 7, but it must be from 0 to 6"),
        ({"kinds": [1, 1, 6, 3, 3]}, "token 2 is 'ab', but a byte token must be named <0x00>"),
        ({"scores": [0.0] * 4}, "length of tokenizer.ggml.scores is 4, .* has 5 tokens"),
        ({"scores": [0.0, 0.0, 0.0, 0.0, float("nan")]}, "score of token 4 is 'not a number'"),
        ({"tokens": ["a", "b", "ab", "a", "<eos>"]}, "tokens is 'a', .* may occur only once"),
        ({"roles": {"bos": 5, "eos": 4}}, "bos_token_id is 5, but must be from 0 to 4"),
        ({"roles": {"bos": 3, "eot": 4096}}, "eot_token_id is 4096, .* from 0 to 4"),
        ({"merges": ["a b", "a c"]}, "merge 1 is 'a c', but it must be two tokens"),
        ({"merges": ["b a"]}, "merge 0 is 'b a', .* that make a third"),
        ({"merges": ["ab"]}, "merge 0 is 'ab', but it must be two tokens"),
        ({"merges": ["a  b"]}, "merge 0 is 'a  b', but it must be two tokens"),
        ({"tokens": ["a", "b", "ab", "x" * 65537, "y"]}, "bytes of token 3 is 65537, .* 65536"),
    ],
)
def test_vocabulary_that_contradicts_itself(
    load: Load, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadModelFile, match=message):
        load(TINY | change, "gpt2", pre="gpt-2")


def test_vocabulary_without_tokens(tmp_path: Path) -> None:
    fields = [("tokenizer.ggml.model", Item(STRING, "llama"))]
    fields.append(("tokenizer.ggml.tokens", array_of(STRING, [])))
    path = write(tmp_path / "empty.gguf", GGUFWriter().build(fields))
    limit = "number of tokens is 0, but it must be from 1 to 2097152"
    with open_gguf(path) as file, pytest.raises(BadModelFile, match=limit):
        load_tokenizer(file)


def test_added_token_that_nobody_named(load: Load) -> None:
    with pytest.raises(BadModelFile, match="bos_token_id is missing, but every text"):
        load(TINY | {"roles": {"eos": 4}}, "gpt2", pre="llama-bpe")
    with pytest.raises(BadModelFile, match="eos_token_id is missing, but every text"):
        load(TINY | {"roles": {"bos": 3}}, "gpt2", pre="gpt-2", add_eos_token=True)


def test_scores_are_needed_to_merge_by_them(load: Load) -> None:
    vocabulary = {key: value for key, value in TINY_SPM.items() if key != "scores"}
    with pytest.raises(BadModelFile, match=r"tokenizer\.ggml\.scores is missing"):
        load(vocabulary, "llama")


def test_unknown_pre_tokenizer_names_the_way_out(load: Load) -> None:
    with pytest.raises(UnsupportedModel, match=r"pre is missing, but known names are .*qwen2"):
        load(TINY, "gpt2")
    with pytest.raises(
        UnsupportedModel, match=r"'qwen3', but did you mean 'qwen35'.*tokenizer_pre"
    ):
        load(TINY, "gpt2", pre="qwen3")
    assert load(TINY, "gpt2", "gpt-2").encode("ab") == [2]
    assert load(TINY, "gpt2", "llama-bpe", pre="gpt-2").encode("ab") == [3, 2]
    with pytest.raises(UsageError, match="tokenizer_pre is 'gpt2', but did you mean 'gpt-2'"):
        load(TINY, "gpt2", "gpt2")
    with pytest.raises(UsageError, match="'llama' tokenizer and no pre-tokenizer"):
        load(TINY_SPM, "llama", "gpt-2")


@pytest.mark.parametrize("model", ["rwkv", "plamo2", "none"])
def test_other_forms_are_refused_by_name(load: Load, model: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"model is {model!r}, but hypocenter runs 'gpt2'"):
        load(TINY, model)


def test_text_that_cannot_be_encoded(load: Load, bpe: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"U\+D800 at character 2, .* not valid Unicode"):
        bpe.encode("ab\ud800")
    with pytest.raises(TokenizerError, match=f"has {MAX_TEXT_CHARS + 1} characters, but the limit"):
        bpe.encode("a" * (MAX_TEXT_CHARS + 1))
    with pytest.raises(TokenizerError, match="byte 0x63 of the text has no token"):
        load(TINY, "gpt2", pre="gpt-2").encode("abc")
    with pytest.raises(TokenizerError, match=r"character 'é' \(U\+00E9\) has no token"):
        load(TINY_SPM, "llama", add_space_prefix=False).encode("aé")


def test_tokens_may_be_any_bytes(load: Load) -> None:
    tokens = [*TINY_SPM["tokens"], b"\xff\xfe"]
    vocabulary = TINY_SPM | {"tokens": tokens, "kinds": [*TINY_SPM["kinds"], 1]}
    vocabulary["scores"] = [*TINY_SPM["scores"], 0.0]
    assert load(vocabulary, "llama").piece(6) == b"\xff\xfe"
    tokens = [*TINY["tokens"], b"\xff\xfe"]
    tokenizer = load(TINY | {"tokens": tokens, "kinds": [*TINY["kinds"], 1]}, "gpt2", pre="gpt-2")
    assert tokenizer.piece(5) == b"\xff\xfe"
    assert tokenizer.encode("ab") == [2]


# Speed: linear where a quadratic rule would take minutes


def _cpu_seconds(call: Callable[[], object]) -> float:
    before = time.process_time()
    call()
    return time.process_time() - before


@pytest.mark.parametrize(
    "text", ["abé" * 40_000, " " * 120_000, "x" * 120_000, "\U0001f999" * 30_000]
)
def test_long_word_takes_no_quadratic_time(spm: Tokenizer, bpe: Tokenizer, text: str) -> None:
    assert _cpu_seconds(lambda: spm.encode(text)) < 8
    assert _cpu_seconds(lambda: bpe.encode(text)) < 4


#: Rules of each kind: of one expression and of several, with possessive ones, numbers by threes,
#: blanks by powers of two, nested repeats.
OF_EACH_KIND = ("llama-bpe", "deepseek-llm", "tekken", "cohere2moe", "jais-2", "exaone-moe")


@pytest.mark.parametrize("family", BPE_EXPECTED)
@pytest.mark.tier("sim", fast=lambda case: case.family.removeprefix("bpe-") in OF_EACH_KIND)
def test_pre_tokenizers_take_no_quadratic_time(load: Load, family: str) -> None:
    tokenizer = load(BPE, "gpt2", pre=BPE_EXPECTED[family]["names"][0])
    for text in (
        " " * 100_000 + "5",
        " \u3000" * 50_000 + "a",
        "!" + "A" * 100_000,
        "\r\n " * 30_000,
        "1" * 100_000,
    ):
        assert _cpu_seconds(lambda text=text: tokenizer.encode(text)) < 4  # type: ignore[misc]


def test_a_megabyte_of_prose(spm: Tokenizer, bpe: Tokenizer) -> None:
    text = (TEXTS[0] + TEXTS[1]) * (1_000_000 // len(TEXTS[0] + TEXTS[1]))
    # Cut where no merge can cross it takes a tenth of a second, as one word more than one.
    assert _cpu_seconds(lambda: spm.encode(text)) < 0.5
    assert _cpu_seconds(lambda: bpe.encode(text)) < 5


@pytest.mark.parametrize("name", sorted(OF_EMBEDDINGS))
def test_names_of_models_that_write_no_text_are_refused_by_what_they_are(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "embeddings.gguf"
    model = "whitespace" if name == "whitespace" else "gpt2"
    _TOOL["write_vocabulary"](path, BPE, model, {"tokenizer.ggml.pre": name})
    what = f"'{name}', but models with it make embeddings, and hypocenter does not run their"
    with open_gguf(path) as file, pytest.raises(UnsupportedModel, match=f"{what} architecture$"):
        load_tokenizer(file)
    _TOOL["write_vocabulary"](path, BPE, "gpt2", {"tokenizer.ggml.pre": "qwen2"})
    with open_gguf(path) as file, pytest.raises(UsageError, match=f"{what} architecture$"):
        load_tokenizer(file, name)
