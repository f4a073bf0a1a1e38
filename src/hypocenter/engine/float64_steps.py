"""Points of a trace computed anew in float64, each from what the same trace has as its inputs.

It knows plain transformers (Llama's kind) and says which others it does not. It runs no kernel:
weights are read out of the model's file, and formulas stand in the kernels' docstrings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hypocenter.base.dtypes import Float64s
from hypocenter.base.errors import HypoError
from hypocenter.base.tensor import DType
from hypocenter.kernels.weights.block_types import as_ggml_reads, dequantise
from hypocenter.model.facts.architecture import Architecture, read_architecture
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.trace.comparing import rms_of
from hypocenter.trace.points import ModelTrace, TracedStep

#: Architectures all of whose layers are what is computed here.
FAMILIES = ("llama", "qwen2", "qwen3")


#: By how much a point may be off, relative to what its op adds: products read activations as 8-bit
#: codes or halves, the cache holds halves, and all else is f32.
PRODUCTS = ("q", "k", "v", "attn_residual", "layer_out", "logits")
_LIMITS = dict.fromkeys(PRODUCTS, 0.05)
_OTHER_LIMIT = 2e-3


#: What a product makes of activations before it multiplies them, of f64 [num_rows, columns].
InputForm = Callable[[Float64s], Float64s]


def exactly(x: Float64s) -> Float64s:
    """Activations as they are."""
    return x


class NotComputed(HypoError):
    """A point cannot be computed anew; the text says why."""


def limit_of(name: str) -> float:
    """The most that a sound op is off by, as `Float64Steps.error` says it."""
    return _LIMITS.get(name, _OTHER_LIMIT)


class Float64Steps:
    """The points of one trace, computed from the points before them."""

    def __init__(
        self,
        file: GGUFFile,
        trace: ModelTrace,
        weight: Callable[[str], Float64s | None] | None = None,
        arch: Architecture | None = None,
    ) -> None:
        """`weight` has the tensors in place of the file's, with the head as `output.weight` also
        where it is tied, and `arch` facts in place of its metadata. None of `weight`: it has no
        such tensor.

        Raises NotComputed for a model that is computed otherwise, and for another model.
        """
        self._file, self._trace, self._other_weight = file, trace, weight
        self._reading: InputForm = exactly
        arch = self._arch = arch or read_architecture(file)
        header = trace.header
        if arch.name not in FAMILIES or arch.experts is not None:
            known = ", ".join(FAMILIES)
            raise NotComputed(f"{arch.name} models have no float64 form here; {known} have")
        unlike = (header.architecture, header.num_layers) != (arch.name, arch.num_layers)
        if unlike or Path(file.path).stat().st_size != header.model_bytes:
            raise NotComputed(f"{file.path} is not the model that was traced")
        if header.adapters or header.override_kv:
            changed = "an adapter" if header.adapters else "--override-kv"
            raise NotComputed(f"a run with {changed} has no float64 form here: the file alone has")
        self._compute: dict[str, Callable[[TracedStep, int], Float64s]] = {
            "attn_norm": lambda step, layer: self._norm(self._x(step, layer), layer, "attn_norm"),
            "q": lambda step, layer: self._product(step, layer, "attn_norm", "attn_q"),
            "k": lambda step, layer: self._product(step, layer, "attn_norm", "attn_k"),
            "v": lambda step, layer: self._product(step, layer, "attn_norm", "attn_v"),
            "q_rope": lambda step, layer: self._rotation(step, layer, "q"),
            "k_cache": lambda step, layer: self._rotation(step, layer, "k"),
            "v_cache": lambda step, layer: self._values(step, "v", layer),
            "attention": self._attention,
            "attn_residual": lambda step, layer: (
                self._x(step, layer) + self._product(step, layer, "attention", "attn_output")
            ),
            "ffn_norm": lambda step, layer: self._norm(
                self._values(step, "attn_residual", layer), layer, "ffn_norm"
            ),
            "layer_out": self._layer_out,
        }

    def error(
        self, step: TracedStep, name: str, layer: int | None, reading: InputForm = exactly
    ) -> float:
        """How far the trace is from float64 at this point, where products read activations so: the
        root mean square of the difference over that of what the op makes. Raises NotComputed."""
        wanted, found = self.point(step, name, layer, reading), self._values(step, name, layer)
        added = wanted
        if layer is not None and name == "attn_residual":
            added = wanted - self._x(step, layer)
        elif layer is not None and name == "layer_out":
            added = wanted - self._values(step, "attn_residual", layer)
        with np.errstate(invalid="ignore", over="ignore"):
            off = rms_of(found - wanted) / (rms_of(added) or 1.0)
        return off if np.isfinite(off) else np.inf

    def point(
        self, step: TracedStep, name: str, layer: int | None, reading: InputForm = exactly
    ) -> Float64s:
        """The point as float64 has it. Raises NotComputed."""
        self._reading = reading
        if layer is not None:
            compute = self._compute[name]
            return compute(step, layer)
        if name == "embedding":
            table = self._weight("token_embd.weight")
            if max(step.token_ids) >= len(table):
                raise NotComputed(
                    f"step {step.step} has token {max(step.token_ids)}, and the vocabulary of "
                    f"{self._file.path} is {len(table)}"
                )
            return table[list(step.token_ids)] * self._arch.embedding_scale
        if name == "result_norm":
            x = self._values(step, "layer_out", self._arch.num_layers - 1)
            return self._norm_by(x[list(step.logit_rows)], self._weight("output_norm.weight"))
        is_own = self._other_weight is not None or "output.weight" in self._file.tensors
        head = self._weight("output.weight" if is_own else "token_embd.weight")
        logits: Float64s = self._reading(self._values(step, "result_norm", None)) @ head.T
        if self._arch.final_softcap:
            raise NotComputed("logits that are capped have no float64 form here")
        return logits / self._arch.logit_scale

    def _values(self, step: TracedStep, name: str, layer: int | None) -> Float64s:
        point = step.points.get((name, layer))
        of = name if layer is None else f"{name} of layer {layer}"
        if point is None or point.values is None:
            what = "is not in the trace" if point is None else "has no elements in the trace"
            raise NotComputed(f"{of} {what}; run it again with --trace-data MIB and all points")
        if point.shape[-1] != (width := self._width(name, layer)):
            raise NotComputed(f"{of} has rows of {point.shape[-1]}, and the model's are of {width}")
        return point.values.astype(np.float64)

    def _width(self, name: str, layer: int | None) -> int:
        """Columns of a point."""
        if layer is not None and name in ("q", "q_rope", "attention"):
            return self._arch.q_width(layer)
        if layer is not None and name in ("k", "v", "k_cache", "v_cache"):
            shape = self._arch.layers[layer]
            return shape.num_kv_heads * shape.head_dim
        return self._arch.vocab_size if name == "logits" else self._arch.width

    def _x(self, step: TracedStep, layer: int) -> Float64s:
        """What a layer begins with."""
        if layer == 0:
            return self._values(step, "embedding", None)
        return self._values(step, "layer_out", layer - 1)

    def _norm(self, x: Float64s, layer: int, name: str) -> Float64s:
        return self._norm_by(x, self._weight(f"blk.{layer}.{name}.weight"))

    def _norm_by(self, x: Float64s, weight: Float64s) -> Float64s:
        scale: Float64s = np.sqrt((x * x).mean(-1, keepdims=True) + self._arch.norm_eps)
        return x / scale * weight

    def _product(self, step: TracedStep, layer: int, source: str, name: str) -> Float64s:
        x = self._reading(self._values(step, source, layer))
        product: Float64s = x @ self._weight(f"blk.{layer}.{name}.weight").T
        bias = self._optional(f"blk.{layer}.{name}.bias")
        return product + bias if bias is not None else product

    def _rotation(self, step: TracedStep, layer: int, name: str) -> Float64s:
        """Formula: `kernels/attention/rope.py`, behind a norm of each head where there is one."""
        arch, shape = self._arch, self._arch.layers[layer]
        x = self._values(step, name, layer).reshape(len(step.token_ids), -1, shape.head_dim)
        norm = self._optional(f"blk.{layer}.attn_{name}_norm.weight")
        if norm is not None:
            x = self._norm_by(x, norm)
        is_plain = arch.rope.scaling == "none" and arch.rope.attn_factor in (0, 1)
        if not is_plain or "rope_factors_long.weight" in self._file.tensors:
            raise NotComputed("positions that are stretched so have no float64 form here")
        angles = np.array(step.positions, np.float64)[:, None] * arch.rope.base ** (
            -2 * np.arange(arch.rope.dim // 2) / arch.rope.dim
        )
        if (divisors := self._optional("rope_freqs.weight")) is not None:
            angles /= divisors
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        turned, half = x.copy(), arch.rope.dim // 2
        if arch.family.rope_style == "normal":
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            first, second = slice(0, half), slice(half, 2 * half)
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., second] * cos + x[..., first] * sin
        return turned.reshape(len(x), -1)

    def _attention(self, step: TracedStep, layer: int) -> Float64s:
        """Formula: softmax(scale q k^T) v over the positions up to each token's own, and of a
        window of w over w of them."""
        arch, shape = self._arch, self._arch.layers[layer]
        if arch.attn_softcap:
            raise NotComputed("attention with a cap has no float64 form here")
        if len(set(step.sequences)) != 1:
            raise NotComputed("attention of several sequences at once has no float64 form here")
        keys, values = (self._cache_until(name, step, layer) for name in ("k_cache", "v_cache"))
        q = self._values(step, "q_rope", layer).reshape(len(step.token_ids), arch.num_heads, -1)
        group = arch.num_heads // shape.num_kv_heads
        keys, values = (np.repeat(each, group, axis=1) for each in (keys, values))
        scores = np.einsum("thd,shd->hts", q, keys) * arch.attn_scale
        behind = np.array(step.positions)[:, None] - np.arange(len(keys))[None]
        is_seen = (behind >= 0) & (behind < (shape.window or len(keys)))
        scores = np.where(is_seen[None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        found: Float64s = np.einsum("hts,shd->thd", weights, values)
        return found.reshape(len(q), -1)

    def _cache_until(self, name: str, until: TracedStep, layer: int) -> Float64s:
        """Keys or values of all positions up to the last of a step, [positions, heads, columns]."""
        num_positions = max(until.positions) + 1
        if num_positions > (most := sum(len(step.positions) for step in self._trace.steps)):
            raise NotComputed(f"{num_positions} positions, and the trace has {most} tokens in all")
        shape = self._arch.layers[layer]
        held = np.full((num_positions, shape.num_kv_heads * shape.head_dim), np.nan)
        is_there = np.zeros(num_positions, bool)
        for step in self._trace.steps:
            if step.positions and step.positions[0] == 0:
                is_there[:] = False  # another request begins
            if len(set(step.sequences)) == 1 and max(step.positions) < num_positions:
                held[list(step.positions)] = self._values(step, name, layer)
                is_there[list(step.positions)] = True
            if step.step == until.step:
                break
        if not is_there.all():
            missing = int(np.flatnonzero(~is_there)[0])
            raise NotComputed(f"{name} of layer {layer} at position {missing} is not in the trace")
        return held.reshape(num_positions, shape.num_kv_heads, -1)

    def _layer_out(self, step: TracedStep, layer: int) -> Float64s:
        """Formula: x + down(silu(gate(y)) * up(y)) with y = norm(x)."""
        x, y = (self._values(step, name, layer) for name in ("attn_residual", "ffn_norm"))
        gate, up, down = (
            self._weight(f"blk.{layer}.ffn_{name}.weight") for name in ("gate", "up", "down")
        )
        y = self._reading(y)
        gated = y @ gate.T
        found: Float64s = x + self._reading(gated / (1 + np.exp(-gated)) * (y @ up.T)) @ down.T
        return found

    def _weight(self, name: str) -> Float64s:
        if (found := self._optional(name)) is None:
            whose = "the other model" if self._other_weight is not None else self._file.path
            raise NotComputed(f"{whose} has no {name}, by which this is computed")
        return found

    @functools.lru_cache(maxsize=16)  # noqa: B019  # it lives as long as a comparison
    def _optional(self, name: str) -> Float64s | None:
        """A tensor that not every model has. Raises NotComputed where only the file has it: a
        model read in its place may have it by a name that is not known here."""
        is_there = name in self._file.tensors
        if self._other_weight is None:
            return weight_of(self._file, name) if is_there else None
        if (found := self._other_weight(name)) is None and is_there:
            raise NotComputed(f"the other model has no {name}, by which this is computed")
        return found


def weight_of(file: GGUFFile, name: str) -> Float64s:
    """A tensor of a file in float64, in its shape."""
    info = file.tensors[name]
    raw = file.raw(name)
    raw = as_ggml_reads(raw) if info.dtype is DType.NVFP4 else raw
    *lead, num_columns = info.shape
    rows = raw.reshape(-1, info.dtype.num_bytes(num_columns))
    found: Float64s = np.array(dequantise(rows, info.dtype, num_columns), np.float64)
    return found.reshape(*lead, num_columns)
