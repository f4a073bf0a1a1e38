"""What a file is that is no language model is the first thing that is said of it."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import pytest
from models.gguf_files import BOOL, F32, STRING, FileTensor, GGUFWriter, Item, array_of, write_split
from models.tiny_gguf import write_tiny
from outside.terminal import hypo_in_process

from hypocenter.base.errors import EXIT_GATE, BadModelFile, UnsupportedModel
from hypocenter.engine.llm import LLM
from hypocenter.model.gguf import inspection
from hypocenter.model.gguf.file import open_gguf

_HEADER = json.dumps({"w": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}).encode()
_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64
#: What a file begins with, what is said of it, and what to do.
HEADS: dict[str, tuple[bytes, str, str]] = {
    "safetensors": (
        struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(4),
        "a safetensors file",
        "convert_hf_to_gguf.py",
    ),
    "checkpoint": (b"PK\x03\x04" + bytes(60), "a zip archive, as PyTorch checkpoints are", "hf_to"),
    "pickle": (pickle.dumps({"w": [1.0]}, protocol=2), "a PyTorch checkpoint", "hf_to_gguf"),
    "pickle 5": (pickle.dumps({"w": [1.0]}, protocol=5), "a PyTorch checkpoint", "hf_to_gguf"),
    "ggml": (b"lmgg" + bytes(60), "a GGML file from before GGUF", "convert the model anew"),
    "ggjt": (b"tjgg\x03" + bytes(60), "a GGML file from before GGUF", "convert the model anew"),
    "ggla": (b"algg\x01" + bytes(60), "a LoRA adapter from before GGUF", "made for"),
    "page": (b"\n<!DOCTYPE html><html>", "an HTML page", "download the model file itself"),
    "xml": (b'<?xml version="1.0"?><Error>', "a server's answer in XML", "download the file again"),
    "lfs": (_LFS, "a git-lfs pointer", "git lfs pull"),
    "json": (b'{"error": "Entry not found"}', "a JSON text", "ends in .gguf"),
    "gzip": (b"\x1f\x8b\x08" + bytes(60), "a gzip archive", "unpack it"),
    "tar": (b"model.gguf".ljust(257, b"\0") + b"ustar\0", "a tar archive", "unpack it"),
    "imatrix": (
        struct.pack("<ii", 3, 16) + b"blk.0.attn_k.weight"[:16] + bytes(40),
        "an importance matrix",
        "made of",
    ),
    "zeros": (bytes(4096), "zeros where its head should be", "download it again"),
}


@pytest.mark.parametrize("case", HEADS)
def test_what_is_no_gguf_file_is_told_by_its_first_bytes(case: str, tmp_path: Path) -> None:
    data, what, way_out = HEADS[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(BadModelFile) as caught:
        open_gguf(path)
    assert str(caught.value).startswith(f"{path}: the file is {what}, but a model is a GGUF file; ")
    assert way_out in caught.value.way_out


@pytest.mark.parametrize("name", ["m.gguf.part2of3", "m.gguf-split-b", "m.gguf.part-ab"])
def test_a_piece_of_a_file_is_told_by_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x17" * 64)
    with pytest.raises(BadModelFile, match="the file is a piece of a file, but only the first"):
        open_gguf(tmp_path / name)


def _text(key: str, text: str) -> tuple[str, Item]:
    return key, Item(STRING, text)


_ROW = FileTensor("w", (4,))
#: Keys and tensors of a GGUF file, what is said of it, and what to open.
FILES: dict[str, tuple[list[tuple[str, Item]], list[FileTensor], str, str]] = {
    "adapter": (
        [
            _text("general.architecture", "llama"),
            _text("general.type", "adapter"),
            ("adapter.lora.alpha", Item(F32, 16.0)),
            _text("general.base_model.0.name", "Llama 3.1 8B"),
        ],
        [FileTensor("blk.0.attn_q.weight.lora_a", (4, 2))],
        "a LoRA adapter",
        "open the model that it was made for, 'Llama 3.1 8B', and give this file with --lora",
    ),
    "adapter without its type": (
        [_text("general.architecture", "llama")],
        [FileTensor("blk.0.attn_q.weight.lora_a", (4, 2))],
        "a LoRA adapter",
        "open the model that it was made for, and give this file with --lora",
    ),
    "mmproj": (
        [
            _text("general.architecture", "clip"),
            _text("general.type", "mmproj"),
            ("clip.has_vision_encoder", Item(BOOL, 1)),
        ],
        [FileTensor("v.patch_embd.weight", (4, 4, 3, 2))],
        "the part of a model that sees or hears (mmproj)",
        "open the language model that it belongs to, such as 'words.gguf'",
    ),
    "imatrix": (
        [_text("general.type", "imatrix")],
        [FileTensor("blk.0.attn_q.weight.in_sum2", (4,))],
        "an importance matrix",
        "open the model that it was made of",
    ),
    "control vector": (
        [_text("general.architecture", "controlvector")],
        [FileTensor("direction.1", (4,))],
        "a control vector",
        "open the model that it was made for",
    ),
    "vocabulary": (
        [
            _text("general.architecture", "llama"),
            _text("tokenizer.ggml.model", "llama"),
            ("tokenizer.ggml.tokens", array_of(STRING, ["a"])),
        ],
        [],
        "a vocabulary without weights",
        "open the file of the whole model",
    ),
    "nothing": ([], [], "a GGUF file without a tensor", "open the file that has the weights"),
}


@pytest.mark.parametrize("case", FILES)
def test_what_is_no_model_is_told_before_all_else(case: str, tmp_path: Path) -> None:
    fields, tensors, what, way_out = FILES[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUFWriter().build(fields, tensors))
    (tmp_path / "words.gguf").touch()
    (tmp_path / "mmproj-other.gguf").touch()
    with pytest.raises(UnsupportedModel) as caught:
        LLM(path)
    sentence = f"{path}: the file is {what}, but a run takes a language model; {way_out}"
    assert str(caught.value).startswith(sentence)
    done = hypo_in_process("inspect", str(path))
    assert f"not runnable: {sentence}" in done.stdout  # and what it holds stands above
    assert done.returncode == 0


def test_parts_that_cat_has_joined_are_told(tmp_path: Path) -> None:
    tensors = [FileTensor(name, (4,)) for name in "abc"]
    parts = write_split(tmp_path, "model", tensors, 3)
    for name in ("joined.gguf", parts[0].name):
        path = tmp_path / name
        path.write_bytes(b"".join(part.read_bytes() for part in parts))
        with pytest.raises(BadModelFile) as caught:
            open_gguf(path)
        assert "parts of a split model behind one another, of which it has 3" in str(caught.value)
        assert "open the first" in caught.value.way_out
        parts = write_split(tmp_path, "model", tensors, 3)
    with open_gguf(parts[0]) as file:
        assert list(file.tensors) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.0.ffn_norm.weight"]
)
def test_zeros_that_no_model_has_are_refused(name: str, tmp_path: Path) -> None:
    path = _with_zeros(tmp_path, name)
    with pytest.raises(BadModelFile, match=f"{name} is zeros alone, but .* was not finished"):
        LLM(path).close()


def test_zeros_that_a_model_may_have_are_computed_with_and_checked(tmp_path: Path) -> None:
    """Layers put between others have such matrices, and add nothing by them."""
    path = _with_zeros(tmp_path, "blk.0.ffn_down.weight")
    with LLM(path, context_length=16) as llm:
        assert len(llm.logits([1, 2])) == 2
    with open_gguf(path) as file:
        assert inspection.check(file).zeros == ("blk.0.ffn_down.weight",)
    done = hypo_in_process("inspect", str(path), "--check")
    assert done.returncode == EXIT_GATE
    assert "1 of 11 tensors hold zeros alone: blk.0.ffn_down.weight" in done.stdout
    assert "a download that was not finished leaves such" in done.stderr
    sound = write_tiny(tmp_path / "sound.gguf")
    assert hypo_in_process("inspect", str(sound), "--check").returncode == 0


def _with_zeros(folder: Path, name: str) -> Path:
    import numpy as np

    shapes = {"token_embd.weight": (7, 20), "blk.0.ffn_down.weight": (20, 22)}
    zeros = {name: np.zeros(shapes.get(name, (20,)))}
    words = ["<unk>", "<s>", "</s>", "a", "b", "c", "d"]
    return write_tiny(folder / "zeros.gguf", tensors=zeros, tokens=words)
