"""What tensors a model has: each declared once, for all that load, count, cut or look for them,
and in the places where the decoder takes them.

Names and layouts follow the GGUF specification and llama.cpp's src/models.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType, Tensor
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.experts import Experts
from hypocenter.model.facts.pooling import Pooling
from hypocenter.model.tensors.latent_weights import LatentWeights, latent_tensors
from hypocenter.model.tensors.mixer_weights import MIXERS, MixerWeights, mixer_tensors
from hypocenter.model.tensors.rope_tables import RopeTables
from hypocenter.model.tensors.tensor_spec import (
    Loaded,
    TensorKind,
    TensorSpec,
    by_turns,
    constant,
    matrices,
    matrix,
    of_head,
    rows,
    side_by_side,
    vector,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The matrices of one feed-forward, packed, or stacks of those of experts.

    `gate_up` holds both where the device multiplies them at once (`linear_gate_codes`), else there
    are `gate` and `up`. Biases are f32 padded to 64, those of experts one behind the other; None:
    not there.
    """

    gate: Tensor | None = None
    up: Tensor | None = None
    gate_up: Tensor | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A layer's experts. `router` is F32 [num_experts, width], with one row more where the shared
    expert has a gate, and `router_bias` f32 is added to what it gives; `bias` f32 counts for the
    choice alone, and `factors` f32 multiply what experts count."""

    router: Tensor
    bias: Tensor | None = None
    experts: FeedForward
    shared: FeedForward | None = None
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
        """The weights that activations are multiplied with."""
        return self.projection, self.gate, self.output


class NextToken(NamedTuple):
    """What a head that drafts reads: norms of a token's embedding and of what was left of the token
    before, and a matrix [width, width] of each (`facts/nextn.py`)."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    of_embedding: Tensor
    of_hidden: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer's tensors: matrices packed, norms and biases f32 padded to 64; None: not there.

    A layer has `dense` or `mixture`, or both where the mixture says how; and `mixer`, `latent` or
    what other attention has.
    """

    attn_norm: Tensor | None = None
    q: Tensor | None = None
    #: None: the layer reads keys and values of another.
    k: Tensor | None = None
    #: None: likewise, or values are tensors of what `k` gives.
    v: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attn_output: Tensor | None = None
    attn_output_bias: Tensor | None = None
    post_attn_norm: Tensor | None = None
    ffn_norm: Tensor | None = None
    dense: FeedForward | None = None
    mixture: Mixture | None = None
    post_ffn_norm: Tensor | None = None
    #: Of layer norms, which these make of norms that are there.
    attn_norm_bias: Tensor | None = None
    ffn_norm_bias: Tensor | None = None
    #: Zeros for all heads, where layer norms are tensors of each: these have no biases.
    head_norm_bias: Tensor | None = None
    #: Of layer norms behind what attention, and the feed-forward, have added to.
    attn_sum_norm: Tensor | None = None
    attn_sum_norm_bias: Tensor | None = None
    ffn_sum_norm: Tensor | None = None
    ffn_sum_norm_bias: Tensor | None = None
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
    #: Of the layer of a head that drafts.
    nextn: NextToken | None = None

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

    def is_on_host(self, device: str) -> bool:
        """Whether the experts lie on the host, where the model is on another device."""
        return device != "cpu" and self.mixture is not None and self.mixture.router.device == "cpu"

    @property
    def matrices_of_mixture(self) -> tuple[Tensor, ...]:
        """The weights of its experts, those that are shared among them, but for a router."""
        parts = () if self.mixture is None else (self.mixture.experts, self.mixture.shared)
        return tuple(x for part in parts if part is not None for x in (*part.read, part.down))

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """The weights that activations are multiplied with, but for a router."""
        found = [*self.read]
        if self.attn_output is not None:
            found.append(self.attn_output)
        if self.mixer is not None:
            found += (*self.mixer.read, self.mixer.output)
        if self.latent is not None:
            found += self.latent.matrices
        if self.dense is not None:
            found += (*self.dense.read, self.dense.down)
        found += self.matrices_of_mixture
        if self.layer_input is not None:
            found += self.layer_input.matrices
        if self.nextn is not None:
            found += (self.nextn.of_embedding, self.nextn.of_hidden)
        return tuple(found)


def is_of_experts(spec: TensorSpec, layer: Iterable[TensorSpec]) -> bool:
    """Whether a tensor of a layer goes where its experts do: these, their router, those that are
    shared, and the norm of what they read."""
    places = {part.place for other in layer for part in other.loaded}
    has_experts = any(place.startswith("mixture.") for place in places)
    own = [part.place for part in spec.loaded]
    if spec.kind is TensorKind.ROUTER:
        return True  # also a gate, which is one of its rows
    return has_experts and any(place.startswith("mixture.") or place == "ffn_norm" for place in own)


def layer_of(tensors: Mapping[str, Tensor], scale: float = 1.0) -> LayerWeights:
    """A layer of its tensors by place: a field of the layer, or of a group of it (`dense.up`)."""
    groups: dict[str, dict[str, Tensor]] = {}
    for place, tensor in tensors.items():
        group, _, field = place.rpartition(".")
        groups.setdefault(group, {})[field] = tensor

    def feed_forward(group: str) -> FeedForward | None:
        return FeedForward(**groups[group]) if group in groups else None

    mixture, experts = None, feed_forward("mixture.experts")
    if experts is not None:
        beside = groups.get("mixture.beside")
        mixture = Mixture(
            **groups["mixture"],
            experts=experts,
            shared=feed_forward("mixture.shared"),
            beside=BesideDense(**beside) if beside is not None else None,
        )
    inputs, latent = groups.get("layer_input"), groups.get("latent")
    nextn = groups.get("nextn")
    mixers = [make(**groups[name]) for name, make in MIXERS.items() if name in groups]
    return LayerWeights(
        **groups.get("", {}),
        dense=feed_forward("dense"),
        mixture=mixture,
        scale=scale,
        layer_input=LayerInput(**inputs) if inputs is not None else None,
        mixer=mixers[0] if mixers else None,
        latent=LatentWeights(**latent) if latent is not None else None,
        nextn=NextToken(**nextn) if nextn is not None else None,
    )


class Additions(NamedTuple):
    """What the embedding of a token gets added, f32 [num_rows, width padded to 64] each, and the
    layer norm behind that: rows by its position, and by the kind of its text."""

    norm: Tensor
    norm_bias: Tensor
    positions: Tensor | None = None
    kinds: Tensor | None = None


def additions_of(tensors: Mapping[str, Tensor]) -> Additions | None:
    """What the embedding gets added, of the tensors before the layers by their places."""
    parts = {
        place.removeprefix("additions."): tensor
        for place, tensor in tensors.items()
        if place.startswith("additions.")
    }
    return Additions(**parts) if parts else None


@dataclass(frozen=True, slots=True)
class Adapted:
    """What adapters have beside one matrix [n, k], rank after rank: `down` f16 or f32 [num_ranks, k
    padded to 64], `up` likewise [num_ranks, n padded to 64], and of each tile of ranks the adapter
    it is of, `owners` i32, and what it counts, `factors` f32. Beside a stack of experts `down` and
    `up` have an axis of experts first. Beside the token table, `table` F32 [vocab_size, num_ranks
    padded to 64] packed, of which rows are looked up for `down`."""

    down: Tensor
    up: Tensor
    owners: Tensor
    factors: Tensor
    num_columns: int
    table: Tensor | None = None

    @property
    def num_ranks(self) -> int:
        return int(self.down.shape[-2])

    @property
    def is_of_experts(self) -> bool:
        return len(self.down.shape) == 3


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model. `output` is the token table where the model ties the two, or makes no
    logits.

    `in_bf16`: BF16 matrices are multiplied by activations rounded to bf16.
    """

    token_table: Tensor
    layers: tuple[LayerWeights, ...]
    #: None: what the last layer gives is normed there.
    output_norm: Tensor | None
    output: Tensor
    ropes: RopeTables
    num_bytes: int
    in_bf16: bool = False
    output_norm_bias: Tensor | None = None
    output_bias: Tensor | None = None
    additions: Additions | None = None
    #: What the host makes of rows that stand for texts, f32, by name.
    head: Mapping[str, Array] = field(default_factory=dict)
    #: Whether the token table, or another, makes logits.
    makes_logits: bool = True
    #: What adapters have beside matrices, by the `id` of these.
    adapters: Mapping[int, Adapted] = field(default_factory=dict)
    #: Why the packed matrices are not on disk for the next start; empty when they are.
    not_kept: str = ""

    @property
    def dtypes(self) -> frozenset[DType]:
        """The types of the matrices that activations are multiplied with; routers are F32."""
        found = {self.output.dtype} if self.makes_logits else set()
        for layer in self.layers:
            found |= {matrix.dtype for matrix in layer.matrices}
        return frozenset(found)


#: Whether the file has a tensor of that name, which is one of the layer at hand.
Has = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class TensorTable:
    """The tensors of a model: those that stand before its layers, those of each, those behind."""

    first: tuple[TensorSpec, ...]
    layers: tuple[tuple[TensorSpec, ...], ...]
    last: tuple[TensorSpec, ...]

    def __iter__(self) -> Iterator[TensorSpec]:
        yield from self.first
        for layer in self.layers:
            yield from layer
        yield from self.last


def tensor_table(arch: Architecture, names: Container[str]) -> TensorTable:
    """The tensors that a model of `arch` takes out of a file with tensors of these names.

    `names` decide between spellings of the same, and which optional tensors there are; a tensor
    that every model needs is in the table whether the file has it or not.
    """
    layers, norms_heads = [], _norms_heads(arch, names)
    for index in range(arch.num_layers):
        prefix = f"blk.{arch.first_layer + index}."

        def has(name: str, prefix: str = prefix) -> bool:
            return prefix + name in names

        layers.append(
            tuple(
                spec if spec.kind is TensorKind.CONSTANT else replace(spec, name=prefix + spec.name)
                for spec in _of_layer(arch, index, has, norms_heads=norms_heads)
                if spec.kind is TensorKind.CONSTANT or not spec.is_optional or has(spec.name)
            )
        )
    if arch.is_head:
        return TensorTable(*_ends_of_head(arch, names, tuple(layers)))
    return TensorTable(tuple(_first(arch, names)), tuple(layers), tuple(_last(arch, names)))


def _ends_of_head(
    arch: Architecture, names: Container[str], layers: tuple[tuple[TensorSpec, ...], ...]
) -> tuple[tuple[TensorSpec, ...], tuple[tuple[TensorSpec, ...], ...], tuple[TensorSpec, ...]]:
    """What stands before and behind the layer of a head that drafts, where that has its own; else
    it takes the model's."""
    prefix, size = f"blk.{arch.first_layer}.nextn.", (arch.vocab_size, arch.width)
    own, output = f"{prefix}embed_tokens.weight", f"{prefix}shared_head_head.weight"
    norm = f"{prefix}shared_head_norm.weight"
    norm = norm if norm in names else f"{arch.family.output_norm}.weight"
    table = replace(matrix(own, "token_table", *size), kind=TensorKind.TABLE)
    first = (table,) if own in names else ()
    last = (matrix(output, "output", *size),) if output in names else ()
    return first, layers, (vector(norm, "output_norm", arch.width), *last)


def _norms_heads(arch: Architecture, names: Container[str]) -> bool:
    """Whether layer norms, which add biases, are tensors of each head."""
    return arch.family.norms_by_head and any(
        f"blk.{layer}.attn_{part}_norm.weight" in names
        for layer in arch.attention_layers
        for part in "qk"
    )


def _first(arch: Architecture, names: Container[str]) -> Iterator[TensorSpec]:
    """What tokens are looked up in, and by what layers with embeddings of their own make these."""
    table = matrix("token_embd.weight", "token_table", arch.vocab_size, arch.width)
    is_tied = "output.weight" not in names and arch.pooling is None
    yield table if is_tied else replace(table, kind=TensorKind.TABLE)
    if arch.family.norms_sums:
        yield vector("token_embd_norm.weight", "additions.norm", arch.width)
        yield from _norm_bias(arch, "token_embd_norm", "additions.norm", lambda x: x in names)
        if arch.family.learns_positions:
            num_positions = arch.context_length
            yield rows("position_embd.weight", "additions.positions", num_positions, arch.width)
        if arch.num_text_kinds:
            num_kinds = arch.num_text_kinds
            yield rows("token_types.weight", "additions.kinds", num_kinds, arch.width)
    inner, num_layers = arch.input_width, arch.num_layers
    if not inner:
        return
    layers = [f"layers.{index}.layer_input" for index in range(num_layers)]
    projections = {f"{layer}.projection": inner for layer in layers}
    # Rows of the table do not grow by this root, so what is added to them shrinks.
    yield vector("per_layer_proj_norm.weight", "input_norm", inner, over_root_of=inner)
    yield TensorSpec(
        "per_layer_token_embd.weight",
        (arch.vocab_size, num_layers * inner),
        TensorKind.TABLE,
        tuple(Loaded(f"{layer}.table", (arch.vocab_size, inner)) for layer in layers),
    )
    yield matrices("per_layer_model_proj.weight", projections, arch.width)


def _last(arch: Architecture, names: Container[str]) -> Iterator[TensorSpec]:
    """What logits are tensors with, and what divides the angles of rotations."""
    num_tokens = arch.part.share_of(arch.vocab_size)
    if arch.pooling is not None:
        yield from _head(arch.pooling, names)
    elif "output.weight" in names:
        output = matrix("output.weight", "output", num_tokens, arch.width)
        yield replace(output, is_optional=True)
    if arch.family.output_norm:
        yield vector(f"{arch.family.output_norm}.weight", "output_norm", arch.width)
        yield from _norm_bias(arch, "output_norm", "output_norm", lambda name: name in names)
    if "output.bias" in names and arch.pooling is None:
        yield vector("output.bias", "output_bias", num_tokens, is_optional=True)
    names_of_divisors: tuple[str, ...] = ("rope_freqs.weight",)
    if "rope_factors_long.weight" in names:
        names_of_divisors = ("rope_factors_long.weight", "rope_factors_short.weight")
    for name in names_of_divisors:
        if name in names or name == "rope_factors_short.weight":
            yield TensorSpec(name, (arch.rope.dim // 2,), TensorKind.DIVISORS)


def _head(pooling: Pooling, names: Container[str]) -> Iterator[TensorSpec]:
    """What the host makes of a text's row: another vector, or scores."""
    for name, shape in pooling.shapes.items():
        yield of_head(name, *shape)
        bias = name.removesuffix(".weight") + ".bias"
        if bias in names:
            yield of_head(bias, shape[0])


def _of_layer(
    arch: Architecture, index: int, has: Has, *, norms_heads: bool
) -> Iterator[TensorSpec]:
    """The tensors of one layer, without its prefix, optional ones whether they are there or not."""
    family, width, shape = arch.family, arch.width, arch.layers[index]
    if index in arch.attention_layers and arch.latent is None:
        yield from _attention(arch, index, has)
    if family.pre_norms:
        yield vector("attn_norm.weight", "attn_norm", width)
        yield from _norm_bias(arch, "attn_norm", "attn_norm", has)
    if family.norms_sums:
        for name, place in (("attn_output", "attn_sum"), ("layer_output", "ffn_sum")):
            yield vector(f"{name}_norm.weight", f"{place}_norm", width)
            yield from _norm_bias(arch, f"{name}_norm", f"{place}_norm", has)
    if index in arch.attention_layers:
        yield from _qk_norms(arch, index)
    yield vector(
        "attn_output.bias", "attn_output_bias", width, is_optional=True, is_added_once=True
    )
    if family.post_norms:
        yield vector("post_attention_norm.weight", "post_attn_norm", width)
        yield vector("post_ffw_norm.weight", "post_ffn_norm", width)
    if family.pre_norms and family.ffn_norm:
        yield from _ffn_norm(arch, has)
    if arch.is_dense(index):
        yield from _feed_forward(arch, "dense", "", shape.ffn_width, has)
    if arch.experts is not None and arch.is_mixture(index):
        yield from _mixture(arch, arch.experts, has)
    if norms_heads:
        yield constant(0, "head_norm_bias", arch.q_width(index))
    if family.has_sinks:
        yield vector("attn_sinks.weight", "sinks", arch.num_heads)
    if family.norms_values and shape.kv_source is None:
        yield constant(1, "v_norm", shape.head_dim)
    if family.scales_layers:
        yield TensorSpec("layer_output_scale.weight", (1,), TensorKind.NUMBER, is_optional=True)
    if arch.input_width:
        yield matrix("inp_gate.weight", "layer_input.gate", arch.input_width, width)
        yield matrix("proj.weight", "layer_input.output", width, arch.input_width)
        yield vector("post_norm.weight", "layer_input.output_norm", width)
    if index in arch.state_layers:
        yield from mixer_tensors(arch, has)
    if arch.latent is not None:
        yield from latent_tensors(arch, arch.latent)
    if arch.is_head:
        yield from _beginning_of_head(width)


def _beginning_of_head(width: int) -> Iterator[TensorSpec]:
    """What a head that drafts has before its layer."""
    yield vector("nextn.enorm.weight", "nextn.embedding_norm", width)
    yield vector("nextn.hnorm.weight", "nextn.hidden_norm", width)
    places = ("nextn.of_embedding", "nextn.of_hidden")
    yield side_by_side("nextn.eh_proj.weight", places, width, width)


def _attention(arch: Architecture, index: int, has: Has) -> Iterator[TensorSpec]:
    """What makes queries, keys and values, and what reads attention's result."""
    family, width, shape = arch.family, arch.width, arch.layers[index]
    q_rows, kv_rows = arch.q_width(index), shape.kv_width
    counts = {"q": q_rows, "k": kv_rows, "v": kv_rows}
    if has("attn_qkv.weight"):
        yield matrices("attn_qkv.weight", counts, width)
    else:
        if family.gates_attention:
            # Behind the rows that make a head's queries stand those that gate its result.
            places, rows = ("q", "attn_gate"), (q_rows, q_rows)
            yield by_turns("attn_q.weight", places, rows, width, arch.num_heads)
        else:
            yield matrix("attn_q.weight", "q", q_rows, width)
        if shape.kv_source is None:
            yield matrix("attn_k.weight", "k", kv_rows, width)
            of_values = matrix("attn_v.weight", "v", kv_rows, width)
            yield replace(of_values, is_optional=family.norms_values)
    if has("attn_qkv.bias"):
        loaded = tuple(Loaded(f"{place}_bias", (count,)) for place, count in counts.items())
        num_rows = sum(counts.values())
        yield TensorSpec("attn_qkv.bias", (num_rows,), TensorKind.VECTOR, loaded, is_optional=True)
    else:
        for place, count in counts.items():
            yield vector(f"attn_{place}.bias", f"{place}_bias", count, is_optional=True)
    yield matrix("attn_output.weight", "attn_output", width, q_rows)


def _qk_norms(arch: Architecture, index: int) -> Iterator[TensorSpec]:
    """Norms of queries and keys: of all heads together, of each its own, or one for all."""
    family, shape = arch.family, arch.layers[index]
    num_heads = {"q": arch.num_heads, "k": shape.num_kv_heads if shape.kv_source is None else 0}
    for part, count in num_heads.items():
        name, place = f"attn_{part}_norm.weight", f"{part}_norm"
        if not count:
            continue
        if family.wide_qk_norm:
            yield vector(name, place, count * shape.head_dim)
        elif family.norms_by_head:
            yield vector(name, place, count, shape.head_dim, is_optional=True)
        elif family.qk_norm:
            yield vector(name, place, shape.head_dim, is_optional=family.optional_qk_norm)


def _norm_bias(arch: Architecture, name: str, place: str, has: Has) -> Iterator[TensorSpec]:
    """The bias of a layer norm, zeros where the file has none; other norms have no bias."""
    if not arch.family.layer_norms:
        return
    if has(f"{name}.bias"):
        yield vector(f"{name}.bias", f"{place}_bias", arch.width, is_optional=True)
    else:
        yield constant(0, f"{place}_bias", arch.width)


def _ffn_norm(arch: Architecture, has: Has) -> Iterator[TensorSpec]:
    """The norm before the feed-forward, without which it reads what attention reads."""
    name, is_optional = arch.family.ffn_norm, arch.family.optional_ffn_norm
    # Converters of Falcon H1 leave the end of that name out.
    weight = name if has(name) else f"{name}.weight"
    if not is_optional or has(weight):
        yield vector(weight, "ffn_norm", arch.width, is_optional=is_optional)
        yield from _norm_bias(arch, name, "ffn_norm", has)


def _feed_forward(
    arch: Architecture, place: str, kind: str, inner: int, has: Has, num_experts: int = 0
) -> Iterator[TensorSpec]:
    """`ffn_*{kind}`, of that inner width, or stacks of `num_experts`; a dense one may have biases,
    experts have those that the family has."""
    family, width, of_experts = arch.family, arch.width, arch.family.experts
    is_joint = num_experts > 0 and has(f"ffn_gate_up{kind}.weight")
    is_fused = is_joint or (family.fused_gate_up and not kind)
    parts = ("gate", "up") if family.has_gate else ("up",)
    names = parts if not is_fused else ("gate_up",) if is_joint else ("up",)
    is_biased = num_experts > 0 and of_experts is not None and of_experts.is_biased
    if is_biased or not (kind or is_fused):
        for part in (*names, "down"):
            length = width if part == "down" else inner
            shape = (num_experts, length) if is_biased else (length,)
            yield TensorSpec(
                f"ffn_{part}{kind}.bias",
                shape,
                TensorKind.VECTOR,
                (Loaded(f"{place}.{part}_bias", shape),),
                is_optional=not is_biased,
                is_added_once=part == "down",
            )
    if is_fused:
        counts = {f"{place}.{part}": inner for part in parts}
        yield matrices(f"ffn_{names[0]}{kind}.weight", counts, width, num_experts)
    else:
        for part in names:
            counts = {f"{place}.{part}": inner}
            yield matrices(f"ffn_{part}{kind}.weight", counts, width, num_experts)
    yield matrices(f"ffn_down{kind}.weight", {f"{place}.down": width}, inner, num_experts)


def _mixture(arch: Architecture, experts: Experts, has: Has) -> Iterator[TensorSpec]:
    """A router, its experts, the shared one, and what a dense feed-forward beside them needs."""
    family, width, num_experts = arch.family.experts, arch.width, experts.choice.num_experts
    assert family is not None
    if experts.shared_width:
        yield from _feed_forward(arch, "mixture.shared", "_shexp", experts.shared_width, has)
    # Behind its rows stands that of the shared expert's gate.
    router = Loaded("mixture.router", (num_experts + experts.choice.has_gate, width))
    yield TensorSpec("ffn_gate_inp.weight", (num_experts, width), TensorKind.ROUTER, (router,))
    if experts.choice.has_gate:
        yield TensorSpec("ffn_gate_inp_shexp.weight", (1, width), TensorKind.ROUTER)
    if family.has_bias:
        yield vector("exp_probs_b.bias", "mixture.bias", num_experts, is_optional=True)
    yield from _feed_forward(arch, "mixture.experts", "_exps", experts.width, has, num_experts)
    if family.is_biased:
        yield vector("ffn_gate_inp.bias", "mixture.router_bias", num_experts)
    if family.stands_beside:
        yield vector("ffn_down_exps.scale", "mixture.factors", num_experts, is_optional=True)
        beside = "mixture.beside"
        yield vector("ffn_gate_inp.scale", f"{beside}.router", width, over_root_of=width)
        yield vector("pre_ffw_norm_2.weight", f"{beside}.experts", width)
        yield vector("post_ffw_norm_2.weight", f"{beside}.mixed", width)
        yield vector("post_ffw_norm_1.weight", f"{beside}.dense", width)
