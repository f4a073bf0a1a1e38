"""An architecture: what a GGUF file's metadata says that the one decoder must know.

Keys are those of the GGUF specification; what is fixed per family is in `families.py`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from hypocenter.base.errors import MISSING, BadModelFile, UnsupportedModel
from hypocenter.base.tensor import DType
from hypocenter.model.facts.experts import Experts, read_experts
from hypocenter.model.facts.families import FAMILIES, Family
from hypocenter.model.facts.latent import Latent, log_multiplier, read_latent, score_scale
from hypocenter.model.facts.layer_shapes import (
    MAX_CONTEXT,
    MAX_WIDTH,
    HeadDims,
    LayerShape,
    read_counts,
    read_head_dims,
    read_shapes,
    refuse_sections,
)
from hypocenter.model.facts.part import WHOLE, Part
from hypocenter.model.facts.pooling import Pooling, read_pooling
from hypocenter.model.facts.recurrence import AnyRecurrence, layers_with_state, read_recurrence
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.gguf.identity import require_model

MAX_LAYERS = 1024
MAX_VOCAB = 1 << 21
MAX_TEXT_KINDS = 1 << 10
# Digits of ASCII without leading zeros: one layer has one name.
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)")
#: What a model that makes vectors, or scores, may have besides.
_OTHER_ENDS = ("output.", "cls.", "dense_")
#: What layers add may be scaled so; beyond, nothing of it or of the rest would be left in f32.
RESIDUAL_SCALES = (1e-3, 1e3)
#: Kernels compute in f32: numbers beyond would be 0 or infinite there, though not in the file.
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary table: base, how positions are stretched, and what the result is scaled by.

    `factor` divides the angles (linear and yarn); yarn blends between stretched and plain angles
    over `original_context`. `attn_factor` multiplies cosines and sines; 0: derive it.
    """

    base: float
    dim: int
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 1
    attn_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    #: How much of yarn's own factor `attn_factor` takes back; 0: nothing.
    log_multiplier: float = 0.0
    #: Whether yarn blends from a whole pair to a whole pair.
    rounds_ramp: bool = True


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything the decoder needs to know beside the tensors themselves."""

    name: str
    family: Family
    layers: tuple[LayerShape, ...]
    width: int
    num_heads: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: Rope
    local_rope: Rope
    attn_scale: float
    attn_softcap: float
    final_softcap: float
    #: The embedding is multiplied by it.
    embedding_scale: float = 1.0
    #: Logits are divided by it.
    logit_scale: float = 1.0
    #: How much q grows with the logarithm of how many original contexts lie before it; 0: it does
    #: not.
    query_growth: float = 0.0
    #: Layers behind the last one that only propose tokens; decoding does without them.
    draft_layers: tuple[LayerShape, ...] = ()
    #: Where the first of `layers` stands in the file. Of a head that drafts (`nextn.py`) it is the
    #: one layer; else it is 0.
    first_layer: int = 0
    experts: Experts | None = None
    #: Columns of the embedding that each layer has of its own; 0: layers have none.
    input_width: int = 0
    recurrence: AnyRecurrence | None = None
    #: Of norms within layers that carry a state: what those see has no residual scale.
    mixer_eps: float = 1e-5
    latent: Latent | None = None
    #: How a text becomes one vector, or a score; None: the model writes text.
    pooling: Pooling | None = None
    #: Kinds of texts that have an embedding; 0: none has.
    num_text_kinds: int = 0
    #: The share of the model that this describes.
    part: Part = WHOLE

    @property
    def num_layers(self) -> int:
        """Layers that decode."""
        return len(self.layers)

    @property
    def is_head(self) -> bool:
        """Whether it is a head that drafts for a model, which stands before it in the file."""
        return self.first_layer > 0

    @property
    def length_text(self) -> str:
        """What `context_length` is of this model, as a sentence for people."""
        if self.context_length != _positions_in_window(self.family, self.layers):
            return f"the model was trained for {self.context_length}"
        return (
            f"the model takes texts of at most {self.context_length} tokens, half of its window to "
            "each side"
        )

    def is_local(self, layer: int) -> bool:
        """Whether a layer sees a window only."""
        return self.layers[layer].window > 0

    def is_rotated(self, layer: int) -> bool:
        """Whether a layer turns q and k by their positions."""
        family, step = self.family, self.family.no_rope_every
        if not self.rope.dim or (step and layer % step == step - 1):
            return False
        has_windows = any(shape.window for shape in self.layers)
        return family.rotates_global_layers or not has_windows or self.is_local(layer)

    def q_width(self, layer: int) -> int:
        """Columns of a token's queries in a layer."""
        return self.num_heads * self.layers[layer].head_dim

    @property
    def widest_q(self) -> int:
        """The most columns that a token's queries have."""
        return max(self.q_width(layer) for layer in range(self.num_layers))

    @property
    def widest_attended(self) -> int:
        """The most columns that attention gives a token."""
        return self.num_heads * max(shape.value_dim for shape in self.layers)

    @property
    def widest_kv(self) -> int:
        """The most columns that a token's keys, or its values, have."""
        return max(shape.kv_width for shape in self.layers)

    def scales_queries(self, context_length: int) -> bool:
        """Whether q is scaled at any of so many positions."""
        return self.query_growth > 0 and context_length > self.rope.original_context

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts."""
        return self.experts is not None and layer >= self.experts.num_dense

    def is_dense(self, layer: int) -> bool:
        """Whether it has a feed-forward that all tokens take, the shared expert apart."""
        of_family = self.family.experts
        stands_beside = of_family is not None and of_family.stands_beside
        return stands_beside or not (self.is_mixture(layer) or self.family.is_bare)

    @property
    def dense_widths(self) -> tuple[int, ...]:
        """The widths of feed-forwards that all tokens of a layer take, the widest first."""
        shared = self.experts.shared_width if self.experts else 0
        dense = {shape.ffn_width for index, shape in enumerate(self.layers) if self.is_dense(index)}
        return tuple(sorted({shared, *dense} - {0}, reverse=True))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have attention."""
        own = self.recurrence
        return tuple(range(self.num_layers)) if own is None else own.attention_layers

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that carry a state, most often in the place of attention."""
        return layers_with_state(self.recurrence, self.num_layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of what layers carry from token to token of a sequence."""
        shapes = self.recurrence.shapes.values() if self.recurrence is not None else ()
        return 4 * len(self.state_layers) * sum(map(math.prod, shapes))

    @property
    def mixer_width(self) -> int:
        """The widest row that is multiplied at the end of attention, or of what stands for it."""
        if self.latent is not None:
            return max(self.num_heads * self.latent.value_dim, self.latent.query_rank)
        values = self.recurrence.values_width if self.recurrence is not None else 0
        return max(self.widest_q, values)

    @property
    def dense_width(self) -> int:
        """The widest feed-forward that all tokens of a layer take; 0: there is none."""
        return max(self.dense_widths, default=0)

    def passes_over(self, name: str) -> bool:
        """Whether a tensor is not loaded: one of the layers that only propose tokens, or what
        would make keys and values in a layer that reads those of another; where the model makes
        vectors, what would make logits or other heads' results."""
        if self.pooling is not None and name.startswith(_OTHER_ENDS):
            return True
        found = _LAYER_TENSOR.fullmatch(name)
        if found is None:
            return False
        layer = int(found[1])
        if layer >= self.num_layers:
            return layer < self.num_layers + len(self.draft_layers)
        is_kv = found[2] in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
        return is_kv and self.layers[layer].kv_source is not None

    def kv_bytes_per_token(self, dtype: DType) -> int:
        """Bytes of one position in a KV cache of `dtype`, of which heads must be whole blocks."""
        shapes = [self.layers[layer] for layer in self.layers_with_pages]
        return sum(
            shape.num_kv_heads * sum(map(dtype.num_bytes, (shape.head_dim, shape.value_pitch)))
            for shape in shapes
        )

    @property
    def layers_with_pages(self) -> tuple[int, ...]:
        """The layers that keep keys and values of their own. Where a text is read in one step, they
        are of no use behind their layer, and one place does for all."""
        own = [x for x in self.attention_layers if self.layers[x].kv_source is None]
        return tuple(own[:1] if self.family.sees_all else own)


def _positions_in_window(family: Family, layers: tuple[LayerShape, ...]) -> int:
    """Positions of a text of which each token sees all through a window to both sides, which is
    half as far to each; 0 for models without one. Longer texts are not run."""
    window = max(shape.window for shape in layers) if family.sees_all else 0
    return window // 2 + 1 if window else 0


def read_architecture(file: GGUFFile, pooling: str | None = None) -> Architecture:
    """Read what a model file says of its architecture, and cross-check it.

    `pooling` stands over what the file says of that.

    Raises UnsupportedModel for an architecture we do not run, BadModelFile when metadata
    contradict each other or the shapes of the tensors, BadSetting for a pooling that it has not.
    """
    require_model(file)
    name = file.text("general.architecture")
    if name not in FAMILIES:
        # Nobody wrote that name by hand, so it is no slip of another one.
        limit = f"hypocenter runs {', '.join(FAMILIES)}"
        raise UnsupportedModel(file.path, "general.architecture", name, limit)
    return _Reader(file, name, pooling).read()


class _Reader:
    """Reads `{architecture}.*` keys with their bounds."""

    def __init__(self, file: GGUFFile, name: str, pooling: str | None) -> None:
        self.file, self.name, self.family = file, name, FAMILIES[name]
        self.pooling = pooling

    def read(self) -> Architecture:
        refuse_sections(self.file, self.name, self.family)
        width = self._count("embedding_length", MAX_WIDTH)
        num_layers, num_draft_layers = self._layers()
        num_heads = 0 if self.family.is_bare else self._uniform("attention.head_count", 1 << 16)
        latent = None
        if self.family.has_latent:
            latent = read_latent(self.file, self.name, num_heads, MAX_WIDTH)
        head_dims = read_head_dims(self.file, self.name, width, num_heads, latent)
        layers = read_shapes(
            self.file,
            self.name,
            self.family,
            num_blocks=num_layers + num_draft_layers,
            num_heads=num_heads,
            head_dims=head_dims,
            latent=latent,
        )
        rope, local_rope = self._ropes(head_dims)
        residual_scale = self._residual_scale()
        return Architecture(
            name=self.name,
            family=self.family,
            layers=layers[:num_layers],
            width=width,
            num_heads=num_heads,
            vocab_size=self._vocab_size(width),
            context_length=self._context_length(layers),
            # All that layers add is scaled alike, so what they add to may be divided instead.
            norm_eps=self._norm_eps() / residual_scale**2,
            mixer_eps=self._norm_eps(),
            rope=rope,
            local_rope=local_rope,
            attn_scale=self._attn_scale(width, num_layers, num_heads, head_dims.whole)
            if latent is None
            else self._latent_scale(latent, rope),
            attn_softcap=self._number("attn_logit_softcapping", self.family.default_caps[0]),
            final_softcap=self._number("final_logit_softcapping", self.family.default_caps[1]),
            embedding_scale=self._embedding_scale(width) / residual_scale,
            logit_scale=self._logit_scale(),
            query_growth=self._query_growth(rope, head_dims.whole),
            draft_layers=layers[num_layers:],
            input_width=self._input_width(),
            experts=read_experts(
                self.file,
                self.name,
                self.family.experts,
                num_layers=num_layers,
                ffn_width=layers[0].ffn_width,
                max_width=MAX_WIDTH,
            ),
            recurrence=read_recurrence(
                self.file,
                self.name,
                self.family.recurrence,
                num_blocks=num_layers + num_draft_layers,
                num_layers=num_layers,
                width=width,
                is_bare=self.family.is_bare,
            ),
            latent=latent,
            pooling=read_pooling(self.file, self.name, self.family, width, self.pooling),
            num_text_kinds=self._num_text_kinds(),
        )

    def _context_length(self, layers: tuple[LayerShape, ...]) -> int:
        """Positions of a text: those that it was trained for, or fewer for its window."""
        context_length = self._count("context_length", MAX_CONTEXT)
        return min(context_length, _positions_in_window(self.family, layers) or context_length)

    def _num_text_kinds(self) -> int:
        """Rows of what kinds of texts add to the embedding; files may lack it."""
        table = self.file.tensors.get("token_types.weight")
        if table is None or not self.family.norms_sums:
            return 0
        num_kinds = table.shape[0] if len(table.shape) == 2 else 1
        if not 1 <= num_kinds <= MAX_TEXT_KINDS:
            field = "token_types.weight rows"
            raise BadModelFile.out_of_range(self.file.path, field, num_kinds, 1, MAX_TEXT_KINDS)
        return num_kinds

    def _layers(self) -> tuple[int, int]:
        """How many layers decode, and how many behind them draft."""
        num_blocks = self._count("block_count", MAX_LAYERS)
        num_drafts = self.file.integer(f"{self.name}.nextn_predict_layers", 0, low=0, high=16)
        if num_drafts >= num_blocks:
            limit = f"must be below {self.name}.block_count, which is {num_blocks}"
            raise self._bad_field("nextn_predict_layers", num_drafts, limit)
        return num_blocks - num_drafts, num_drafts

    def _scale(self, key: str) -> float:
        """A scale of the families that have them; files say 0, or nothing, where it is 1."""
        if (fixed := self.family.fixed_scales) is not None:
            width = self._count("embedding_length", MAX_WIDTH)
            return fixed.of(key, width, self._count("block_count", MAX_LAYERS))
        return (self._number(key, 1.0) or 1.0) if self.family.has_scales else 1.0

    def _norm_eps(self) -> float:
        kind = "layer_norm" if self.family.layer_norms else "layer_norm_rms"
        return self._positive(f"attention.{kind}_epsilon")

    def _logit_scale(self) -> float:
        if self.family.multiplies_logits and (factor := self._number("logit_scale", 0.0)):
            return 1 / factor
        return self._scale("logit_scale")

    def _residual_scale(self) -> float:
        scale, (low, high) = self._scale("residual_scale"), RESIDUAL_SCALES
        if not low <= scale <= high:
            field = f"{self.name}.residual_scale"
            raise BadModelFile.out_of_range(self.file.path, field, scale, low, high)
        return scale

    def _embedding_scale(self, width: int) -> float:
        return math.sqrt(width) if self.family.scaled_embedding else self._scale("embedding_scale")

    def _attn_scale(self, width: int, num_layers: int, num_heads: int, head_dim: int) -> float:
        if not self.family.scales_scores:
            return 1.0
        if self.family.has_scales and (scale := self._number("attention.scale", 0.0)):
            return scale
        if num_layers != self.family.wide_scale_layers:
            return 1 / math.sqrt(head_dim)
        if num_heads > width:
            limit = f"{num_layers} layers scale by embedding_length / heads, and that is {width}"
            raise self._bad_field("attention.head_count", num_heads, limit)
        return 1 / math.sqrt(width // num_heads)

    def _latent_scale(self, latent: Latent, rope: Rope) -> float:
        factor = rope.factor if rope.scaling == "yarn" else 1.0
        scale = score_scale(latent, log_multiplier(self.file, self.name), factor)
        return self._within_f32("rope.scaling.yarn_log_multiplier", scale)

    def _input_width(self) -> int:
        if not self.family.has_layer_inputs:
            return 0
        full = f"{self.name}.embedding_length_per_layer_input"
        return self.file.integer(full, 0, low=0, high=MAX_WIDTH)

    def _query_growth(self, rope: Rope, head_dim: int) -> float:
        key = "attention.temperature_scale"
        growth = self._number(key, 0.0) if self.family.scales_queries else 0.0
        if growth and rope.dim != head_dim:
            limit = f"of heads of {head_dim} columns all must be rotated, and {rope.dim} are"
            raise UnsupportedModel(self.file.path, f"{self.name}.{key}", growth, limit)
        return growth

    def _vocab_size(self, width: int) -> int:
        table = self.file.tensors.get("token_embd.weight")
        if table is None:
            raise BadModelFile(
                self.file.path, "token_embd.weight", MISSING, "every model needs its token table"
            )
        if len(table.shape) != 2 or table.shape[1] != width:
            raise BadModelFile(
                self.file.path,
                "token_embd.weight shape",
                table.shape,
                f"{self.name}.embedding_length is {width}",
            )
        vocab_size = table.shape[0]
        if vocab_size > MAX_VOCAB:
            raise BadModelFile(
                self.file.path, "token_embd.weight rows", vocab_size, f"at most {MAX_VOCAB}"
            )
        declared = self.file.integer(f"{self.name}.vocab_size", vocab_size, low=1)
        if declared != vocab_size:
            raise self._bad_field(
                "vocab_size", declared, f"token_embd.weight has {vocab_size} rows"
            )
        if "tokenizer.ggml.tokens" in self.file.metadata:
            num_tokens = len(self.file.strings("tokenizer.ggml.tokens"))
            if num_tokens > vocab_size:
                raise BadModelFile(
                    self.file.path,
                    "tokenizer.ggml.tokens length",
                    num_tokens,
                    f"token_embd.weight has {vocab_size} rows",
                )
        return vocab_size

    def _ropes(self, head_dims: HeadDims) -> tuple[Rope, Rope]:
        widest = head_dims.whole
        dim = self.file.integer(f"{self.name}.rope.dimension_count", widest, low=0, high=widest)
        # The one thing that this key means, and to these families alone: whether positions turn.
        if self.family.has_scales and not self.file.flag(
            f"{self.name}.rope.scaling.finetuned", True
        ):
            dim = 0
        if self.family.learns_positions:
            dim = 0
        if dim % 2:
            raise self._bad_field("rope.dimension_count", dim, "must be even")
        base = self._positive("rope.freq_base", 10000.0)
        if self.family.scales_base and dim > 2 and (alpha := self._number("rope.scaling.alpha", 0)):
            base = self._within_f32("rope.scaling.alpha", base * alpha ** (dim / (dim - 2)))
        factor_keys = (f"{self.name}.rope.scaling.factor", f"{self.name}.rope.scale_linear")
        stretched = any(key in self.file.metadata for key in factor_keys)
        scaling = self.file.text(
            f"{self.name}.rope.scaling.type", "linear" if stretched else "none"
        )
        if scaling not in ("none", "linear", "yarn", "longrope"):
            raise UnsupportedModel(
                self.file.path,
                f"{self.name}.rope.scaling.type",
                scaling,
                "known types are none, linear, yarn, longrope",
            )
        rope = Rope(
            base=base,
            dim=dim,
            scaling=scaling,
            factor=self._rope_factor(),
            original_context=self.file.integer(
                f"{self.name}.rope.scaling.original_context_length",
                self._count("context_length", MAX_CONTEXT),
                low=1,
                high=MAX_CONTEXT,
            ),
            attn_factor=self._number("rope.scaling.attn_factor", 0.0),
            beta_fast=self._positive("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self._positive("rope.scaling.yarn_beta_slow", 1.0),
            log_multiplier=self._log_multiplier(),
            rounds_ramp=self.family.rounds_ramp,
        )
        if scaling == "yarn" and base <= 1:
            raise self._bad_field("rope.freq_base", base, "must be above 1 for yarn")
        if scaling == "longrope" and not rope.attn_factor and rope.original_context < 2:
            limit = "must be at least 2, or rope.scaling.attn_factor be given"
            raise self._bad_field(
                "rope.scaling.original_context_length", rope.original_context, limit
            )
        if not self.family.plain_window:
            return rope, rope
        own_base = self._positive("rope.freq_base_swa", self.family.window_base or base)
        full = f"{self.name}.rope.dimension_count_swa"
        widest = head_dims.local
        own_dim = self.file.integer(full, min(dim, widest), low=0, high=widest)
        if own_dim % 2:
            raise self._bad_field("rope.dimension_count_swa", own_dim, "must be even")
        return rope, Rope(base=own_base, dim=own_dim)

    def _rope_factor(self) -> float:
        # The second is the older name of the first; 0 says that there is none.
        return self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0)) or 1.0

    def _log_multiplier(self) -> float:
        # Of latents it is the scores that grow; cosines and sines then do so by nothing.
        if self.family.has_latent:
            return float(log_multiplier(self.file, self.name) != 0)
        # Converters of other families write none.
        if not self.family.scales_queries:
            return 0.0
        return self._number("rope.scaling.yarn_log_multiplier", 0.0)

    def _count(self, key: str, high: int) -> int:
        return self.file.integer(f"{self.name}.{key}", low=1, high=high)

    def _uniform(self, key: str, high: int) -> int:
        """A count that some files give per layer: all layers must agree."""
        counts = set(read_counts(self.file, self.name, key, high))
        if len(counts) > 1:
            full, limit = f"{self.name}.{key}", "all layers must have the same count"
            raise UnsupportedModel(self.file.path, full, sorted(counts), limit)
        return counts.pop()

    def _number(self, key: str, default: float) -> float:
        value = self.file.number(f"{self.name}.{key}", default)
        return value if value == 0 else self._within_f32(key, value)

    def _positive(self, key: str, default: float | None = None) -> float:
        full = f"{self.name}.{key}"
        value = self.file.number(full) if default is None else self.file.number(full, default)
        return self._within_f32(key, value)

    def _within_f32(self, key: str, value: float) -> float:
        if not SMALLEST <= value <= LARGEST:
            place = self.file.path, f"{self.name}.{key}"
            raise BadModelFile.out_of_range(*place, value, SMALLEST, LARGEST, of="f32")
        return value

    def _bad_field(self, key: str, value: object, limit: str) -> BadModelFile:
        return BadModelFile(self.file.path, f"{self.name}.{key}", value, limit)
