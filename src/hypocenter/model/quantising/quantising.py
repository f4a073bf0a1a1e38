"""Writes a model file in another type: tensor by tensor, some rows at a time.

Raises before anything is written for all that can be known before. What is not finite is refused.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hypocenter.base.dtypes import Array, Float32s
from hypocenter.base.errors import BadModelFile, UnsupportedModel, UsageError, Words
from hypocenter.base.tensor import DType
from hypocenter.base.wording import bytes_text
from hypocenter.kernels.blocks.block_quantise import quantise_rows
from hypocenter.kernels.weights.block_types import dequantise
from hypocenter.model.facts.families import FAMILIES
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.gguf.identity import require_model
from hypocenter.model.gguf.inspection import first_bad_block
from hypocenter.model.gguf.values import TensorInfo
from hypocenter.model.gguf.writing import (
    NewValue,
    PlannedTensor,
    TensorWriter,
    alignment_of,
    file_bytes,
    head_of,
    new_file,
)
from hypocenter.model.quantising.importance import (
    Importance,
    refusal_of_range,
    weights_of,
)
from hypocenter.model.quantising.mixes import (
    EMBEDDINGS,
    Chooser,
    Mix,
    ModelSizes,
    has_factor,
    in_order,
    needs_weights,
)
from hypocenter.settings.config import OnProgress

#: Numbers that are held as f32 at a time, and bytes that are copied at a time.
_MAX_NUMBERS, _MAX_BYTES = 1 << 22, 1 << 24
#: `general.quantization_version` of the blocks that are made (GGML_QNT_VERSION).
_QUANTISATION_VERSION = 2
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_MAX_VALUE_BYTES = 127
#: No block with scales of f16 reaches it: the largest number is 65504 * 127 * 32, of Q6_K. Searches
#: would take squares of what is far beyond, find infinity, and give zeros.
_BEYOND_HALVES = np.float32(1 << 30)
#: The largest number of a block of NVFP4: an e2m1 of 6 times an e4m3 of 448.
_MOST_OF_NVFP4 = np.float32(6 * 448)
#: What a factor makes of the largest number of a matrix. ggml rounds all scales from 248 on to 448,
#: which is too coarse for blocks that need less.
_SCALED_NVFP4 = np.float32(6 * 240)
_LEAST_SCALE = np.finfo(np.float32).tiny
_OTHER_TYPE = "take another type, such as BF16"


@dataclass(frozen=True, slots=True)
class Quantised:
    """What came of a quantisation. `fallbacks`: tensors whose rows are no blocks of the type that
    the mix wants, and the type that they got. `unweighed`: those that the importance matrix does
    not name."""

    num_bytes_before: int
    num_bytes: int
    num_tensors: dict[DType, int]
    new_values: dict[str, NewValue]
    dropped: tuple[str, ...]
    fallbacks: dict[str, DType]
    unweighed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WantedFile:
    """What is asked for. `pure`: one type for all tensors. `requantise`: also of what is quantised
    already."""

    mix: Mix
    importance: Importance | None = None
    pure: bool = False
    requantise: bool = False


def quantise(
    file: GGUFFile, out: Path, request: WantedFile, progress: OnProgress | None = None
) -> Quantised:
    """Write `file`, or all files of a split model, as one new file `out` of the mix.

    Raises UsageError for what cannot be, also where `out` is there; UnsupportedModel for a file
    that is no language model or of an architecture that is not run; BadModelFile for a number that
    is not finite or that a type cannot hold; OSError.
    """
    _require_new(file, out)
    require_model(file)
    arch = file.text("general.architecture")
    if arch not in FAMILIES:
        limit = "the rules of a mix are those of architectures that run here"
        raise UnsupportedModel(file.path, "general.architecture", arch, limit)
    infos = in_order(file.tensors.values())
    planned, fallbacks = _plan(file, infos, request)
    weights = [
        _weights(file, info, tensor, request) for info, tensor in zip(infos, planned, strict=True)
    ]
    new_values = _new_values(request)
    dropped = tuple(key for key in _SPLIT_KEYS if key in file.metadata)
    own = _experts_with_factors(file, planned)
    planned = [replace(x, dtype=DType.F32) if x.name in own else x for x in planned]
    of_scales = [_scales_tensor(file, tensor) for tensor in planned]
    both = [x for pair in zip(planned, of_scales, strict=True) for x in pair if x is not None]
    head, alignment = head_of(file, both, new_values, dropped), alignment_of(file)
    total = file_bytes(head, both, alignment)
    _require_room(out, total)
    done, whole = 0, sum(info.num_bytes for info in infos)
    with new_file(out, head, alignment) as writer:
        tasks = zip(infos, planned, of_scales, weights, strict=True)
        for info, tensor, scales_tensor, of_columns in tasks:
            if info.name in own:
                _write_factors(file, info, own[info.name], writer)
                continue
            importance = request.importance if of_columns is not None else None
            has_scales = scales_tensor is not None or _scale_of(info.name) in own
            scales = _scales(file, info) if has_scales else None
            for num_bytes in _write(
                file, info, tensor.dtype, importance, of_columns, scales, writer
            ):
                done += num_bytes
                if progress is not None:
                    progress(f"quantizing {info.name}", done / whole)
            writer.end_tensor()
            if scales_tensor is not None and scales is not None:
                writer.write(scales.view(np.uint8))
                writer.end_tensor()
            file.let_go(info.name)
    changed = [
        info.name
        for info, tensor, of_columns in zip(infos, planned, weights, strict=True)
        if tensor.dtype is not info.dtype and of_columns is None
    ]
    before = sum(len(file.shard_bytes(shard)) for shard in range(len(file.shard_paths)))
    return Quantised(
        num_bytes_before=before,
        num_bytes=total,
        num_tensors=dict(Counter(tensor.dtype for tensor in both)),
        new_values=new_values,
        dropped=dropped,
        fallbacks=fallbacks,
        unweighed=tuple(changed) if request.importance is not None else (),
    )


def _require_new(file: GGUFFile, out: Path) -> None:
    for path in file.shard_paths:
        if out.exists() and out.samefile(path):
            raise UsageError(f"{out} is the model itself; name another file")
    if out.is_symlink() or out.exists():
        raise UsageError(f"{out} is there already; name another file, or remove it")
    if not out.parent.is_dir():
        raise UsageError(f"{out}: there is no folder {out.parent}; make it first")


def _plan(
    file: GGUFFile, infos: Sequence[TensorInfo], request: WantedFile
) -> tuple[list[PlannedTensor], dict[str, DType]]:
    """The tensors of the new file, and which got another type because of their shape."""
    chooser = Chooser(
        request.mix,
        ModelSizes.of(file),
        [info.name for info in infos],
        has_weights=request.importance is not None,
        pure=request.pure,
    )
    planned, fallbacks = [], {}
    for info in infos:
        dtype, wanted = chooser.choose(info)
        if dtype is not wanted:
            fallbacks[info.name] = dtype
        if dtype is not info.dtype and info.dtype.is_quantised:
            _require_requantised(file, info, dtype, request)
        planned.append(PlannedTensor(info.name, dtype, info.shape))
    return planned, fallbacks


def _scales_tensor(file: GGUFFile, tensor: PlannedTensor) -> PlannedTensor | None:
    """What holds the factor of each matrix of a tensor that becomes NVFP4, where readers look for
    one and the file has none."""
    name, old = tensor.name, file.tensors[tensor.name]
    is_new = tensor.dtype is DType.NVFP4 and old.dtype is not DType.NVFP4
    if not is_new or not has_factor(name) or _scale_of(name) in file.tensors:
        return None
    num_matrices = old.shape[0] if len(old.shape) == 3 else 1
    return PlannedTensor(_scale_of(name), DType.F32, (num_matrices,))


def _scale_of(name: str) -> str:
    return name.removesuffix(".weight") + ".scale"


def _experts_with_factors(
    file: GGUFFile, planned: Sequence[PlannedTensor]
) -> dict[str, TensorInfo]:
    """Factors that the model has of its experts, by name, and those that become NVFP4: what these
    are divided by is multiplied into the model's factors, which stand at the same place."""
    experts = FAMILIES[file.text("general.architecture")].experts
    found = {}
    for tensor in planned:
        old, scale = file.tensors[tensor.name], _scale_of(tensor.name)
        is_new = tensor.dtype is DType.NVFP4 and old.dtype is not DType.NVFP4
        if is_new and scale in file.tensors and experts and experts.has_factors(tensor.name):
            found[scale] = old
    return found


def _write_factors(
    file: GGUFFile, info: TensorInfo, experts: TensorInfo, writer: TensorWriter
) -> None:
    """Write the model's own factors of experts, times what these are divided by."""
    factors = dequantise(file.raw(info.name).reshape(1, -1), info.dtype, info.shape[-1])
    writer.write((factors[0] * _scales(file, experts)).view(np.uint8))
    writer.end_tensor()


def _scales(file: GGUFFile, info: TensorInfo) -> Float32s:
    """What each matrix of a tensor is divided by before it becomes NVFP4, f32 [num_matrices]: its
    largest number becomes `_SCALED_NVFP4`. 1 where it has but zeros."""
    num_matrices = info.shape[0] if len(info.shape) == 3 else 1
    num_columns, largest = info.shape[-1], np.zeros(num_matrices, np.float32)
    rows = file.raw(info.name).reshape(num_matrices, -1, info.dtype.num_bytes(num_columns))
    step = max(1, _MAX_NUMBERS // num_columns)
    for matrix in range(num_matrices):
        for start in range(0, rows.shape[1], step):
            x = dequantise(rows[matrix, start : start + step], info.dtype, num_columns)
            largest[matrix] = max(largest[matrix], np.abs(x).max())
    found = largest / _SCALED_NVFP4
    usable = (found >= _LEAST_SCALE) & np.isfinite(found)  # of what is neither others tell
    return np.where(usable, found, np.float32(1))


def _require_requantised(
    file: GGUFFile, info: TensorInfo, dtype: DType, request: WantedFile
) -> None:
    name = f"{file.path}: {info.name!r} is {info.dtype.name} already"
    if info.dtype is DType.NVFP4:
        raise UsageError(f"{name}, whose scales are in other tensors; take a file in F16 or BF16")
    if not request.requantise:
        raise UsageError(
            f"{name}, and {dtype.name} of it loses twice; take a file in F16, BF16 or F32, or give "
            "--allow-requantize"
        )


def _weights(
    file: GGUFFile, info: TensorInfo, tensor: PlannedTensor, request: WantedFile
) -> Float32s | None:
    """What columns count, for each matrix of a tensor; None where nothing says it."""
    if tensor.dtype is info.dtype:
        return None
    num_matrices = info.shape[0] if len(info.shape) == 3 else 1
    name, size = info.name, num_matrices * info.shape[-1]
    importance = request.importance
    if name in EMBEDDINGS and importance is not None:
        found = importance.weights.get(name)
        # A vector for each token says nothing of columns that are multiplied.
        if found is None or found.size != size:
            return None
    weights = weights_of(importance, name, size, num_matrices)
    if weights is None and needs_weights(name, tensor.dtype, request.mix):
        given = f"{importance.path} has none of it" if importance else "give --imatrix FILE"
        raise UsageError(
            f"{file.path}: {name!r} as {tensor.dtype.name} in {request.mix.name} needs an "
            f"importance matrix; {given}"
        )
    return weights


def _new_values(request: WantedFile) -> dict[str, NewValue]:
    values: dict[str, NewValue] = {
        "general.quantization_version": _QUANTISATION_VERSION,
        "general.file_type": request.mix.number,
    }
    importance = request.importance
    if importance is not None:
        values["quantize.imatrix.file"] = _short(str(importance.path))
        if importance.dataset:
            values["quantize.imatrix.dataset"] = _short(importance.dataset)
        values["quantize.imatrix.entries_count"] = len(importance.weights)
        if importance.num_chunks:
            values["quantize.imatrix.chunks_count"] = importance.num_chunks
    return values


def _short(text: str) -> str:
    """The beginning of a text, as much as llama-quantize keeps."""
    return text.encode("utf-8", "surrogateescape")[:_MAX_VALUE_BYTES].decode(
        "utf-8", "surrogateescape"
    )


def _require_room(out: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < num_bytes:
        raise UsageError(
            f"{out} will have {bytes_text(num_bytes)}, but {bytes_text(free)} are free in "
            f"{out.parent}; make room or name another folder"
        )


def _write(
    file: GGUFFile,
    info: TensorInfo,
    dtype: DType,
    importance: Importance | None,
    weights: Float32s | None,
    scales: Float32s | None,
    writer: TensorWriter,
) -> Iterator[int]:
    """Write a tensor in `dtype`, each of its matrices divided by one of `scales` where there are
    any; yields how many bytes of the old one are done.

    Raises BadModelFile, of the importance matrix where that is at fault, for what cannot be held.
    """
    raw = file.raw(info.name)
    if dtype is info.dtype:
        for start in range(0, raw.size, _MAX_BYTES):
            part = raw[start : start + _MAX_BYTES]
            writer.write(part)
            yield part.size
        return
    num_columns = info.shape[-1]
    rows = raw.reshape(-1, info.dtype.num_bytes(num_columns))
    num_matrices = info.shape[0] if len(info.shape) == 3 else 1
    rows_of_matrix = len(rows) // num_matrices
    step = max(1, _MAX_NUMBERS // num_columns)
    has_numbers = keeps_numbers = False
    for matrix in range(num_matrices):
        of_matrix = None
        if weights is not None:
            of_matrix = np.ascontiguousarray(weights.reshape(num_matrices, -1)[matrix])
        end = (matrix + 1) * rows_of_matrix
        for start in range(matrix * rows_of_matrix, end, step):
            part = rows[start : min(start + step, end)]
            x = np.ascontiguousarray(dequantise(part, info.dtype, num_columns))
            if scales is not None:
                x = x / scales[matrix]
            _require_sound(file, info, start, x, dtype)
            blocks = quantise_rows(x, dtype, of_matrix)
            if importance is not None and of_matrix is not None:
                _require_usable(importance, info, start, x, dtype, of_matrix, blocks)
            _require_held(file, info, start, dtype, blocks)
            has_numbers = has_numbers or bool(x.any())
            keeps_numbers = keeps_numbers or bool(blocks.any())
            writer.write(blocks)
            yield part.size
    if has_numbers and not keeps_numbers:
        weighed = f" with the weights of {importance.path}" if importance is not None else ""
        field, limit = f"tensor {info.name!r}", f"{dtype.name} makes zeros of all of it{weighed}"
        raise BadModelFile(file.path, field, Words("too small"), limit, _OTHER_TYPE)


def _require_sound(
    file: GGUFFile, info: TensorInfo, first_row: int, x: Float32s, dtype: DType
) -> None:
    """Raises BadModelFile for a number that is not finite, or beyond what scales of f16 reach."""
    bound = _BEYOND_HALVES if dtype.is_quantised else np.float32(np.inf)
    if dtype is DType.MXFP4:
        bound = np.float32(np.inf)
    if dtype is DType.NVFP4:
        bound = np.nextafter(_MOST_OF_NVFP4 * np.float32(1.001), np.float32(np.inf))
    if (np.abs(x) < bound).all():
        return
    row, column = map(int, np.argwhere(~(np.abs(x) < bound))[0])
    field = f"column {column} of row {first_row + row} of tensor {info.name!r}"
    value = float(x[row, column])
    if np.isfinite(value):
        limit, way_out = f"{dtype.name} reaches not so far", _OTHER_TYPE
    else:
        limit, way_out = "it must be finite", "hypo inspect --check names all of them"
    raise BadModelFile(file.path, field, Words(f"{value:g}"), limit, way_out)


def _require_usable(
    importance: Importance,
    info: TensorInfo,
    first_row: int,
    x: Float32s,
    dtype: DType,
    weights: Float32s,
    blocks: Array,
) -> None:
    """Raises BadModelFile where the weights make numbers or scales that equal ones do not."""
    found = first_bad_block(blocks, dtype)
    if found is None:
        return
    if first_bad_block(quantise_rows(x, dtype, np.ones_like(weights)), dtype) is None:
        row = first_row + found // (blocks.shape[1] // dtype.block_bytes)
        what = f"row {row} as {dtype.name}"
        raise refusal_of_range(importance, info.name, weights, what)


def _require_held(
    file: GGUFFile, info: TensorInfo, first_row: int, dtype: DType, blocks: Array
) -> None:
    """Raises BadModelFile where a number or a scale is beyond the type."""
    found = first_bad_block(blocks, dtype)
    if found is not None:
        per_row = blocks.shape[1] // dtype.block_bytes
        field = f"row {first_row + found // per_row} of tensor {info.name!r}"
        limit = f"a number there is beyond what {dtype.name} can hold"
        raise BadModelFile(file.path, field, Words("too large"), limit, _OTHER_TYPE)
