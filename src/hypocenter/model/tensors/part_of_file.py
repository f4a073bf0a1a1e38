"""The tensors of one part of a model: which rows and columns of the file are its own."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.part import Part
from hypocenter.model.facts.split import cannot_split
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.gguf.values import TensorInfo

_OF_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
#: Tensors by what stands between layer and kind. Their rows are split.
_BY_ROWS = frozenset(
    {"attn_q", "attn_k", "attn_v", "attn_qkv", "attn_sinks", "ffn_gate", "ffn_up"}
    | {"ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_gate_shexp", "ffn_up_shexp"}
)
#: So are theirs, where each head has a row of its own.
_BY_HEADS = frozenset({"attn_q_norm", "attn_k_norm"})
#: Their columns are; a bias is added by the first part alone.
_BY_COLUMNS = frozenset({"attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp"})


@dataclass(frozen=True, slots=True)
class _Cut:
    """A tensor as [num_leading, units, unit_bytes], of whose units a part has some.

    `runs` are where those begin and end. Without any the part holds zeros.
    """

    source: str
    num_leading: int
    unit_bytes: int
    runs: tuple[tuple[int, int], ...]


class PartOfFile(GGUFFile):
    """An open model of which only the tensors of one part are seen, cut to size.

    `facts` are those of the whole model, and `part_of` has had no objection.
    """

    def __init__(self, whole: GGUFFile, facts: Architecture, part: Part) -> None:
        """Raises BadSetting where a part would end within a block of quantised weights."""
        super().__init__(whole._open())
        self._whole, self._facts, self._part = whole, facts, part
        self._cuts: dict[str, _Cut] = {}
        infos = {name: self._cut(info) for name, info in whole.tensors.items()}
        if facts.vocab_size % part.num_parts == 0:
            table = whole.tensors["token_embd.weight"]
            output = whole.tensors.get("output.weight", table)
            infos["output.weight"] = self._by_rows("output.weight", output, (facts.vocab_size,))
            if "output.bias" in whole.tensors:
                bias = whole.tensors["output.bias"]
                infos["output.bias"] = self._by_rows("output.bias", bias, (facts.vocab_size,))
        self._tensors = MappingProxyType(infos)

    def raw(self, name: str) -> Array:
        """The bytes of the part's own rows or columns of a tensor: uint8 [num_bytes]."""
        cut = self._cuts.get(name)
        if cut is None:
            return self._whole.raw(name)
        if not cut.runs:
            return np.zeros(self._tensors[name].num_bytes, np.uint8)
        units = self._whole.raw(cut.source).reshape(cut.num_leading, -1, cut.unit_bytes)
        runs = [units[:, begin:end] for begin, end in cut.runs]
        return np.concatenate(runs, axis=1).reshape(-1) if len(runs) > 1 else _flat(runs[0])

    def let_go(self, name: str) -> None:
        cut = self._cuts.get(name)
        self._whole.let_go(name if cut is None else cut.source)

    def _cut(self, info: TensorInfo) -> TensorInfo:
        found = _OF_LAYER.fullmatch(info.name)
        if found is None:
            return info
        layer, of, kind = int(found[1]), found[2], found[3]
        if of in _BY_ROWS or (of in _BY_HEADS and len(info.shape) == 2):
            axis = -2 if kind == "weight" and of != "attn_sinks" else -1
            return self._by_rows(info.name, info, self._segments(layer, of, info.shape[axis]))
        if of not in _BY_COLUMNS:
            return info
        if kind == "weight":
            return self._by_columns(info)
        if self._part.rank:
            self._cuts[info.name] = _Cut(info.name, 1, 1, ())
        return info

    def _segments(self, layer: int, of: str, num_rows: int) -> tuple[int, ...]:
        """What lies one after the other in a tensor, each to be split by itself."""
        if of == "attn_qkv":
            kv = self._facts.layers[layer].kv_width
            return (num_rows - 2 * kv, kv, kv)
        is_joint = of == "ffn_gate_up_exps" or (of == "ffn_up" and self._facts.family.fused_gate_up)
        return (num_rows // 2,) * 2 if is_joint else (num_rows,)

    def _by_rows(self, name: str, info: TensorInfo, segments: tuple[int, ...]) -> TensorInfo:
        is_vector = sum(segments) == info.shape[-1] and name.endswith((".bias", "sinks.weight"))
        axis = len(info.shape) - (1 if is_vector else 2)
        unit_bytes = info.dtype.num_bytes(math.prod(info.shape[axis + 1 :]))
        return self._keep(name, info, axis, unit_bytes, segments)

    def _by_columns(self, info: TensorInfo) -> TensorInfo:
        """Blocks of a row stay whole."""
        num_columns, per_block = info.shape[-1], info.dtype.block_elements
        num_parts = self._part.num_parts
        if num_columns % (per_block * num_parts):
            problem = f"{num_columns} columns of {info.name} are no {num_parts} parts of whole "
            raise cannot_split(self._facts, num_parts, f"{problem}blocks of {per_block}")
        num_blocks = num_columns // per_block
        axis = len(info.shape) - 1
        return self._keep(info.name, info, axis, info.dtype.block_bytes, (num_blocks,))

    def _keep(
        self, name: str, info: TensorInfo, axis: int, unit_bytes: int, segments: tuple[int, ...]
    ) -> TensorInfo:
        rank, num_parts = self._part.rank, self._part.num_parts
        runs, start = [], 0
        for length in segments:
            size = length // num_parts
            runs.append((start + rank * size, start + (rank + 1) * size))
            start += length
        num_leading = math.prod(info.shape[:axis])
        self._cuts[name] = _Cut(info.name, num_leading, unit_bytes, tuple(runs))
        shape = list(info.shape)
        shape[axis] //= num_parts
        return replace(info, name=name, shape=tuple(shape), num_bytes=info.num_bytes // num_parts)


def _flat(units: Array) -> Array:
    return np.ascontiguousarray(units).reshape(-1)
