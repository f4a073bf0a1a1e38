"""Loads a model's tensors, checks their shapes against the architecture and packs the matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, memory
from hypocenter.device.lending import Borrower
from hypocenter.kernels.linear.linear_gate import may_join
from hypocenter.kernels.weights import packing
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.experts import Experts
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.tensors.latent_weights import load_latent
from hypocenter.model.tensors.mixer_weights import load_mixer
from hypocenter.model.tensors.packed_weights import PackedWeights
from hypocenter.model.tensors.rope_tables import RopeTableReader
from hypocenter.model.tensors.tensor_reader import TensorReader, norms_heads
from hypocenter.model.tensors.weight_tensors import (
    BesideDense,
    FeedForward,
    LayerInput,
    LayerWeights,
    Mixture,
    OutputWeights,
    Weights,
)
from hypocenter.settings.config import OnProgress
from hypocenter.wire.messages import KeptWeights, SharedWeight

_LARGEST_HALF = float(np.finfo(np.float16).max)


def load_weights(
    file: GGUFFile,
    architecture: Architecture,
    context_length: int,
    progress: OnProgress | None = None,
    *,
    device: str = "cpu",
    in_bf16: bool = False,
    shared: KeptWeights | None = None,
) -> Weights:
    """Pack every tensor of `file`; `progress` hears a name and the share done.

    `shared`: packed matrices of this file that another process has in the device's memory; they
    are mapped and not packed. `in_bf16` (on the CPU): F16 and BF16 matrices are rounded for
    products in bf16; a token table that is none of them is not.

    Raises BadModelFile for a missing tensor or a wrong shape, UnsupportedModel for a tensor that
    this architecture does not use: to ignore it would be to compute something else.
    """
    num_bytes = sum(info.num_bytes for info in file.tensors.values())
    with PackedWeights(file, device, in_bf16=in_bf16, num_bytes=num_bytes) as kept:
        loader = Loader(file, architecture, progress, device, in_bf16, kept)
        if shared is not None and shared.stamps == repr(file.stamps):
            loader.borrow(shared)
        table = loader.token_table()
        layers = tuple(loader.layer(index) for index in range(architecture.num_layers))
        output = loader.output(table)
        ropes = RopeTableReader(file, architecture, loader.values, device).tables(context_length)
        loader.refuse_unused()
        kept.finish()
    return Weights(
        token_table=table,
        layers=layers,
        output_norm=output.norm,
        output=output.matrix,
        ropes=ropes,
        num_bytes=num_bytes,
        in_bf16=in_bf16,
        output_norm_bias=output.norm_bias,
        output_bias=output.bias,
        not_kept=kept.problem,
    )


class Loader(TensorReader):
    """Packs tensors of a file, and puts them in their places."""

    def __init__(
        self,
        file: GGUFFile,
        architecture: Architecture,
        progress: OnProgress | None,
        device: str,
        in_bf16: bool,
        kept: PackedWeights,
    ) -> None:
        super().__init__(file, architecture, progress)
        self.device, self.in_bf16, self.kept = device, in_bf16, kept
        self._shared: dict[str, SharedWeight] = {}
        self._borrower: Borrower | None = None
        #: What norms lack, by its value and length.
        self._constants: dict[tuple[int, int], Tensor] = {}
        self._inputs: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()

    def borrow(self, shared: KeptWeights) -> None:
        """Take matrices from where another process has put them."""
        self._shared = shared.weights
        self._borrower = Borrower(self.device, shared.pieces)

    def token_table(self) -> Tensor:
        facts, is_tied = self.facts, "output.weight" not in self.file.tensors
        return self.matrix("token_embd", facts.vocab_size, facts.width, is_factor=is_tied)

    def output(self, table: Tensor) -> OutputWeights:
        """What logits are made with; of a model that ties the two by the token table."""
        facts, matrix = self.facts, table
        num_rows = facts.part.share_of(facts.vocab_size)
        if "output.weight" in self.file.tensors:
            matrix = self.matrix("output", num_rows, facts.width)
        return OutputWeights(
            norm=self.vector(f"{facts.family.output_norm}.weight", facts.width),
            norm_bias=self._norm_bias("output_norm", facts.width),
            matrix=matrix,
            bias=self.optional("output.bias", num_rows),
        )

    def layer(self, index: int) -> LayerWeights:
        facts, prefix = self.facts, f"blk.{index}."
        width, shape = facts.width, facts.layers[index]
        q_rows, kv_rows = facts.q_width(index), shape.kv_width
        is_latent = facts.latent is not None
        attends = index in facts.attention_layers and not is_latent
        has_own = shape.kv_source is None
        q = k = v = attn_gate = attn_output = None
        biases: tuple[Tensor | None, ...] = (None, None, None)
        if attends:
            q, k, v, attn_gate = self._qkv(prefix, (q_rows, kv_rows, kv_rows), has_own=has_own)
            biases = self._qkv_biases(prefix, (q_rows, kv_rows, kv_rows))
            attn_output = self.matrix(f"{prefix}attn_output", width, q_rows)
        is_mixture = facts.is_mixture(index)
        pre_norms, post_norms = facts.family.pre_norms, facts.family.post_norms
        ffn_norm = f"{prefix}{facts.family.ffn_norm}"
        has_ffn_norm = pre_norms and facts.family.ffn_norm != ""
        # Converters of Falcon H1 leave the end of that name out.
        ffn_weight = ffn_norm if ffn_norm in self.file.tensors else f"{ffn_norm}.weight"
        has_ffn_norm &= ffn_weight in self.file.tensors or not facts.family.optional_ffn_norm
        return LayerWeights(
            attn_norm=self._vector_if(pre_norms, f"{prefix}attn_norm.weight", width),
            q=q,
            k=k,
            v=v,
            q_bias=biases[0],
            k_bias=biases[1],
            v_bias=biases[2],
            q_norm=self._qk_norm(f"{prefix}attn_q_norm.weight", q_rows, index),
            k_norm=self._qk_norm(f"{prefix}attn_k_norm.weight", kv_rows if has_own else 0, index),
            attn_output=attn_output,
            attn_output_bias=self.optional(f"{prefix}attn_output.bias", width),
            post_attn_norm=self._vector_if(
                post_norms, f"{prefix}post_attention_norm.weight", width
            ),
            ffn_norm=self._vector_if(has_ffn_norm, ffn_weight, width),
            dense=self._feed_forward(prefix, "", shape.ffn_width)
            if facts.is_dense(index)
            else None,
            mixture=self._mixture(prefix) if is_mixture else None,
            post_ffn_norm=self._vector_if(post_norms, f"{prefix}post_ffw_norm.weight", width),
            attn_norm_bias=self._norm_bias(f"{prefix}attn_norm", width),
            ffn_norm_bias=self._norm_bias(ffn_norm, width) if has_ffn_norm else None,
            head_norm_bias=self._constant(0, q_rows) if norms_heads(self.file, facts) else None,
            sinks=self._vector_if(
                facts.family.has_sinks, f"{prefix}attn_sinks.weight", facts.num_heads
            ),
            v_norm=self._constant(1, shape.head_dim)
            if facts.family.norms_values and has_own
            else None,
            scale=self._layer_scale(f"{prefix}layer_output_scale.weight"),
            layer_input=self._layer_input(index) if facts.input_width else None,
            attn_gate=attn_gate,
            mixer=load_mixer(self, facts, prefix) if index in facts.state_layers else None,
            latent=load_latent(self, facts, prefix) if is_latent else None,
        )

    def parts(self, name: str, row_counts: tuple[int, ...]) -> tuple[Tensor, ...]:
        """A matrix of activations as wide as x as several, by consecutive rows."""
        return self._split(name, row_counts, self.facts.width)

    def by_head(self, name: str, of: str, values: np.ndarray[Any, Any]) -> Tensor:
        """`values` [num_heads, inputs, outputs], made of tensor `of`, as f16 or f32 [num_heads,
        inputs, outputs padded to 64]: f32 where f16 has no room for them."""
        num_heads, num_inputs, num_outputs = values.shape
        is_half = self.file.tensors[of].dtype not in (DType.F32, DType.BF16)
        is_half = is_half and float(np.abs(values).max()) <= _LARGEST_HALF
        shape = (num_heads, num_inputs, padded_rows(num_outputs))
        padded = np.zeros(shape, np.float16 if is_half else np.float32)
        padded[..., :num_outputs] = values
        kind = DType.F16 if is_half else DType.F32
        tensor = memory.allocate(f"{of} ({name})", "model", kind, shape, device=self.device)
        copies.to_device(tensor, padded.view(np.uint16) if is_half else padded)
        return tensor

    def by_turns(
        self, name: str, row_counts: tuple[int, ...], num_turns: int
    ) -> tuple[Tensor, Tensor]:
        """Matrices of so many rows, each of which has its part of every turn of one of the file:
        all but the last as one, and the last."""
        width, (first, last) = self.facts.width, self._turns(name, row_counts, num_turns)
        both = self._place(name, 0, first, width), self._place(name, 1, last, width)
        self.file.let_go(name)
        return both

    def in_parts(self, name: str, row_counts: tuple[int, ...]) -> tuple[Tensor, ...]:
        """One matrix of the file as several, by consecutive rows."""
        return self._split(name, row_counts, self.facts.width)

    def taps(self, name: str, num_channels: int, num_taps: int) -> Tensor:
        """The factors of a convolution, f32 [num_taps, channels padded to 64]."""
        padded = np.zeros((num_taps, padded_rows(num_channels)), np.float32)
        padded[:, :num_channels] = self.values(name, (num_channels, num_taps)).T
        tensor = memory.allocate(name, "model", DType.F32, padded.shape, device=self.device)
        copies.to_device(tensor, padded)
        return tensor

    def _norm_bias(self, name: str, length: int) -> Tensor | None:
        """That of a layer norm, zeros where the file has none; None for other norms."""
        if not self.facts.family.layer_norms:
            return None
        if f"{name}.bias" in self.file.tensors:
            return self.vector(f"{name}.bias", length)
        return self._constant(0, length)

    def matrix(
        self, name: str, num_rows: int, num_columns: int, *, is_factor: bool = True
    ) -> Tensor:
        """`{name}.weight` [num_rows, num_columns], packed; `is_factor`: to be multiplied with."""
        return self._split(f"{name}.weight", (num_rows,), num_columns, is_factor=is_factor)[0]

    def vector(self, name: str, length: int) -> Tensor:
        """A vector of `length` as f32, padded with zeros to a multiple of 64."""
        return self._pad(name, self.values(name, (length,)))

    def flat(self, name: str, *shape: int) -> Tensor:
        """A tensor of that shape as one vector of f32, padded with zeros to a multiple of 64."""
        return self._pad(name, self.values(name, shape).reshape(-1))

    def _vectors(self, name: str, num_vectors: int, length: int) -> Tensor:
        """Several vectors of `length` as f32, each padded with zeros to a multiple of 64."""
        padded = np.zeros((num_vectors, padded_rows(length)), np.float32)
        padded[:, :length] = self.values(name, (num_vectors, length))
        return self._pad(name, padded.reshape(-1))

    def _constant(self, value: int, length: int) -> Tensor:
        """What a norm without a weight is multiplied by (1), or one without a bias adds (0)."""
        if (found := self._constants.get((value, length))) is None:
            found = self._pad(f"norm of {value}", np.full(length, value, np.float32))
            self._constants[value, length] = found
        return found

    def _layer_scale(self, name: str) -> float:
        is_there = self.facts.family.scales_layers and name in self.file.tensors
        return float(self.values(name, (1,))[0]) if is_there else 1.0

    def _layer_input(self, index: int) -> LayerInput:
        facts, inner, prefix = self.facts, self.facts.input_width, f"blk.{index}."
        if not self._inputs:
            name, norm = "per_layer_model_proj.weight", "per_layer_proj_norm.weight"
            counts = (inner,) * facts.num_layers
            # Rows of the table do not grow by this root, so what is added to them shrinks.
            normed = self._pad(norm, self.values(norm, (inner,)) / np.float32(math.sqrt(inner)))
            tables = self._columns("per_layer_token_embd.weight", facts.vocab_size, counts)
            projections = self._split(name, counts, facts.width)
            norms = (normed,) * facts.num_layers
            self._inputs = tuple(zip(tables, projections, norms, strict=True))
        return LayerInput(
            *self._inputs[index],
            gate=self.matrix(f"{prefix}inp_gate", inner, facts.width),
            output=self.matrix(f"{prefix}proj", facts.width, inner),
            output_norm=self.vector(f"{prefix}post_norm.weight", facts.width),
        )

    def _columns(
        self, name: str, num_rows: int, column_counts: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """One table of the file as several, by consecutive columns."""
        parts = enumerate(self._split_columns(name, num_rows, column_counts))
        placed = [
            self._place(name, i, rows, column_counts[i], is_factor=False) for i, rows in parts
        ]
        self.file.let_go(name)
        return tuple(placed)

    def _qkv(
        self, prefix: str, rows: tuple[int, int, int], *, has_own: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """q, k, v, and what gates attention, of which each head has its rows behind those of q."""
        family, width, gate = self.facts.family, self.facts.width, None
        if f"{prefix}attn_qkv.weight" in self.file.tensors:
            q, k, v = self._split(f"{prefix}attn_qkv.weight", rows, width)
            return q, k, v, None
        if family.gates_attention:
            q, gate = self.by_turns(f"{prefix}attn_q.weight", rows[:1] * 2, self.facts.num_heads)
        else:
            q = self.matrix(f"{prefix}attn_q", rows[0], width)
        if not has_own:
            return q, None, None, gate
        k = self.matrix(f"{prefix}attn_k", rows[1], width)
        if family.norms_values and f"{prefix}attn_v.weight" not in self.file.tensors:
            return q, k, None, gate
        return q, k, self.matrix(f"{prefix}attn_v", rows[2], width), gate

    def _qk_norm(self, name: str, num_rows: int, index: int) -> Tensor | None:
        family, head_dim = self.facts.family, self.facts.layers[index].head_dim
        if index not in self.facts.attention_layers or not num_rows:
            return None
        if family.wide_qk_norm:
            return self.vector(name, num_rows)
        if family.norms_by_head:
            return self.optional(name, num_rows // head_dim, head_dim)
        is_there = not family.optional_qk_norm or name in self.file.tensors
        return self._vector_if(family.qk_norm and is_there, name, head_dim)

    def _qkv_biases(self, prefix: str, rows: tuple[int, int, int]) -> tuple[Tensor | None, ...]:
        fused = f"{prefix}attn_qkv.bias"
        if fused in self.file.tensors:
            values = self.values(fused, (sum(rows),))
            parts = np.split(values, np.cumsum(rows)[:-1])
            return tuple(self._pad(fused, part) for part in parts)
        names = (f"{prefix}attn_q.bias", f"{prefix}attn_k.bias", f"{prefix}attn_v.bias")
        return tuple(self.optional(name, count) for name, count in zip(names, rows, strict=True))

    def _feed_forward(
        self, prefix: str, kind: str, width: int, num_experts: int = 0
    ) -> FeedForward:
        """`{prefix}ffn_*{kind}`, of that width, or a stack of `num_experts`; a dense one has the
        biases that the file has, experts those that the family has."""
        family, columns = self.facts.family, self.facts.width
        joint = f"{prefix}ffn_gate_up{kind}.weight"
        is_joint = num_experts > 0 and joint in self.file.tensors
        is_fused = is_joint or (family.fused_gate_up and not kind)
        parts = ("gate", "up") if family.has_gate and not is_fused else ("up",)
        names = [joint] if is_joint else [f"{prefix}ffn_{part}{kind}.weight" for part in parts]
        down = f"{prefix}ffn_down{kind}.weight"
        rows = (width, width) if is_fused else (width,)
        biases: dict[str, Tensor | None] = {}
        lengths = {**dict.fromkeys(parts, width), "down": columns}
        if not kind and not is_fused:
            for part, length in lengths.items():
                biases[f"{part}_bias"] = self.optional(f"{prefix}ffn_{part}.bias", length)
        if num_experts and family.experts is not None and family.experts.is_biased:
            for part, length in lengths.items():
                name = f"{prefix}ffn_{part}{kind}.bias"
                biases[f"{part}_bias"] = self._vectors(name, num_experts, length)
        gate = up = gate_up = None
        is_biased = any(biases.get(f"{part}_bias") is not None for part in parts)
        if not family.has_gate:
            (up,) = self._split(names[0], rows, columns)
        elif not is_biased and self._may_join([*names, down]):
            gate_up = self._join(names, rows, num_experts)
        else:
            gate, up = (
                half
                for name in names
                for half in self._split(name, rows, columns, num_experts=num_experts)
            )
        (last,) = self._split(down, (columns,), width, num_experts=num_experts)
        return FeedForward(gate, up, gate_up, last, **biases)

    def _may_join(self, names: Sequence[str]) -> bool:
        known = self.file.tensors  # what is missing is told of where it is read
        is_there = all(name in known for name in names)
        return self.device == "cpu" and is_there and may_join([known[name].dtype for name in names])

    def _join(self, names: Sequence[str], rows: tuple[int, ...], num_experts: int) -> Tensor:
        """A weight that holds gate and up by turns."""
        width, dtype = self.facts.width, self.file.tensors[names[0]].dtype
        raws = [raw for name in names for raw in self._rows(name, rows, width, num_experts)]
        both = " + ".join(names)
        for raw in raws:
            self._refuse_reserved(both, raw, dtype)
        packed = packing.pack_by_turns(
            raws,
            dtype,
            width,
            kept=partial(self.kept.find, both),
            read=self.file.let_go_of,
            factors=[self._factors(name) for name in names for _ in rows],
        )
        self.kept.keep(both, packed.parts)
        for name in names:
            self.file.let_go(name)
        shape = (num_experts, packed.num_rows // num_experts, width) if num_experts else None
        return packing.place(both, "model", packed, shape=shape)

    def _mixture(self, prefix: str) -> Mixture:
        experts, family = self.facts.experts, self.facts.family.experts
        assert experts is not None
        assert family is not None
        bias_name, num_experts = f"{prefix}exp_probs_b.bias", experts.choice.num_experts
        shared = None
        if experts.shared_width:
            shared = self._feed_forward(prefix, "_shexp", experts.shared_width)
        return Mixture(
            router=self._router(prefix, experts),
            bias=self.optional(bias_name, num_experts) if family.has_bias else None,
            experts=self._feed_forward(prefix, "_exps", experts.width, num_experts),
            shared=shared,
            router_bias=self._vector_if(
                family.is_biased, f"{prefix}ffn_gate_inp.bias", num_experts
            ),
            factors=self._vector_if(
                family.stands_beside and f"{prefix}ffn_down_exps.scale" in self.file.tensors,
                f"{prefix}ffn_down_exps.scale",
                num_experts,
            ),
            beside=self._beside(prefix) if family.stands_beside else None,
        )

    def _beside(self, prefix: str) -> BesideDense:
        name, width = f"{prefix}ffn_gate_inp.scale", self.facts.width
        return BesideDense(
            router=self._pad(name, self.values(name, (width,)) / np.float32(math.sqrt(width))),
            experts=self.vector(f"{prefix}pre_ffw_norm_2.weight", width),
            mixed=self.vector(f"{prefix}post_ffw_norm_2.weight", width),
            dense=self.vector(f"{prefix}post_ffw_norm_1.weight", width),
        )

    def _router(self, prefix: str, experts: Experts) -> Tensor:
        """Its rows, and behind them that of the shared expert's gate, as F32 whatever they are."""
        width, name = self.facts.width, f"{prefix}ffn_gate_inp.weight"
        rows = [self.numbers(name, (experts.choice.num_experts, width))]
        if experts.choice.has_gate:
            rows.append(self.numbers(f"{prefix}ffn_gate_inp_shexp.weight", (1, width)))
        values = np.ascontiguousarray(np.concatenate(rows), np.float32)
        packed = packing.pack(values.view(np.uint8), DType.F32, width, device=self.device)
        return packing.place(name, "model", packed, device=self.device)

    def _split(
        self,
        name: str,
        row_counts: tuple[int, ...],
        num_columns: int,
        *,
        is_factor: bool = True,
        num_experts: int = 0,
    ) -> tuple[Tensor, ...]:
        """One matrix of the file as several packed ones, by consecutive rows; or its one stack."""
        parts = []
        parts_of_file = self._rows(name, row_counts, num_columns, num_experts)
        for index, (rows, num_rows) in enumerate(zip(parts_of_file, row_counts, strict=True)):
            shape = (num_experts, num_rows, num_columns) if num_experts else None
            parts.append(
                self._place(name, index, rows, num_columns, is_factor=is_factor, shape=shape)
            )
        # Packed and mapped weights together would take twice the memory of the file.
        self.file.let_go(name)
        return tuple(parts)

    def _place(
        self,
        name: str,
        index: int,
        rows: Array,
        num_columns: int,
        *,
        is_factor: bool = True,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """One packed matrix of GGUF bytes, uint8 [rows, row_bytes]: part `index` of a tensor."""
        shared = self._shared.get(f"{name} {index}")
        if shared is not None and self._borrower is not None:
            return packing.borrow(name, shared, self._borrower, shape=shape)
        dtype = self.file.tensors[name].dtype
        self._refuse_reserved(name, rows, dtype)
        packed = packing.pack(
            rows,
            dtype,
            num_columns,
            device=self.device,
            in_bf16=self.in_bf16 and is_factor,
            kept=partial(self.kept.find, f"{name} {index}"),
            read=self.file.let_go_of,
            factors=self._factors(name),
        )
        self.kept.keep(f"{name} {index}", packed.parts)
        return packing.place(name, "model", packed, device=self.device, shape=shape)

    def optional(self, name: str, *shape: int) -> Tensor | None:
        """As `flat`, where the file has such a tensor."""
        return self.flat(name, *shape) if name in self.file.tensors else None

    def _vector_if(self, wanted: bool, name: str, length: int) -> Tensor | None:
        return self.vector(name, length) if wanted else None

    def _pad(self, name: str, values: np.ndarray[Any, Any]) -> Tensor:
        tensor = memory.allocate(
            name, "model", DType.F32, (padded_rows(len(values)),), device=self.device
        )
        copies.to_device(tensor, np.ascontiguousarray(values))
        return tensor
