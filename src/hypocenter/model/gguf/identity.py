"""Tells what a file is that is no language model, and what to open in its place; opens nothing.

Signatures are those of the formats' own specifications; keys of GGUF files that are no models are
those that llama.cpp's converters, its imatrix and its cvector-generator write.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from hypocenter.base.errors import BadModelFile, UnsupportedModel, Words
from hypocenter.model.gguf.values import Metadata, TensorInfo

#: How much of a file tells what it is.
HEAD_BYTES = 512
_CONVERT = "convert it with llama.cpp's convert_hf_to_gguf.py, or take a GGUF file of the model"
_UNPACK = "unpack it and open the .gguf file inside"
_CHECKPOINT = "a PyTorch checkpoint", _CONVERT
_GGML = "a GGML file from before GGUF", "convert the model anew, or take a GGUF file of it"
#: What files begin with; `_of_head` looks at letters as if all were small.
_SIGNATURES: tuple[tuple[bytes, tuple[str, str]], ...] = (
    (b"pk\x03\x04", ("a zip archive, as PyTorch checkpoints are", _CONVERT)),
    *((b"\x80" + bytes([protocol]), _CHECKPOINT) for protocol in range(2, 6)),
    *((magic, _GGML) for magic in (b"ggml", b"ggjt", b"ggmf", b"lmgg", b"tjgg", b"fmgg")),
    *(
        (magic, ("a LoRA adapter from before GGUF", "open the model that it was made for"))
        for magic in (b"ggla", b"algg")
    ),
    (b"\x89hdf\r\n", ("an HDF5 file", _CONVERT)),
    (b"\x1f\x8b", ("a gzip archive", _UNPACK)),
    (b"\x28\xb5\x2f\xfd", ("a zstd archive", _UNPACK)),
    (b"\xfd7zxz", ("an xz archive", _UNPACK)),
    (b"7z\xbc\xaf", ("a 7z archive", _UNPACK)),
)
_PAGE = "an HTML page", "a download saved a web page instead; download the model file itself"
_REFUSED = "a download was refused and saved why; download the file again"
_TEXTS: tuple[tuple[bytes, tuple[str, str]], ...] = (
    *((tag, _PAGE) for tag in (b"<!doctype html", b"<html", b"<head")),
    (b"<?xml", ("a server's answer in XML", _REFUSED)),
    (
        b"version https://git-lfs",
        ("a git-lfs pointer", "fetch the file itself with `git lfs pull`"),
    ),
    (b"{", ("a JSON text", "download the model file itself, which ends in .gguf")),
)
_PIECE = re.compile(r"(.+\.gguf)[.-]?(part|split)[-_.]?[a-z0-9]+", re.IGNORECASE)
_ADAPTER = "a LoRA adapter"
_OF_TENSORS = {
    ".lora_a": _ADAPTER,
    "direction.": "a control vector",
    ".in_sum2": "an importance matrix",
}


#: What `general.type` is of files that lie beside models.
_BESIDE_MODELS = ("adapter", "mmproj", "imatrix")
#: Converters write the type among the first keys, before any array.
_TYPE_BYTES = 1 << 16


def says_it_is_no_model(path: Path) -> bool:
    """Whether the metadata of a GGUF file begin by saying that it is no model.

    What says nothing may be one all the same, as may what cannot be read: opening it tells.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_TYPE_BYTES)
    except OSError:
        return False
    return head.startswith(b"GGUF") and any(_type_entry(kind) in head for kind in _BESIDE_MODELS)


def _type_entry(kind: str) -> bytes:
    """The key `general.type` with that value, as a file has it: both are texts, after a length."""
    key, value = b"general.type", kind.encode()
    return struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value


class OpenFile(Protocol):
    """What is looked at of a GGUF file."""

    path: Path

    @property
    def metadata(self) -> Metadata: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...


def not_gguf(path: Path, head: bytes, num_bytes: int) -> BadModelFile:
    """The error for a file of `num_bytes` that begins with `head` and not as GGUF files do."""
    what, way_out = _of_head(head, num_bytes)
    if what:
        return BadModelFile(path, "the file", Words(what), "a model is a GGUF file", way_out)
    if found := _PIECE.fullmatch(path.name):
        whole = found[1]
        what, way_out = "a piece of a file", f"join all in order: cat {whole}* >{whole}"
        return BadModelFile(path, "the file", Words(what), "only the first has the head", way_out)
    limit = "a GGUF file begins with b'GGUF'"
    return BadModelFile(path, "magic", head[:4], limit, "give a GGUF model file")


def require_adapter(file: OpenFile) -> None:
    """Raises UnsupportedModel for a GGUF file that is something else than an adapter."""
    what, _ = _of_keys(file)
    if what == _ADAPTER:
        return
    way_out = "give an adapter with --lora" if what else "give it as the model"
    limit = "--lora takes a LoRA adapter"
    raise UnsupportedModel(file.path, "the file", Words(what or "a model"), limit, way_out)


def require_model(file: OpenFile) -> None:
    """Raises UnsupportedModel for a GGUF file that is something else than a language model."""
    what, way_out = _of_keys(file)
    if what:
        limit = "a run takes a language model"
        raise UnsupportedModel(file.path, "the file", Words(what), limit, way_out)


def _of_head(head: bytes, num_bytes: int) -> tuple[str, str]:
    small = head.lower()
    for magic, description in _SIGNATURES:
        if small.startswith(magic):
            return description
    text = small.lstrip(b"\xef\xbb\xbf \t\r\n")
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and 2 <= length <= num_bytes - 8:
        return "a safetensors file", _CONVERT
    for begin, description in _TEXTS:
        if text.startswith(begin):
            return description
    if head[257:262] == b"ustar":
        return "a tar archive", _UNPACK
    if b"blk." in head[8:32]:  # a count, a length, and the name of a tensor
        return "an importance matrix", "open the model that it was made of"
    if head and not any(head):
        return "zeros where its head should be", "its download was not finished; download it again"
    return "", ""


def _of_keys(file: OpenFile) -> tuple[str, str]:
    kind, arch = _text(file, "general.type"), _text(file, "general.architecture")
    found = next(
        (what for name in file.tensors for part, what in _OF_TENSORS.items() if part in name), ""
    )
    if kind == "adapter" or found == _ADAPTER:
        give = "give this file with --lora"
        return _ADAPTER, f"open the model that it was made for{_base(file)}, and {give}"
    if kind == "mmproj" or arch == "clip":
        beside = _other_model(file.path)
        where = f", such as {beside!r}" if beside else ""
        return (
            "the part of a model that sees or hears (mmproj)",
            f"open the language model that it belongs to{where}; hypocenter reads text alone",
        )
    if kind == "imatrix" or found == "an importance matrix":
        return "an importance matrix", "open the model that it was made of"
    if arch == "controlvector" or found == "a control vector":
        return "a control vector", "open the model that it was made for, which runs without it"
    if not file.tensors and "tokenizer.ggml.tokens" in file.metadata:
        return "a vocabulary without weights", "open the file of the whole model"
    if not file.tensors:
        return "a GGUF file without a tensor", "open the file that has the weights"
    drafts = file.metadata.get(f"{arch}.nextn_predict_layers", 0)
    if drafts and "blk.0.attn_norm.weight" not in file.tensors and _has_drafts(file):
        return "the layers of a model that only propose tokens (MTP)", "open the model itself"
    return "", ""


def _has_drafts(file: OpenFile) -> bool:
    return any(".nextn." in name for name in file.tensors)


def _text(file: OpenFile, key: str) -> str:
    value = file.metadata.get(key)
    return value if isinstance(value, str) else ""


def _base(file: OpenFile) -> str:
    """The model that the file names as the one it was made of."""
    name = _text(file, "general.base_model.0.name")[:80]
    return f", {name!r}" if name else ""


def _other_model(path: Path) -> str:
    """Another GGUF file of the folder that is none of these by its name."""
    apart = ("mmproj", "imatrix", "lora")
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix == ".gguf")
    except OSError:
        return ""
    others = (name for name in names if not any(word in name.lower() for word in apart))
    return next((name for name in others if name != path.name), "")
