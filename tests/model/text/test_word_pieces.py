"""WordPiece and Unigram against the `tokenizers` library's own classes; marks cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.encoder_gguf import UNIGRAMS, WORD_PIECES, add_unigrams, add_word_pieces
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram, WordPiece

from hypocenter.base.errors import BadModelFile
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "",
    "hello the kings, world!",
    "Über-Kings: queenly  CAFÉ\t\n naïve",
    "中国 hello中国world",
    "unknown ☃ letters ☃☃",
    "x" * 101,
    "[CLS] [SEP] <s> </s> <unk> [UNK]",
    "  blanks   in  a row  ",
    "a\u0301bc \u200b zero",
]


def write(path: Path, add: Any, **flags: bool) -> Tokenizer:
    writer = gguf.GGUFWriter(path, "bert")
    add(writer)
    for key, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{key.replace('__', '.')}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with open_gguf(path) as file:
        return load_tokenizer(file)


def library_of_bert(*, lowers: bool = True) -> LibraryTokenizer:
    """As transformers makes one of a list of words."""
    ids = {text: index for index, text in enumerate(WORD_PIECES)}
    library = LibraryTokenizer(WordPiece(ids, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return library


def library_of_roberta() -> LibraryTokenizer:
    library = LibraryTokenizer(Unigram(UNIGRAMS, 3, byte_fallback=False))
    library.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace("  ", " "), normalizers.Replace("  ", " ")]
    )
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    library.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return library


def test_word_pieces_are_those_of_the_library(tmp_path: Path) -> None:
    ours, theirs = write(tmp_path / "bert.gguf", add_word_pieces), library_of_bert()
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids, text
    first, second = "hello the", "kings, world"
    ids, num_first = ours.encode_pair(first, second)
    pair = theirs.encode(first, second)
    assert (ids, [int(n >= num_first) for n in range(len(ids))]) == (pair.ids, pair.type_ids)
    assert ours.decode(ours.encode("hello the kings")) == "hello the kings"


def test_capital_letters_are_kept_where_the_file_says_so(tmp_path: Path) -> None:
    ours = write(tmp_path / "cased.gguf", add_word_pieces, normalizer__lowercase=False)
    theirs = library_of_bert(lowers=False)
    for text in ("Hello hello", "über"):
        assert ours.encode(text) == theirs.encode(text).ids
    assert ours.encode("Hello") != ours.encode("hello")


@pytest.mark.parametrize("text", [text for text in TEXTS if "<" not in text and "\t" not in text])
def test_unigrams_are_those_of_the_library(text: str, tmp_path: Path) -> None:
    ours = write(tmp_path / "unigram.gguf", add_unigrams)
    theirs = library_of_roberta()
    assert ours.encode(text) == theirs.encode(text).ids
    if text:
        ids, _ = ours.encode_pair(text, "world")
        assert ids == theirs.encode(text, "world").ids


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40))
def test_no_text_becomes_a_mark(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    for name, add, marks in (
        ("bert", add_word_pieces, {0, 2, 3, 4}),
        ("unigram", add_unigrams, {0, 1, 2}),
    ):
        ours = write(folder / f"{name}.gguf", add)
        for said in (text, f"[CLS]{text}</s>", f"<s> [SEP] {text}"):
            assert not marks & set(ours.encode(said, add_special=False))


def test_a_text_that_goes_on_begins_without_a_blank(tmp_path: Path) -> None:
    ours = write(tmp_path / "unigram.gguf", add_unigrams)
    begun = ours.encode("hello", add_special=False)
    assert ours.encode("hello", add_special=False, at_start=False) != begun
    assert [ours.piece(index) for index in begun] == [b" hello"]


def test_files_without_what_it_takes(tmp_path: Path) -> None:
    def without_unknown(writer: Any) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list(["[CLS]", "[SEP]", "▁a"])
        writer.add_bos_token_id(0)
        writer.add_sep_token_id(1)

    def without_scores(writer: Any) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list(["<s>", "</s>", "<unk>", "▁a"])
        writer.add_eos_token_id(1)

    def with_a_wrong_table(writer: Any) -> None:
        add_unigrams(writer)
        writer.add_precompiled_charsmap(b"\x07\x00\x00\x00abc")

    for add, message in (
        (without_unknown, "unknown_token_id"),
        (without_scores, "scores"),
        (with_a_wrong_table, "precompiled_charsmap"),
    ):
        with pytest.raises(BadModelFile, match=message):
            write(tmp_path / "wrong.gguf", add)
