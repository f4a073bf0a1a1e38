"""Every way in which people write down a model that lies elsewhere."""

from __future__ import annotations

import pytest

from hypocenter.base.errors import UsageError
from hypocenter.hub.names import FileAddress, HubName, RemoteName, remote_name

ANY = HubName("unsloth/Qwen3-8B-GGUF")
TAGGED = HubName("unsloth/Qwen3-8B-GGUF", "Q4_K_M")
FILE = HubName("unsloth/Qwen3-8B-GGUF", file="BF16/Qwen3-8B-BF16-00001-of-00002.gguf")
FORMS: dict[str, RemoteName] = {
    "unsloth/Qwen3-8B-GGUF": ANY,
    "unsloth/Qwen3-8B-GGUF:Q4_K_M": TAGGED,
    "hf.co/unsloth/Qwen3-8B-GGUF": ANY,
    "hf.co/unsloth/Qwen3-8B-GGUF:Q4_K_M": TAGGED,
    "huggingface.co/unsloth/Qwen3-8B-GGUF:Q4_K_M": TAGGED,
    "https://huggingface.co/unsloth/Qwen3-8B-GGUF": ANY,
    "https://huggingface.co/unsloth/Qwen3-8B-GGUF/": ANY,
    "https://huggingface.co/unsloth/Qwen3-8B-GGUF/tree/main": ANY,
    f"https://huggingface.co/unsloth/Qwen3-8B-GGUF/blob/main/{FILE.file}": FILE,
    f"https://hf.co/unsloth/Qwen3-8B-GGUF/resolve/main/{FILE.file}?download=true": FILE,
    "https://huggingface.co/a/b/resolve/v1.0/c%20d.gguf": HubName("a/b", "", "c d.gguf", "v1.0"),
    "https://example.org/models/tiny.gguf": FileAddress("https://example.org/models/tiny.gguf"),
    "http://127.0.0.1:80/tiny%20one.gguf?x=1": FileAddress("http://127.0.0.1:80/tiny%20one.gguf?x=1"),
}  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_each_form_means_its_model(text: str) -> None:
    assert remote_name(text) == FORMS[text]


@pytest.mark.parametrize(
    "text",
    ["model.gguf", "models/model.gguf", "a/b/c.gguf", "./a/b", "/a/b", "a//b", "~/b"],
)
def test_what_looks_like_a_path_is_one(text: str) -> None:
    assert remote_name(text) is None


def test_where_a_hub_is_meant_a_file_may_stand_behind_the_name() -> None:
    assert remote_name("a/b/c.gguf", is_hub=True) == HubName("a/b", file="c.gguf")
    assert remote_name("a/b.gguf", is_hub=True) == HubName("a/b.gguf")


@pytest.mark.parametrize(
    ("text", "is_hub"),
    [
        ("llama3:8b", False), ("llama3", True), ("a/../b.gguf", True), ("a/b/../c.gguf", True),
        ("a/b//c.gguf", True), ("../a", True), ("a/b:", True), ("a/b:x y", True), ("", True),
        ("https://example.org/", False), ("https://example.org/a.bin", False), ("https://", False),
        ("https://huggingface.co/docs", False), ("hf.co/a", False), ("x" * 3000, False),
        ("https://huggingface.co/a/b/resolve/main/../c.gguf", False),
        ("https://huggingface.co/a/b/resolve/main/c.bin", False),
    ],
)  # fmt: skip
def test_what_can_be_no_model_is_refused(text: str, is_hub: bool) -> None:
    with pytest.raises(UsageError, match=r"OWNER/NAME|GGUF file|characters"):
        remote_name(text, is_hub=is_hub)


@pytest.mark.parametrize("name", ["a%2F..%2F..%2Fx.gguf", "..%2Fx.gguf", "%2Fetc%2Fx.gguf"])
def test_no_name_of_a_file_is_a_path(name: str) -> None:
    address = remote_name(f"http://h/{name}")
    assert isinstance(address, FileAddress)
    assert address.file == "x.gguf"
    with pytest.raises(UsageError, match="no address of a GGUF file"):
        remote_name("http://h/a%00.gguf")


def test_the_name_of_an_addressed_file_is_read_from_its_path() -> None:
    assert FileAddress("http://h/a/tiny%20one.gguf?x=/y.gguf").file == "tiny one.gguf"
