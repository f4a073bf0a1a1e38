"""What each side reads: the weights and facts of a peer that was given another file or a folder,
and which of them differ at an op by more than their types explain."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Float64s
from hypocenter.base.errors import UsageError
from hypocenter.base.tensor import DType
from hypocenter.engine.float64_steps import weight_of
from hypocenter.kernels.blocks.block_quantise import (
    NEEDS_WEIGHTS,
    WRITTEN_TYPES,
    quantise_rows,
)
from hypocenter.kernels.weights.block_types import dequantise
from hypocenter.model.facts.architecture import Architecture, read_architecture
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.trace.comparing import rms_of
from hypocenter.trace.points import PointPlace

#: What Llama 3.1 and later divide frequencies of the rotation by, in all layers.
_DIVISORS = "rope_freqs.weight"
#: Tensors that an op reads, by the point that holds what it makes; of a layer below `blk.N.`.
_OF_LAYER = {
    "attn_norm": ("attn_norm.weight",),
    "q": ("attn_q.weight", "attn_q.bias"),
    "k": ("attn_k.weight", "attn_k.bias"),
    "v": ("attn_v.weight", "attn_v.bias"),
    "q_rope": ("attn_q_norm.weight", _DIVISORS),
    "k_cache": ("attn_k_norm.weight", _DIVISORS),
    "attn_residual": ("attn_output.weight", "attn_output.bias"),
    "ffn_norm": ("ffn_norm.weight",),
    "layer_out": ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
}
_HEAD = "output.weight"
_OF_MODEL = {
    "embedding": ("token_embd.weight",),
    "result_norm": ("output_norm.weight",),
    "logits": (_HEAD,),
}
#: What a type costs may be so many times as much in the file as when its tensor is quantised anew,
#: for others choose scales with more care or less; and what is lost between bf16 and halves.
_CARE, _LEAST = 2.0, 4e-3
#: Names of a folder's tensors.
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
#: A header of safetensors has at most so many bytes.
_MAX_HEADER_BYTES = 100 << 20


def head_of(file: GGUFFile) -> str:
    """The tensor that makes logits: a file without one of its own has it tied to the embedding."""
    return _HEAD if _HEAD in file.tensors else "token_embd.weight"


class OtherFile:
    """Weights and facts of a GGUF file that the peer was given."""

    def __init__(self, file: GGUFFile) -> None:
        self._file, self.arch = file, read_architecture(file)

        self.vocab_size = self.arch.vocab_size

    def weight(self, name: str) -> Float64s | None:
        name = head_of(self._file) if name == _HEAD else name
        return weight_of(self._file, name) if name in self._file.tensors else None

    def dtype(self, name: str) -> DType | None:
        """The type of a tensor, None where quantising cannot explain a difference."""
        return self._file.tensors[head_of(self._file) if name == _HEAD else name].dtype


class OtherFolder:
    """Weights and facts of a folder as transformers has it: config.json, *.safetensors.

    Its files are read as data; sizes are checked against what is there.
    """

    def __init__(self, folder: Path, arch: Architecture) -> None:
        """`arch` is that of our file. Raises UsageError for a folder without config or weights."""
        self._reorders = arch.family.rope_style == "normal"
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(f"{folder} has no config.json that can be read: {error}") from error
        self._tensors: dict[str, tuple[Path, str, tuple[int, ...], int]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._tensors |= _tensors_of(path)
        if not self._tensors:
            raise UsageError(f"{folder} has no *.safetensors; name the folder of a whole model")
        self._heads = config.get("num_attention_heads", arch.num_heads)
        self._kv_heads = config.get("num_key_value_heads", self._heads)
        self._is_tied = config.get("tie_word_embeddings") is True
        self.vocab_size = int(config.get("vocab_size", arch.vocab_size))
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        base = rope.get("rope_theta", config.get("rope_theta", arch.rope.base))
        eps = config.get("rms_norm_eps", arch.norm_eps)
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        scaling = "none" if kind == "default" else kind
        rotation = replace(arch.rope, base=float(base), scaling=scaling)
        self.arch = replace(arch, rope=rotation, norm_eps=float(eps))

    def weight(self, name: str) -> Float64s | None:
        theirs = _TOP_NAMES.get("token_embd.weight" if name == _HEAD and self._is_tied else name)
        if theirs is None and name.startswith("blk."):
            _, layer, part, kind = name.split(".")
            theirs = f"model.layers.{layer}.{_NAMES.get(part, part)}.{kind}"
        if theirs not in self._tensors:
            return None
        found = _read(*self._tensors[theirs])
        part = name.split(".")[-2]
        if self._reorders and part in ("attn_q", "attn_k"):
            # Of each head the halves interleaved, as llama.cpp's converter writes rows.
            heads = self._heads if part == "attn_q" else self._kv_heads
            return found.reshape(heads, 2, -1, *found.shape[1:]).swapaxes(1, 2).reshape(found.shape)
        return found

    def dtype(self, name: str) -> DType | None:
        return None


class Differences:
    """What of the weights and facts that an op reads is not alike in both, in words. `within` keeps
    how far tensors are apart, relative, whose types explain that."""

    def __init__(self, file: GGUFFile, arch: Architecture, other: OtherFile | OtherFolder) -> None:
        self._file, self._arch, self.other = file, arch, other
        self._found: dict[PointPlace, tuple[str, ...]] = {}
        self.within: dict[str, float] = {}

    def __call__(self, name: str, layer: int | None) -> tuple[str, ...]:
        if (name, layer) not in self._found:
            numbers = _numbers(name, self._arch, self.other.arch)
            self._found[name, layer] = (*numbers, *self._weights(name, layer))
        return self._found[name, layer]

    def _weights(self, name: str, layer: int | None) -> Iterator[str]:
        file, other = self._file, self.other
        names: tuple[str, ...] = _OF_MODEL.get(name, ())
        if layer is not None:
            of_layer = _OF_LAYER.get(name, ())
            names = tuple(part if part == _DIVISORS else f"blk.{layer}.{part}" for part in of_layer)
        for tensor in names:
            own = head_of(file) if tensor == _HEAD else tensor
            theirs = other.weight(tensor)
            if own not in file.tensors or theirs is None:
                if (own in file.tensors) != (theirs is not None):
                    yield f"{tensor} is in {'ours' if theirs is None else 'theirs'} alone"
                continue
            mine = weight_of(file, own)
            if mine.shape != theirs.shape:
                yield f"{tensor} is {mine.shape} in ours and {theirs.shape} in theirs"
                continue
            apart = rms_of(mine - theirs) / (rms_of(theirs) or 1.0)
            most = max(
                _cost_of_type(file.tensors[own].dtype, theirs),
                _cost_of_type(other.dtype(tensor), mine),
            )
            if apart > most:
                yield f"{tensor} is {100 * apart:.2g} % apart; its type explains {100 * most:.2g} %"
            elif apart > 0:
                self.within[tensor] = apart


def _numbers(name: str, ours: Architecture, theirs: Architecture) -> Iterator[str]:
    numbers: tuple[tuple[str, float, float], ...] = ()
    if name in ("q_rope", "k_cache"):
        numbers = (("the base of the rotation", ours.rope.base, theirs.rope.base),)
    elif name in ("attn_norm", "ffn_norm", "result_norm"):
        numbers = (("the norm's epsilon", ours.norm_eps, theirs.norm_eps),)
    elif name == "attention":
        numbers = (("the scale of attention", ours.attn_scale, theirs.attn_scale),)
    for what, mine, other in numbers:
        if not math.isclose(mine, other, rel_tol=1e-6):
            yield f"{what} is {mine:g} in ours and {other:g} in theirs"


def _cost_of_type(dtype: DType | None, values: Float64s) -> float:
    """How far a tensor of this type may be from the values that it was made of, relative; None:
    they are as they were."""
    if dtype is None:
        return _LEAST
    rows = np.ascontiguousarray(values.reshape(-1, values.shape[-1]), np.float32)
    if dtype not in WRITTEN_TYPES or dtype in NEEDS_WEIGHTS:
        return math.inf  # what it costs is not known here
    if not np.isfinite(rows).all():
        return _LEAST
    again = dequantise(quantise_rows(rows, dtype), dtype, rows.shape[1])
    return _LEAST + _CARE * rms_of(again.astype(np.float64) - rows) / (rms_of(values) or 1.0)


def _tensors_of(path: Path) -> dict[str, tuple[Path, str, tuple[int, ...], int]]:
    """File, type, shape and offset of each tensor of a safetensors file: 8 bytes of length, then a
    header as JSON, then the bytes (the format's own description). Raises UsageError."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(_MAX_HEADER_BYTES, path.stat().st_size):
                raise UsageError(f"{path}: a header of {length} bytes; the file is damaged")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            str(name): (
                path,
                str(of["dtype"]),
                tuple(map(int, of["shape"])),
                8 + length + int(of["data_offsets"][0]),
            )
            for name, of in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no file of safetensors: {error}") from error


def _read(path: Path, kind: str, shape: tuple[int, ...], offset: int) -> Float64s:
    """Raises UsageError for a type that holds no floats, and a tensor beyond the file."""
    kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
    if kind not in kinds:
        raise UsageError(f"{path} has a tensor of the type {kind[:16]}; F32, F16 and BF16 are read")
    num = math.prod(shape)
    if offset + num * np.dtype(kinds[kind]).itemsize > path.stat().st_size:
        raise UsageError(f"{path} is shorter than its header says; load it anew")
    raw = np.fromfile(path, kinds[kind], num, offset=offset)
    if kind == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(raw, np.float64).reshape(shape)
