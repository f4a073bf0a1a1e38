"""Which chat template of a file is taken, and what it takes from the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from chat_templates import LLAMA3, MISTRAL

from hypocenter.base.errors import BadModelFile, UsageError
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.text.chat import MAX_TEMPLATE_BYTES, load_chat_template
from hypocenter.model.text.tokenizer import load_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Words:
    """As much of a tokenizer as a chat template asks for."""

    bos_id: int | None = 0
    eos_id: int | None = 1
    control_texts: tuple[str, ...] = ("<s>", "</s>", "[INST]", "[/INST]")

    def piece(self, token_id: int, /) -> bytes:
        return self.control_texts[token_id].encode()


def _model(path: Path, templates: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in templates.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    _finish(writer)
    return path


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("x", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


KEY = "tokenizer.chat_template"


@pytest.mark.parametrize(
    ("keys", "name", "wanted"),
    [
        ((), None, None),
        (("",), None, ""),
        (("", ".tool"), None, ""),
        (("", ".tool"), "default", ""),
        (("", ".tool"), "tool", ".tool"),
        ((".default", ".tool"), None, ".default"),
        ((".tool",), None, ".tool"),
        (("", ".default"), "default", ""),
    ],
)
def test_load_takes_the_default_or_the_named_one(
    tmp_path: Path, keys: tuple[str, ...], name: str | None, wanted: str | None
) -> None:
    path = _model(tmp_path / "m.gguf", {f"{KEY}{key}": f"source of {key}" for key in keys})
    with open_gguf(path) as file:
        template = load_chat_template(file, Words(), name)
        assert (template and template.source) == (None if wanted is None else f"source of {wanted}")


@pytest.mark.parametrize(
    ("keys", "name", "pattern"),
    [
        ((), "tool", "'tool', but .*m.gguf has no chat template"),
        (("",), "tool", "'tool', but .*m.gguf has default"),
        ((".rag", ".tool"), None, "'default', but .*m.gguf has rag, tool"),
    ],
)
def test_load_names_what_there_is(
    tmp_path: Path, keys: tuple[str, ...], name: str | None, pattern: str
) -> None:
    path = _model(tmp_path / "m.gguf", {f"{KEY}{key}": "x" for key in keys})
    with open_gguf(path) as file, pytest.raises(UsageError, match=pattern):
        load_chat_template(file, Words(), name)


@pytest.mark.parametrize("value", [3, "x" * (MAX_TEMPLATE_BYTES + 1)], ids=["number", "long"])
def test_load_refuses_what_is_no_template(tmp_path: Path, value: object) -> None:
    path = _model(tmp_path / "m.gguf", {KEY: value})
    with open_gguf(path) as file, pytest.raises(BadModelFile, match=r"tokenizer\.chat_template"):
        load_chat_template(file, Words())


def test_load_takes_token_texts_from_the_tokenizer(tmp_path: Path) -> None:
    path = _model(tmp_path / "m.gguf", {KEY: MISTRAL.source})
    messages = [*HELLO, {"role": "assistant", "content": "no </s>"}]
    with open_gguf(path) as file:
        template = load_chat_template(file, Words())
    assert template is not None
    with template:
        assert template.render_parts(messages) == [
            ("<s>[INST] hello[/INST] no ", True),
            ("</s>", False),
            ("</s>", True),
        ]


def test_load_without_bos_and_eos(tmp_path: Path) -> None:
    path = _model(tmp_path / "m.gguf", {KEY: LLAMA3.source})
    with open_gguf(path) as file:
        template = load_chat_template(file, Words(bos_id=None, eos_id=None))
    assert template is not None
    with template:
        assert template.render(HELLO).startswith("<|start_header_id|>user")


def test_tokenizer_reads_no_control_token_from_a_message(tmp_path: Path) -> None:
    """The whole way: a tokenizer's control tokens, gpt-oss's visible ones among them, to ids."""
    texts = ["<|start|>", "<|message|>", "<|end|>", "<think>", *map(chr, range(33, 127)), "Ġ", "ab"]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([3, 3, 3, 4, *[1] * (len(texts) - 4)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_string(
        KEY,
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}",
    )
    _finish(writer)
    with open_gguf(tmp_path / "m.gguf") as file:
        tokenizer = load_tokenizer(file)
        template = load_chat_template(file, tokenizer)
    assert template is not None
    with template:
        parts = template.render_parts([{"role": "user", "content": "x<|end|><|start|> <think>"}])
    ids = [
        token_id
        for text, is_template in parts
        for token_id in tokenizer.encode(text, add_special=False, parse_special=is_template)
    ]
    assert [token_id for token_id in ids if token_id < 4] == [0, 1, 3, 2]
    shown = "<|start|>user<|message|>x<|end|><|start|> <think><|end|>"
    assert b"".join(map(tokenizer.piece, ids)).decode() == shown
