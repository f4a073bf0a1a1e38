"""A LoRA adapter in GGUF: pairs of small matrices beside matrices of a model; applies none.

Keys and names are those of llama.cpp's convert_lora_to_gguf.py: `general.type` is `adapter`,
`adapter.type` is `lora`, and beside a matrix NAME [n, k] stand NAME.lora_a [rank, k] and
NAME.lora_b [n, rank]. Of the product counts `adapter.lora.alpha` / rank. Beside a stack of experts
both have an axis of experts first. Beside the token table [vocab, width] stand A [vocab, rank], of
which rows are looked up, and B [width, rank].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import MISSING, BadModelFile, UnsupportedModel, Words
from hypocenter.base.tensor import DType
from hypocenter.kernels.weights.block_types import dequantise
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.model.gguf.identity import require_adapter
from hypocenter.model.gguf.values import TensorInfo
from hypocenter.model.tensors.table import tensor_table
from hypocenter.model.tensors.tensor_spec import TensorKind, TensorSpec

#: A rank beyond which nobody saves anything, and which kernels are not made for.
MAX_RANK = 1024
_ENDS = (".lora_a", ".lora_b")
_INVOKED = "adapter.alora.invocation_tokens"


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """What an adapter has beside one matrix: `down` A [rank, k] and `up` B [n, rank], both f32 and
    finite; `factor`: what their product counts. `is_half`: all their numbers are f16's. Beside a
    stack of experts they are [num_experts, rank, k] and [num_experts, n, rank]. Beside the token
    table `down` is A [vocab, rank], and `up` B [width, rank]."""

    down: Array
    up: Array
    factor: float
    is_half: bool


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A whole adapter of one model. `digest` stands for all that it computes. `of_heads`: tensors
    that it stands beside, too, of layers that only draft (MTP), which the model does not run."""

    name: str
    path: Path
    scale: float
    pairs: Mapping[str, LowRankPair]
    digest: bytes
    of_heads: tuple[str, ...] = ()


def load_adapter(
    name: str, path: str, scale: float, base: GGUFFile, arch: Architecture
) -> AdapterFile:
    """The adapter in the file at `path`, for the model in `base`, or for a head of it that drafts:
    then of all its pairs those beside the head's own tensors.

    Raises UsageError where there is no such file, BadModelFile for one that is no adapter or is
    broken, UnsupportedModel for one of another model or of what is not adapted here.
    """
    with open_gguf(path) as file:
        _require_adapter(file, base)
        alpha = file.number("adapter.lora.alpha", 0.0)
        specs = {spec.name: spec for spec in tensor_table(arch, base.tensors)}
        targets = _targets(file)
        of_heads = [target for target in targets if _is_of_heads(target, arch)]
        own = of_heads if arch.is_head else [name for name in targets if name not in of_heads]
        pairs = {target: _pair(file, target, specs, arch, alpha) for target in own}
    if not targets:
        limit = "an adapter has NAME.lora_a and NAME.lora_b"
        raise BadModelFile(path, "number of tensors", 0, limit, "download it again")
    digest = hashlib.blake2b(digest_size=32)
    for target, pair in sorted(pairs.items()):
        shape = f"{target} {pair.down.shape} {pair.up.shape} {pair.factor!r}"
        digest.update(shape.encode() + pair.down.tobytes() + pair.up.tobytes())
    return AdapterFile(name, Path(path), scale, pairs, digest.digest(), tuple(of_heads))


def _is_of_heads(target: str, arch: Architecture) -> bool:
    """Whether a tensor is one of a layer that only drafts, or of the head `arch`."""
    if arch.is_head:
        return target.startswith(f"blk.{arch.first_layer}.")
    behind = range(arch.num_layers, arch.num_layers + len(arch.draft_layers))
    return any(target.startswith(f"blk.{layer}.") for layer in behind)


def _require_adapter(file: GGUFFile, base: GGUFFile) -> None:
    require_adapter(file)
    found = file.text("adapter.type", "lora")
    if found != "lora":
        raise UnsupportedModel(
            file.path, "adapter.type", found, "adapters of type lora are applied"
        )
    if _INVOKED in file.metadata:
        limit = "an adapter is applied to all tokens of a request, not from such tokens on"
        raise UnsupportedModel(file.path, _INVOKED, Words("given"), limit)
    key = "general.architecture"
    theirs, ours = file.text(key), base.text(key)
    if theirs != ours:
        limit = f"{base.path.name} is {ours!r}"
        raise UnsupportedModel(file.path, key, theirs, limit, "open the model that it was made for")


def _targets(file: GGUFFile) -> list[str]:
    """The names of the matrices that the pairs stand beside."""
    targets: dict[str, None] = {}
    for name in file.tensors:
        if not name.endswith(_ENDS):
            limit = "an adapter is made of NAME.lora_a and NAME.lora_b alone"
            raise UnsupportedModel(file.path, "tensor", name, limit, "merge it into the model")
        targets[name[: -len(_ENDS[0])]] = None
    for target in targets:
        for end in _ENDS:
            if target + end not in file.tensors:
                limit = "its other half is there"
                raise BadModelFile(file.path, target + end, MISSING, limit, "download it again")
    return list(targets)


def _pair(
    file: GGUFFile,
    target: str,
    specs: Mapping[str, TensorSpec],
    arch: Architecture,
    alpha: float,
) -> LowRankPair:
    spec = specs.get(target)
    if spec is None or spec.kind is TensorKind.CONSTANT:
        limit = f"this {arch.name} model has no tensor of that name"
        way_out = "open the model that it was made for"
        raise UnsupportedModel(file.path, "adapted tensor", target, limit, way_out)
    is_table = is_token_table(spec)
    _require_adaptable(file, spec, is_table=is_table)
    down, up = (file.tensors[target + end] for end in _ENDS)
    *lead, num_rows, num_columns = spec.shape
    num_axes = len(spec.shape)
    rank = _rank(file, down, num_axes, axis=-1 if is_table else -2)
    shapes = (*lead, rank, num_columns), (*lead, num_rows, rank)
    if is_table:
        shapes = (num_rows, rank), (num_columns, rank)
    for info, wanted in zip((down, up), shapes, strict=True):
        if _with_ones(info, num_axes) != wanted:
            limit = f"{target} of this model is {spec.shape}, so it must be {wanted}"
            way_out = "open the model that it was made for"
            raise BadModelFile(file.path, f"{info.name} shape", info.shape, limit, way_out)
    factor = alpha / rank if alpha else 1.0
    is_half = down.dtype is DType.F16 and up.dtype is DType.F16
    numbers = [_numbers(file, info, num_axes) for info in (down, up)]
    return LowRankPair(numbers[0], numbers[1], factor, is_half)


def is_token_table(spec: TensorSpec) -> bool:
    """Whether the embeddings of tokens are looked up in it."""
    return any(part.place == "token_table" for part in spec.loaded)


def _require_adaptable(file: GGUFFile, spec: TensorSpec, *, is_table: bool) -> None:
    """Raises UnsupportedModel for a tensor beside which no adapter is applied."""
    if is_table and spec.kind is TensorKind.TABLE:
        return
    if spec.kind is TensorKind.MATRIX and not is_table:
        return
    limit = "matrices of attention, feed-forwards, experts and logits are adapted"
    if is_table:
        limit = (
            "this model makes its logits with that table, too, which the adapter was not made for"
        )
    way_out = "merge the adapter into the model, by llama.cpp's llama-export-lora"
    raise UnsupportedModel(file.path, "adapted tensor", spec.name, limit, way_out)


def _rank(file: GGUFFile, down: TensorInfo, num_axes: int, *, axis: int) -> int:
    rank = _with_ones(down, num_axes)[axis]
    if not 1 <= rank <= MAX_RANK:
        raise BadModelFile.out_of_range(file.path, f"rank of {down.name}", rank, 1, MAX_RANK)
    return rank


def _with_ones(info: TensorInfo, num_axes: int) -> tuple[int, ...]:
    """Its shape, with the axes of 1 that a file may leave out."""
    return (1,) * (num_axes - len(info.shape)) + tuple(info.shape)


def _numbers(file: GGUFFile, info: TensorInfo, num_axes: int) -> Array:
    """A matrix or a stack of them as f32; raises BadModelFile for a number that is none."""
    *lead, num_columns = _with_ones(info, num_axes)
    raw = file.raw(info.name).reshape(math.prod(lead), info.dtype.num_bytes(num_columns))
    rows = np.array(dequantise(raw, info.dtype, num_columns), np.float32)
    values = rows.reshape(*lead, num_columns)
    if not np.isfinite(values).all():
        at = [int(index) for index in np.argwhere(~np.isfinite(values))[0]]
        limit = "an adapter has finite numbers; download it again"
        raise BadModelFile(file.path, f"{info.name}{at}", float(values[tuple(at)]), limit)
    return values
