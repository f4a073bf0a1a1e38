"""What `hypo inspect` tells about a model file, as records; prints and judges nothing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hypocenter.base.tensor import WEIGHT_TYPES, DType
from hypocenter.kernels.weights.block_types import RESERVED
from hypocenter.kernels.weights.cpu_layout import packed_bytes
from hypocenter.kernels.weights.grid_types import bytes_of_iq1_m_scale
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.gguf.file_types import FILE_TYPES
from hypocenter.model.gguf.values import StringArray, TensorInfo, ValueType
from hypocenter.settings.config import OnProgress

SLAB_BYTES = 1 << 22
MAX_SHOWN_ITEMS = 6
MAX_SHOWN_CHARS = 200
MAX_TEXT_CHARS = 1 << 20
MAX_FINDINGS_PER_TENSOR = 8
MAX_FINDINGS = 1000


#: Where each type keeps floats that may be NaN or infinite: field, byte in the block, float type.
#: Offsets are those of the block structs in ggml-common.h.
FLOAT_FIELDS: dict[DType, tuple[tuple[str, int, DType], ...]] = {
    DType.F32: (("value", 0, DType.F32),),
    DType.F16: (("value", 0, DType.F16),),
    DType.BF16: (("value", 0, DType.BF16),),
    DType.Q4_0: (("d", 0, DType.F16),),
    DType.Q4_1: (("d", 0, DType.F16), ("m", 2, DType.F16)),
    DType.Q5_0: (("d", 0, DType.F16),),
    DType.Q5_1: (("d", 0, DType.F16), ("m", 2, DType.F16)),
    DType.Q8_0: (("d", 0, DType.F16),),
    DType.Q2_K: (("d", 80, DType.F16), ("dmin", 82, DType.F16)),
    DType.Q3_K: (("d", 108, DType.F16),),
    DType.Q4_K: (("d", 0, DType.F16), ("dmin", 2, DType.F16)),
    DType.Q5_K: (("d", 0, DType.F16), ("dmin", 2, DType.F16)),
    DType.Q6_K: (("d", 208, DType.F16),),
    DType.IQ4_NL: (("d", 0, DType.F16),),
    DType.IQ4_XS: (("d", 0, DType.F16),),
    # The exponent of a power of two, but for the one that stands for no number.
    DType.MXFP4: (("e", 0, DType.U8),),
    # Four e4m3 without their sign, of which one stands for no number.
    DType.NVFP4: tuple((f"d[{i}]", i, DType.U8) for i in range(4)),
    DType.IQ3_S: (("d", 0, DType.F16),),
    DType.IQ3_XXS: (("d", 0, DType.F16),),
    DType.IQ2_S: (("d", 0, DType.F16),),
    DType.IQ2_XS: (("d", 0, DType.F16),),
    DType.IQ2_XXS: (("d", 0, DType.F16),),
    # Put together of four parts.
    DType.IQ1_M: (("d", 0, DType.F16),),
    DType.IQ1_S: (("d", 0, DType.F16),),
    DType.TQ2_0: (("d", 64, DType.F16),),
    DType.TQ1_0: (("d", 52, DType.F16),),
    DType.Q2_0: (("d", 0, DType.F16),),
    DType.Q1_0: (("d", 0, DType.F16),),
}
#: The exponent bits of each float type: all set means NaN or infinite. Of bytes `RESERVED` says it.
_EXPONENT: dict[DType, int] = {
    DType.F32: 0x7F800000,
    DType.F16: 0x7C00,
    DType.BF16: 0x7F80,
}


@dataclass(frozen=True, slots=True)
class MetadataLine:
    """One metadata key. `shown` is a bounded, printable text; `length` is None unless an array."""

    key: str
    kind: str
    length: int | None
    shown: str


@dataclass(frozen=True, slots=True)
class TypeCount:
    """All tensors of one type."""

    dtype: DType
    num_tensors: int
    num_elements: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BadFloat:
    """A NaN or an infinity. `block` counts blocks of the tensor's type (elements, if plain)."""

    tensor: str
    dtype: DType
    block: int
    field: str
    value: float

    def __str__(self) -> str:
        unit = "block" if self.dtype.is_quantised else "element"
        where = f"{self.field} of {unit} {self.block}"
        return f"{self.tensor} ({self.dtype.name}): {where} is {self.value}"


@dataclass(frozen=True, slots=True)
class ShardHash:
    """One file of the model and the sha256 of all its bytes."""

    path: Path
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorsReport:
    """What `check` saw. `findings` is bounded, `num_bad_floats` counts every one.

    `num_floats` is how many floats were looked at, so that "nothing found" can be weighed.
    """

    num_tensors: int
    num_floats: int
    num_bad_floats: int
    findings: tuple[BadFloat, ...]
    #: Names of tensors all of whose bytes are zeros, biases apart.
    zeros: tuple[str, ...]
    shards: tuple[ShardHash, ...]


def metadata_lines(file: GGUFFile) -> list[MetadataLine]:
    """Every key in the order of the file; long arrays as their first few items."""
    lines = []
    for key in file.metadata:
        entry = file.metadata.entry(key)
        length = entry.size if entry.is_array else None
        lines.append(MetadataLine(key, file.metadata.kind(key), length, _show(file, key)))
    return lines


def plain_value(file: GGUFFile, key: str) -> Any:
    """A metadata value for JSON: number, flag, text; an array as its length and first few items.

    A text is cut after MAX_TEXT_CHARS; NaN and infinities, which JSON lacks, become text.
    """
    entry = file.metadata.entry(key)
    if entry.type is ValueType.STRING and not entry.is_array:
        head = file.metadata.raw_text(key)[: 4 * MAX_TEXT_CHARS]
        return head.decode("utf-8", "replace")[:MAX_TEXT_CHARS]
    value = file.metadata[key]
    if isinstance(value, StringArray):
        raw = (value.raw(index) for index in range(min(len(value), MAX_SHOWN_ITEMS)))
        first: list[Any] = [item[:MAX_TEXT_CHARS].decode("utf-8", "replace") for item in raw]
    elif isinstance(value, np.ndarray):
        first = [_finite(item) for item in value[:MAX_SHOWN_ITEMS].tolist()]
    elif isinstance(value, tuple):
        first = [str(child) for child in entry.children[:MAX_SHOWN_ITEMS]]
    else:
        return _finite(value)
    return {"length": entry.size, "first": first}


def _finite(value: Any) -> Any:
    is_bad = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_bad else value


def type_counts(file: GGUFFile) -> list[TypeCount]:
    """Tensors by type, the type with the most bytes first."""
    by_type: dict[DType, list[TensorInfo]] = {}
    for info in file.tensors.values():
        by_type.setdefault(info.dtype, []).append(info)
    counts = [
        TypeCount(
            dtype,
            len(infos),
            sum(info.num_bytes // dtype.block_bytes * dtype.block_elements for info in infos),
            sum(info.num_bytes for info in infos),
        )
        for dtype, infos in by_type.items()
    ]
    return sorted(counts, key=lambda count: -count.num_bytes)


def loaded_bytes(file: GGUFFile) -> int:
    """Bytes that the weights take once packed for the kernels; finer codes are widened."""
    return sum(
        packed_bytes(info.dtype, *info.shape) if len(info.shape) > 1 else info.num_bytes
        for info in file.tensors.values()
        if info.dtype in WEIGHT_TYPES
    )


def check(file: GGUFFile, progress: OnProgress | None = None) -> TensorsReport:
    """Look at every float and every block scale for NaN and infinity, and hash every shard.

    `progress` gets what is being read and the share of all work that is done, from 0 to 1.
    """
    sizes = [len(file.shard_bytes(shard)) for shard in range(len(file.shard_paths))]
    total = sum(sizes) + sum(info.num_bytes for info in file.tensors.values())
    done = 0

    def advance(what: str, num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(what, done / total)

    findings: list[BadFloat] = []
    num_floats = num_bad = 0
    zeros = []
    for info in file.tensors.values():
        num_kept = 0
        if not info.name.endswith(".bias") and not _has_any(file.raw(info.name)):
            zeros.append(info.name)
        for found in _scan(file, info, advance):
            num_floats += found.num_floats
            num_bad += found.num_bad
            room = min(MAX_FINDINGS_PER_TENSOR - num_kept, MAX_FINDINGS - len(findings))
            findings.extend(found.first[:room])
            num_kept += len(found.first[:room])
    shards = tuple(
        ShardHash(path, sizes[shard], _sha256(file, shard, advance))
        for shard, path in enumerate(file.shard_paths)
    )
    return TensorsReport(
        len(file.tensors), num_floats, num_bad, tuple(findings), tuple(zeros), shards
    )


def _has_any(raw: np.ndarray) -> bool:
    """Whether any byte is not 0; stops at the first slab that has one."""
    return any(raw[start : start + SLAB_BYTES].any() for start in range(0, len(raw), SLAB_BYTES))


@dataclass(frozen=True, slots=True)
class _Found:
    num_floats: int
    num_bad: int
    first: list[BadFloat]


def _scan(
    file: GGUFFile, info: TensorInfo, advance: Callable[[str, int], None]
) -> Iterator[_Found]:
    block_bytes = info.dtype.block_bytes
    blocks = file.raw(info.name).reshape(-1, block_bytes)  # [num_blocks, block_bytes] u8
    step = SLAB_BYTES // block_bytes
    for start in range(0, len(blocks), step):
        slab = blocks[start : start + step]
        for field, offset, kind in FLOAT_FIELDS[info.dtype]:
            yield _bad_floats(info, slab, start, field, offset, kind)
        advance(info.name, slab.size)


def first_bad_block(blocks: np.ndarray, dtype: DType) -> int | None:
    """The first block (of plain types: element) of uint8 bytes with NaN or infinity; or None."""
    slab = blocks.reshape(-1, dtype.block_bytes)
    found = [_bad_places(slab, dtype, *field[1:])[1] for field in FLOAT_FIELDS[dtype]]
    return min((int(bad[0]) for bad in found if bad.size), default=None)


def _bad_places(
    slab: np.ndarray, dtype: DType, offset: int, kind: DType
) -> tuple[np.ndarray, np.ndarray]:
    """The bits of a float of each block, and the blocks in which it is NaN or infinite."""
    width = kind.block_bytes
    packed = bytes_of_iq1_m_scale(slab) if dtype is DType.IQ1_M else slab
    packed = np.ascontiguousarray(packed[:, offset : offset + width])
    bits = packed.view(f"<u{width}")[:, 0]  # [num_blocks in the slab]
    all_set = RESERVED[dtype][0] if dtype in RESERVED else _EXPONENT[kind]
    exponent = bits.dtype.type(all_set)
    return bits, np.flatnonzero((bits & exponent) == exponent)


def _bad_floats(
    info: TensorInfo, slab: np.ndarray, start: int, field: str, offset: int, kind: DType
) -> _Found:
    bits, bad = _bad_places(slab, info.dtype, offset, kind)
    first = [
        BadFloat(info.name, info.dtype, start + int(row), field, _as_float(int(bits[row]), kind))
        for row in bad[:MAX_FINDINGS_PER_TENSOR]
    ]
    return _Found(len(bits), len(bad), first)


def _as_float(bits: int, kind: DType) -> float:
    if kind is DType.F16:
        return float(np.uint16(bits).view(np.float16))
    if kind is DType.U8:
        return float("nan")
    return float(np.uint32(bits << 16 if kind is DType.BF16 else bits).view(np.float32))


def _sha256(file: GGUFFile, shard: int, advance: Callable[[str, int], None]) -> str:
    data = file.shard_bytes(shard)
    digest = hashlib.sha256()
    for start in range(0, len(data), SLAB_BYTES):
        slab = data[start : start + SLAB_BYTES]
        digest.update(slab.data)
        advance(file.shard_paths[shard].name, len(slab))
    return digest.hexdigest()


def _show(file: GGUFFile, key: str) -> str:
    entry = file.metadata.entry(key)
    if entry.type is ValueType.STRING and not entry.is_array:
        head = file.metadata.raw_text(key)[: 4 * MAX_SHOWN_CHARS].decode("utf-8", "replace")
        return _clip(repr(head[:MAX_SHOWN_CHARS]), entry.size > MAX_SHOWN_CHARS)
    value = file.metadata[key]
    if not entry.is_array:
        known = _file_type(value) if key == "general.file_type" else ""
        return f"{value}{known}"
    if isinstance(value, StringArray):
        raw = (
            value.raw(index)[:MAX_SHOWN_CHARS] for index in range(min(len(value), MAX_SHOWN_ITEMS))
        )
        items = [repr(item.decode("utf-8", "replace")) for item in raw]
    elif isinstance(value, np.ndarray):
        items = [str(item) for item in value[:MAX_SHOWN_ITEMS].tolist()]
    else:
        items = [str(child) for child in entry.children[:MAX_SHOWN_ITEMS]]
    text = ", ".join(items)[:MAX_SHOWN_CHARS]
    return f"[{_clip(text, entry.size > MAX_SHOWN_ITEMS)}]"


def _file_type(value: object) -> str:
    """What the number of `general.file_type` stands for."""
    name = FILE_TYPES.get(value) if isinstance(value, int) else None
    return f" ({name})" if name else ""


def _clip(text: str, more: bool) -> str:
    return f"{text} ..." if more else text
