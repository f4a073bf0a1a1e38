"""A model's tensors as the decoder takes them, packed and in their places; loads none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hypocenter.base.tensor import DType, Tensor
from hypocenter.model.tensors.rope_tables import RopeTables


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The matrices of one feed-forward, packed, or stacks of those of experts.

    `gate_up` holds both where the device multiplies them at once (`linear_gate_codes`), else there
    are `gate` and `up`. Biases are f32 padded to 64, those of experts one behind the other; None:
    not there.
    """

    gate: Tensor | None
    up: Tensor | None
    gate_up: Tensor | None
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def read(self) -> tuple[Tensor, ...]:
        """What its input is multiplied with."""
        parts = (self.gate, self.up, self.gate_up)
        return tuple(part for part in parts if part is not None)


class BesideDense(NamedTuple):
    """Norms of a mixture beside a dense feed-forward: of what its router and its experts read, of
    what the experts give, and of what the dense one gives."""

    router: Tensor
    experts: Tensor
    mixed: Tensor
    dense: Tensor


@dataclass(frozen=True, slots=True)
class Mixture:
    """A layer's experts. `router` is F32 [num_experts, width], with one row more where the shared
    expert has a gate, and `router_bias` f32 is added to what it gives; `bias` f32 counts for the
    choice alone, and `factors` f32 multiply what experts count."""

    router: Tensor
    bias: Tensor | None
    experts: FeedForward
    shared: FeedForward | None
    router_bias: Tensor | None = None
    factors: Tensor | None = None
    beside: BesideDense | None = None


class LayerInput(NamedTuple):
    """What a layer adds of the token itself: by a row of `table` [vocab_size, inner] and by a
    `projection` [inner, width], normed, of the embedding, which let `gate` [inner, width] through;
    `output` [width, inner] of it, normed, is added."""

    table: Tensor
    projection: Tensor
    projection_norm: Tensor
    gate: Tensor
    output: Tensor
    output_norm: Tensor

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Those that activations are multiplied with."""
        return self.projection, self.gate, self.output


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """A Gated Delta Net: matrices packed, vectors f32 padded to 64.

    `gate`: what its result is gated by; `beta` and `step`: both numbers of each value head, the
    latter with a bias; `rates` are below 0. conv f32 [num_taps, channels padded to 64].
    """

    qkv: Tensor
    gate: Tensor
    beta: Tensor
    step: Tensor
    step_bias: Tensor
    rates: Tensor
    conv: Tensor
    norm: Tensor
    output: Tensor

    @property
    def read(self) -> tuple[Tensor, ...]:
        """What its input is multiplied with."""
        return self.qkv, self.gate, self.beta, self.step


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """A gated short convolution: matrices packed, conv f32 [num_taps, channels padded to 64].

    `gate_in` gates what the convolution takes of `x`, and `gate_out` what it gives.
    """

    gate_in: Tensor
    gate_out: Tensor
    x: Tensor
    conv: Tensor
    output: Tensor

    @property
    def read(self) -> tuple[Tensor, ...]:
        """What its input is multiplied with."""
        return self.gate_in, self.gate_out, self.x


@dataclass(frozen=True, slots=True)
class SpaceWeights:
    """A state space (Mamba-2): matrices packed, vectors f32 padded to 64.

    `gate`: what its result is gated by; `step`: a number of each head, with a bias; `rates` are
    below 0, `skips` what values themselves add. conv f32 [num_taps, channels padded to 64]. `norm`
    has a number for each column of all groups; None: the result is gated alone.
    """

    gate: Tensor
    mixed: Tensor
    step: Tensor
    step_bias: Tensor
    rates: Tensor
    skips: Tensor
    conv: Tensor
    conv_bias: Tensor | None
    norm: Tensor | None
    output: Tensor

    @property
    def read(self) -> tuple[Tensor, ...]:
        """What its input is multiplied with."""
        return self.gate, self.mixed, self.step


#: Of a layer that carries a state.
MixerWeights = DeltaWeights | ConvWeights | SpaceWeights


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Attention with latents: matrices packed, norms f32 padded to 64.

    `q` makes queries, or what `q_up` makes them of, normed; `latent` and `turned` make what the
    cache holds. By head, f16 or f32 [num_heads, inputs, outputs padded to 64]: `keys` makes queries
    of latents and `values` makes values of them.
    """

    q: Tensor
    q_norm: Tensor | None
    q_up: Tensor | None
    latent: Tensor
    turned: Tensor
    norm: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor

    @property
    def read(self) -> tuple[Tensor, ...]:
        """What its input is multiplied with."""
        return self.q, self.latent, self.turned

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Those that rows of activations are multiplied with."""
        return (*self.read, self.output, *(() if self.q_up is None else (self.q_up,)))


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors: matrices packed, norms and biases f32 padded to 64; None: not there.

    A layer has `dense` or `mixture`, or both where the mixture says how; and `mixer`, `latent` or
    what other attention has.
    """

    attn_norm: Tensor | None
    q: Tensor | None
    #: None: the layer reads keys and values of another.
    k: Tensor | None
    #: None: likewise, or values are made of what `k` gives.
    v: Tensor | None
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    attn_output: Tensor | None
    attn_output_bias: Tensor | None
    post_attn_norm: Tensor | None
    ffn_norm: Tensor | None
    dense: FeedForward | None
    mixture: Mixture | None
    post_ffn_norm: Tensor | None
    #: Of layer norms, which these make of norms that are there.
    attn_norm_bias: Tensor | None = None
    ffn_norm_bias: Tensor | None = None
    #: Zeros for all heads, where layer norms are made of each: these have no biases.
    head_norm_bias: Tensor | None = None
    #: A score for each head.
    sinks: Tensor | None = None
    v_norm: Tensor | None = None
    #: What the layer gives is multiplied by it.
    scale: float = 1.0
    layer_input: LayerInput | None = None
    #: What attention's result is gated by.
    attn_gate: Tensor | None = None
    #: Of a layer that carries a state.
    mixer: MixerWeights | None = None
    latent: LatentWeights | None = None

    @property
    def is_parallel(self) -> bool:
        """Whether the feed-forward reads what attention does, a norm of which there is one."""
        return self.attn_norm is not None and self.ffn_norm is None

    @property
    def read(self) -> tuple[Tensor, ...]:
        """What attention's input is multiplied with."""
        parts = (self.q, self.k, self.v, self.attn_gate)
        return tuple(part for part in parts if part is not None)

    @property
    def down(self) -> Tensor:
        """The matrix, or the stack of them, that a feed-forward ends with, or a layer that has
        none."""
        if self.dense is not None:
            return self.dense.down
        if self.mixture is not None:
            return self.mixture.experts.down
        assert self.mixer is not None
        return self.mixer.output

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Those that activations are multiplied with, but for a router."""
        found = [*self.read]
        if self.attn_output is not None:
            found.append(self.attn_output)
        if self.mixer is not None:
            found += (*self.mixer.read, self.mixer.output)
        if self.latent is not None:
            found += self.latent.matrices
        if self.dense is not None:
            found += (*self.dense.read, self.dense.down)
        if self.mixture is not None:
            for part in (self.mixture.experts, self.mixture.shared):
                found += (*part.read, part.down) if part is not None else ()
        if self.layer_input is not None:
            found += self.layer_input.matrices
        return tuple(found)


class OutputWeights(NamedTuple):
    """What stands behind the last layer."""

    norm: Tensor
    norm_bias: Tensor | None
    matrix: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model. `output` is the token table where the model ties the two.

    `in_bf16`: BF16 matrices are multiplied by activations rounded to bf16.
    """

    token_table: Tensor
    layers: tuple[LayerWeights, ...]
    output_norm: Tensor
    output: Tensor
    ropes: RopeTables
    num_bytes: int
    in_bf16: bool = False
    output_norm_bias: Tensor | None = None
    output_bias: Tensor | None = None
    #: Why the packed matrices are not on disk for the next start; empty when they are.
    not_kept: str = ""

    @property
    def dtypes(self) -> frozenset[DType]:
        """The types of the matrices that activations are multiplied with; routers are F32."""
        found = {self.output.dtype}
        for layer in self.layers:
            found |= {matrix.dtype for matrix in layer.matrices}
        return frozenset(found)
