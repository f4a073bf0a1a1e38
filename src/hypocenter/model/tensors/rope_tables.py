"""The cosines and sines by which a model turns its heads, from its metadata and divisors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.errors import BadModelFile
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, memory
from hypocenter.kernels.attention import rope
from hypocenter.model.facts.architecture import Architecture, Rope
from hypocenter.model.gguf.file import GGUFFile

RopeTable = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class RopeTables:
    """The tables of layers that see all positions, and of layers with a window.

    `query`: what turns q in all layers where it is scaled by its position; None: q is rotated as k.
    `long`: what takes the place of `whole` in texts of more than the original context (longrope);
    None: one table is for texts of any length, or the context has no room for longer ones.
    """

    whole: RopeTable
    local: RopeTable
    query: RopeTable | None = None
    long: RopeTable | None = None

    def of_long_texts(self) -> RopeTables:
        """The tables of a text that is longer than the original context."""
        if self.long is None:
            return self
        local = self.long if self.local is self.whole else self.local
        return RopeTables(self.long, local, self.query)


class RopeTableReader:
    """Makes the tables of a file; `read` takes the vector of a name and shape out of it."""

    def __init__(
        self,
        file: GGUFFile,
        arch: Architecture,
        read: Callable[[str, tuple[int, ...]], np.ndarray[Any, Any]],
        device: str,
    ) -> None:
        self._file, self._arch, self._read, self._device = file, arch, read, device

    def tables(self, context_length: int) -> RopeTables:
        """The tables of so many positions; raises BadModelFile for what no table can be made of."""
        arch, long = self._arch, None
        if "rope_factors_long.weight" in self._file.tensors:
            of_short, of_long = (
                self._checked_divisors(f"rope_factors_{kind}.weight") for kind in ("short", "long")
            )
            cos, sin = self._angles("rope", arch.rope, context_length, of_short)
            if context_length > arch.rope.original_context:
                angles = self._angles("long_rope", arch.rope, context_length, of_long)
                long = self._place("long_rope", *angles)
        else:
            cos, sin = self._angles("rope", arch.rope, context_length, self._divisors())
        whole = local = self._place("rope", cos, sin)
        if arch.local_rope != arch.rope:
            angles = self._angles("local_rope", arch.local_rope, context_length, None)
            local = self._place("local_rope", *angles)
        if not arch.scales_queries(context_length):
            return RopeTables(whole, local, long=long)
        growth = self._query_scales(context_length)[:, None]
        scaled = ((cos * growth).astype(np.float32), (sin * growth).astype(np.float32))
        return RopeTables(whole, local, self._place("query_rope", *scaled), long)

    def _query_scales(self, context_length: int) -> np.ndarray[Any, Any]:
        """What q is multiplied by at each position, float64: it grows with each original context.

        Formula: llama.cpp, `llm_graph_input_attn_temp`.
        """
        arch = self._arch
        num_contexts = 1 + np.arange(context_length) // arch.rope.original_context
        scales: np.ndarray[Any, Any] = 1 + arch.query_growth * np.log(num_contexts)
        return scales

    def _divisors(self) -> np.ndarray[Any, Any] | None:
        """Llama 3.1 has one list of divisors for all texts."""
        if "rope_freqs.weight" not in self._file.tensors:
            return None
        return self._checked_divisors("rope_freqs.weight")

    def _checked_divisors(self, name: str) -> np.ndarray[Any, Any]:
        values = self._read(name, (self._arch.rope.dim // 2,))
        wrong = np.flatnonzero(~((values > 0) & (values < np.inf)))
        if len(wrong):
            first = int(wrong[0])
            limit = "frequencies are divided by it: it must be finite and above 0"
            raise BadModelFile(self._file.path, f"{name}[{first}]", float(values[first]), limit)
        return values

    def _angles(
        self, name: str, rotation: Rope, context_length: int, divisors: np.ndarray[Any, Any] | None
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        attn_factor = self._attn_factor(rotation)
        with np.errstate(over="ignore", invalid="ignore"):  # looked for below
            cos, sin = rope.tables(
                context_length,
                rotation.dim,
                rotation.base,
                scaling=rotation.scaling,
                factor=rotation.factor,
                original_context=rotation.original_context,
                attn_factor=attn_factor,
                beta_fast=rotation.beta_fast,
                beta_slow=rotation.beta_slow,
                divisors=divisors,
                rounds_ramp=rotation.rounds_ramp,
            )
        if not (np.isfinite(cos).all() and np.isfinite(sin).all()):
            raise BadModelFile(
                self._file.path,
                "rope scaling",
                f"base {rotation.base}, factor {rotation.factor}, attn_factor {attn_factor}",
                f"the {name} table must be finite",
            )
        return cos, sin

    def _attn_factor(self, rotation: Rope) -> float:
        """Files may leave it out; longrope then follows from the two context lengths.

        The tables of yarn have a factor of their own, of which `log_multiplier` takes some back
        (DeepSeek's mscale_all_dim; transformers, `_compute_yarn_parameters`).
        """
        if rotation.log_multiplier and rotation.scaling == "yarn" and rotation.factor > 1:
            taken = 1 + 0.1 * rotation.log_multiplier * math.log(rotation.factor)
            return (rotation.attn_factor or 1.0) / taken
        if rotation.attn_factor:
            return rotation.attn_factor
        stretch = self._arch.context_length / rotation.original_context
        if rotation.scaling != "longrope" or stretch <= 1:
            return 1.0
        return math.sqrt(1 + math.log(stretch) / math.log(rotation.original_context))

    def _place(self, name: str, cos: np.ndarray[Any, Any], sin: np.ndarray[Any, Any]) -> RopeTable:
        pair = []
        for values, kind in ((cos, "cos"), (sin, "sin")):
            tensor = memory.allocate(
                f"{name}_{kind}", "model", DType.F32, values.shape, device=self._device
            )
            copies.to_device(tensor, values)
            pair.append(tensor)
        return pair[0], pair[1]
