"""Token-for-token comparison with llama.cpp on its own vocabularies; run by scripts/test-peers.

`PEER_SOURCES`: the unpacked source distribution of llama-cpp-python, which carries vocabularies.
`PEER_PYTHON`: an interpreter in which `llama_cpp` of the same version can be imported.
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from hypocenter.base.errors import TokenizerError
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.text.pretokenizers import OF_EMBEDDINGS, PRE_TOKENIZERS, UNCUT, category
from hypocenter.model.text.tokenizer import load_tokenizer

TEXTS: list[str] = json.loads((ROOT / "tests/fixtures/tokenizers/texts.json").read_text())
_TOOL = runpy.run_path(str(ROOT / "tools" / "tokenizer_fixtures.py"))
ask_peer: Callable[[Path, list[str]], dict[str, Any]] = _TOOL["ask_peer"]

#: Vocabularies that the source distribution carries and we run. `phi-3` shows white space that
#: special tokens swallow; `baichuan` has no expected ids there.
WITH_IDS = (
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm",
    "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip

#: Of these, the ones without a token for every byte: 0x04 and others, and 0xF1.
LACKS_BYTES = ("falcon", "refact", "starcoder")
#: Marks that a file types as words: control tokens to us, and to llama.cpp what anybody may write.
MARKS_TYPED_AS_WORDS = {"deepseek-coder": {"<|User|>"}, "command-r": {"<|START_OF_TURN_TOKEN|>"}}


def _setting(name: str) -> str:
    value = os.environ.get(name)
    assert value, f"{name} is not set; run scripts/test-peers, which sets it"
    return value


def _llama_cpp() -> Path:
    folder = Path(_setting("PEER_SOURCES")) / "vendor" / "llama.cpp"
    assert folder.is_dir(), f"{folder} is no folder; PEER_SOURCES is the unpacked distribution"
    return folder


def _vocabulary(name: str) -> Path:
    return _llama_cpp() / "models" / f"ggml-vocab-{name}.gguf"


@pytest.mark.parametrize("name", WITH_IDS)
def test_expected_ids_of_the_source_distribution(name: str) -> None:
    path = _vocabulary(name)
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().split("\n")
    expected = [[int(word) for word in line.split()] for line in lines]
    with open_gguf(path) as file:
        tokenizer = load_tokenizer(file)
    assert len(texts) >= 47
    for text, ids in zip(texts, expected, strict=False):
        assert tokenizer.encode(text, add_special=False) == ids, text


def _random_texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    classes: str = _TOOL["CLASSES"]
    cased = "aAbBzZ" * 2 + classes
    texts = ["".join(rng.choices(cased, k=rng.randrange(200))) for _ in range(300)]
    return texts + ["".join(_TOOL["_any_character"](rng) for _ in range(200)) for _ in range(60)]


@pytest.mark.parametrize("name", [*WITH_IDS, "baichuan"])
def test_same_as_llama_cpp_live(name: str) -> None:
    _setting("PEER_PYTHON")
    path = _vocabulary(name)
    texts = TEXTS + _random_texts(len(name))
    answer = ask_peer(path, texts)
    with open_gguf(path) as file:
        tokenizer = load_tokenizer(file)
    pieces = [bytes.fromhex(piece) for piece in answer["pieces"]]
    num_refused = 0
    for parse_special in (False, True):
        for text, ids in zip(texts, answer["ids"][parse_special], strict=True):
            try:
                ours = tokenizer.encode(text, add_special=False, parse_special=parse_special)
            except TokenizerError:
                # The vocabulary cannot spell the text; llama.cpp loses what it cannot spell.
                num_refused += 1
                assert b"".join(pieces[token_id] for token_id in ids) != text.encode()
            else:
                assert ours == ids, (parse_special, text)
    assert bool(num_refused) == (name in LACKS_BYTES)
    for text, ids in zip(TEXTS[:6], answer["ids_with_special"], strict=False):
        assert tokenizer.encode(text) == ids, text
    for token_id, piece in enumerate(pieces):
        # For a token outside the byte alphabet llama.cpp prints a complaint; we print the token.
        if b"[UNK_BYTE_0x" not in piece:
            assert tokenizer.piece(token_id) == piece, token_id
    special = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
    more = {tokenizer.piece(i).decode() for i in set(special) - set(answer["hidden"])}
    assert more == MARKS_TYPED_AS_WORDS.get(name, set())
    assert set(special) >= set(answer["hidden"])
    assert sorted(tokenizer.end_ids) == answer["ends"]
    found = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos, tokenizer.add_eos)
    assert found == tuple(answer[key] for key in ("bos", "eos", "add_bos", "add_eos"))


def test_text_that_is_not_cut_has_the_ids_of_llama_cpp(tmp_path: Path) -> None:
    """Of sarvam-moe, with byte tokens that a converter of gpt2 files takes for words."""
    _setting("PEER_PYTHON")
    words = runpy.run_path(str(ROOT / "tests" / "model" / "text" / "test_blank_bpe.py"))
    vocabulary, texts = words["vocabulary"](), TEXTS + _random_texts(3) + words["_texts"]()
    vocabulary = {**vocabulary, "kinds": [1 if kind == 6 else kind for kind in vocabulary["kinds"]]}
    path = tmp_path / "uncut.gguf"
    (name,) = UNCUT
    _TOOL["write_vocabulary"](path, vocabulary, "gpt2", {"tokenizer.ggml.pre": name})
    answer = ask_peer(path, texts)
    with open_gguf(path) as file:
        tokenizer = load_tokenizer(file)
    for text, ids in zip(texts, answer["ids"][False], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, text
    assert (tokenizer.add_bos, tokenizer.add_eos) == (answer["add_bos"], answer["add_eos"])


def test_every_pre_tokenizer_is_one_of_llama_cpp() -> None:
    source = (_llama_cpp() / "src" / "llama-vocab.cpp").read_text()
    names = set(re.findall(r'tokenizer_pre == "([^"]+)"', source))
    # That of gemma4 goes by the name of its form here.
    assert {*PRE_TOKENIZERS, *UNCUT, *OF_EMBEDDINGS, "gemma4"} == names


@pytest.mark.parametrize(("name", "bit"), [("N", 2), ("L", 4), ("M", 16), ("P", 32), ("S", 64)])
def test_categories_of_every_code_point(name: str, bit: int) -> None:
    source = (_llama_cpp() / "src" / "unicode-data.cpp").read_text()
    table = source[source.index("unicode_ranges_flags") : source.index("unicode_set_whitespace")]
    starts = [
        (int(start, 16), int(flags, 16))
        for start, flags in re.findall(r"\{0x([0-9A-F]+), 0x([0-9A-F]+)\}", table)
    ]
    ends = [start for start, _ in starts[1:]]
    expected = {
        point
        for (start, flags), end in zip(starts, ends, strict=False)
        if flags == bit
        for point in range(start, end)
    }
    points = [point for point in range(0x110000) if not 0xD800 <= point <= 0xDFFF]
    split = Split(Regex(category(name)), "removed")
    pieces = split.pre_tokenize_str("".join(map(chr, points)))
    assert set(points) - {ord(char) for piece, _ in pieces for char in piece} == expected
