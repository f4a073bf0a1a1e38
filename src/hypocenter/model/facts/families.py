"""The families as data: what holds for every model of one GGUF architecture name; it reads no file.

What is fixed per family follows llama.cpp's src/models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypocenter.model.facts.experts import ExpertsOfFamily
from hypocenter.model.facts.recurrence import RecurrenceOfFamily


@dataclass(frozen=True, slots=True)
class FixedScales:
    """What every model of a family scales by, where files say nothing of it: the embedding, what
    layers add (by `depth` over the root of their number), and logits, as if the model were
    `logit_width` wide."""

    embedding: float
    depth: float
    logit_width: int

    def of(self, key: str, width: int, num_layers: int) -> float:
        """The one that other families' files have under `key`; logits are divided by theirs."""
        if key == "embedding_scale":
            return self.embedding
        if key == "residual_scale":
            return self.depth / math.sqrt(num_layers)
        return width / self.logit_width


@dataclass(frozen=True, slots=True)
class Family:
    """What holds for every model of one GGUF architecture name."""

    rope_style: str
    activation: str = "silu"
    #: Norms on q and k, of each head by itself or of all heads together; files may lack optional
    #: ones.
    qk_norm: bool = False
    wide_qk_norm: bool = False
    optional_qk_norm: bool = False
    #: Whether those that are layer norms have weights for each head, and no biases.
    norms_by_head: bool = False
    #: Whether those see q and k as their positions have rotated them.
    norms_after_rope: bool = False
    #: What files call the norm before the feed-forward; "": it reads what attention reads, and
    #: both add to the same.
    ffn_norm: str = "ffn_norm"
    #: Whether files may lack that norm, which means the same.
    optional_ffn_norm: bool = False
    #: Whether norms take a mean off and add a bias; files may lack biases.
    layer_norms: bool = False
    #: Whether attention and feed-forward read a norm of what they add to, or that itself.
    pre_norms: bool = True
    post_norms: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    #: Whether a feed-forward has a gate, or activates what goes up.
    has_gate: bool = True
    #: What files call the norm behind the last layer.
    output_norm: str = "output_norm"
    scaled_embedding: bool = False
    #: Every n-th layer sees the whole context, the others a window; 0: all layers are alike.
    window_pattern: int = 0
    #: Whether a window in the file is known to mean what `window_pattern` says, or files name the
    #: layers that have it.
    has_window: bool = False
    names_windows: bool = False
    default_window: int = 0
    #: The number of layers of the one size that has it; 0: all sizes do.
    default_window_layers: int = 0
    #: Whether layers with a window leave the stretching of positions to the others, and the base
    #: that they turn by in files that name none; 0: that of the others.
    plain_window: bool = False
    window_base: float = 0.0
    #: Whether yarn blends angles from a whole pair to a whole pair.
    rounds_ramp: bool = True
    #: Every n-th layer does not turn q and k by their positions; 0: all layers do.
    no_rope_every: int = 0
    #: Whether the layers that see all do so beside those with a window.
    rotates_global_layers: bool = True
    #: Caps of scores and logits for files that do not name them; 0: none.
    default_caps: tuple[float, float] = (0.0, 0.0)
    #: Layer counts for which attention is scaled by width / heads instead of the head's size.
    wide_scale_layers: int = 0
    #: Whether it is scaled at all.
    scales_scores: bool = True
    #: Whether v is normed, without a weight, and made of what k is where files have no matrix.
    norms_values: bool = False
    #: Whether files may scale what a layer gives.
    scales_layers: bool = False
    #: Whether layers may read an embedding of their own.
    has_layer_inputs: bool = False
    #: Whether files scale the embedding, what layers add, scores and logits.
    has_scales: bool = False
    #: The same where files do not say, for it is the same in all of them.
    fixed_scales: FixedScales | None = None
    #: Whether files name a number to multiply logits by.
    multiplies_logits: bool = False
    #: Whether files may have q scaled by its position, the more the farther it is.
    scales_queries: bool = False
    #: Whether each head has a score of its own beside those of the keys.
    has_sinks: bool = False
    #: Whether attention's result is gated before it is multiplied, by a half of what makes q.
    gates_attention: bool = False
    #: Whether a token sees those behind it too, as in encoders of texts.
    sees_all: bool = False
    #: Whether norms follow what attention and feed-forward have added to, and the embedding, which
    #: kinds of texts add to (BERT).
    norms_sums: bool = False
    #: Whether positions have an embedding of their own, and turn nothing.
    learns_positions: bool = False
    #: Whether files may raise the base of rotations by how far a context was stretched, as
    #: llama.cpp's src/models/hunyuan-vl.cpp reads it.
    scales_base: bool = False
    #: Whether files may cut rotations into sections that are alike for text.
    has_sections: bool = False
    #: Whether keys and values lie compressed, in a latent for all heads.
    has_latent: bool = False
    #: Whether a head that drafts in its files is one that we know (`nextn.py`).
    has_head: bool = False
    #: Whether layers have nothing but a state: neither attention nor a feed-forward.
    is_bare: bool = False
    #: Of layers without attention; None: there are none.
    recurrence: RecurrenceOfFamily | None = None
    #: Of files with experts; None: there are none.
    experts: ExpertsOfFamily | None = None


FAMILIES: dict[str, Family] = {
    # Mistral 7B v0.1 is a llama file whose layers all have a window. Converters leave the window
    # out and llama.cpp ignores it; where a file names one, we honour it, as transformers does.
    "llama": Family(
        "normal", has_window=True, experts=ExpertsOfFamily(are_optional=True), has_head=True,
    ),
    "mistral3": Family(
        "normal", has_window=True, scales_queries=True, experts=ExpertsOfFamily(are_optional=True),
    ),
    "qwen2": Family("neox"),
    "qwen2moe": Family(
        "neox", experts=ExpertsOfFamily(normalises=False, has_gate=True, share_width=True),
    ),
    "qwen3": Family("neox", qk_norm=True),
    "qwen3moe": Family("neox", qk_norm=True, experts=ExpertsOfFamily(share_width=True)),
    "qwen3next": Family(
        "neox", qk_norm=True, ffn_norm="post_attention_norm", gates_attention=True,
        recurrence=RecurrenceOfFamily(heads_by_turns=False, joins_steps=True),
        experts=ExpertsOfFamily(has_gate=True, share_width=True), has_head=True,
    ),
    "qwen35": Family(
        "neox", qk_norm=True, ffn_norm="post_attention_norm", gates_attention=True,
        has_sections=True, recurrence=RecurrenceOfFamily(), has_head=True,
    ),
    "qwen35moe": Family(
        "neox", qk_norm=True, ffn_norm="post_attention_norm", gates_attention=True,
        has_sections=True, recurrence=RecurrenceOfFamily(),
        experts=ExpertsOfFamily(has_gate=True, share_width=True), has_head=True,
    ),
    "lfm2": Family(
        "neox", qk_norm=True, output_norm="token_embd_norm",
        recurrence=RecurrenceOfFamily(is_convolution=True),
    ),
    "lfm2moe": Family(
        "neox", qk_norm=True, output_norm="token_embd_norm",
        recurrence=RecurrenceOfFamily(is_convolution=True),
        experts=ExpertsOfFamily(scores="sigmoid", has_bias=True),
    ),
    "gemma": Family("neox", activation="gelu", scaled_embedding=True),
    "gemma2": Family(
        "neox", activation="gelu", post_norms=True, scaled_embedding=True, has_window=True,
        window_pattern=2, default_window=4096, wide_scale_layers=46, default_caps=(50.0, 30.0),
    ),
    "gemma3": Family(
        "neox", activation="gelu", qk_norm=True, post_norms=True, scaled_embedding=True,
        has_window=True, window_pattern=6, wide_scale_layers=62, plain_window=True,
        window_base=10000.0,
    ),
    "gemma4": Family(
        "neox", activation="gelu", qk_norm=True, post_norms=True, scaled_embedding=True,
        has_window=True, names_windows=True, plain_window=True, window_base=10000.0,
        scales_scores=False, norms_values=True, scales_layers=True,
        has_layer_inputs=True,
        experts=ExpertsOfFamily(are_optional=True, stands_beside=True),
    ),
    "phi3": Family("neox", fused_qkv=True, fused_gate_up=True, has_window=True),
    "glm4": Family("normal", post_norms=True, fused_gate_up=True),
    "glm4moe": Family(
        "neox", qk_norm=True, optional_qk_norm=True, ffn_norm="post_attention_norm",
        experts=ExpertsOfFamily(scores="sigmoid", normalises=False, has_bias=True), has_head=True,
    ),
    "granite": Family("normal", has_scales=True),
    "granitemoe": Family("normal", has_scales=True, experts=ExpertsOfFamily()),
    "granitehybrid": Family(
        "normal", has_scales=True, experts=ExpertsOfFamily(are_optional=True),
        recurrence=RecurrenceOfFamily(is_state_space=True),
    ),
    "falcon-h1": Family(
        "neox", recurrence=RecurrenceOfFamily(is_state_space=True, stands_beside=True),
    ),
    "mamba2": Family(
        "neox", ffn_norm="", is_bare=True, recurrence=RecurrenceOfFamily(is_state_space=True),
    ),
    # Files do not say which layers are not rotated; it is every fourth in the one that there is.
    "smollm3": Family("normal", no_rope_every=4),
    # OLMo 3 is an olmo2 file with a window.
    "olmo2": Family(
        "neox", wide_qk_norm=True, pre_norms=False, post_norms=True, has_window=True,
        window_pattern=4, plain_window=True,
    ),
    "exaone4": Family(
        "neox", qk_norm=True, pre_norms=False, post_norms=True, has_window=True, window_pattern=4,
        default_window=4096, default_window_layers=64, rotates_global_layers=False,
    ),
    "ernie4_5": Family("normal"),
    "seed_oss": Family("neox", ffn_norm="post_attention_norm"),
    "hunyuan-dense": Family("neox", qk_norm=True, norms_after_rope=True, scales_base=True),
    "arcee": Family("normal", activation="relu2", has_gate=False),
    "starcoder2": Family("neox", activation="gelu", layer_norms=True, has_gate=False),
    # Command R+ and StableLM 2 12B norm queries and keys; the smaller models of both do not.
    "command-r": Family(
        "normal", layer_norms=True, ffn_norm="", multiplies_logits=True, qk_norm=True,
        optional_qk_norm=True, norms_by_head=True,
    ),
    "stablelm": Family(
        "neox", layer_norms=True, optional_ffn_norm=True, qk_norm=True, optional_qk_norm=True,
        norms_by_head=True,
    ),
    "nemotron": Family("neox", activation="relu2", layer_norms=True, has_gate=False),
    "phi2": Family("neox", activation="gelu", layer_norms=True, ffn_norm="", has_gate=False),
    "gpt-oss": Family(
        "neox", activation="clamped", ffn_norm="post_attention_norm", has_window=True,
        window_pattern=2, rounds_ramp=False, has_sinks=True,
        experts=ExpertsOfFamily(is_biased=True),
    ),
    "deepseek2": Family(
        "normal", has_latent=True, has_head=True,
        experts=ExpertsOfFamily(normalises=False, are_optional=True, has_bias=True),
    ),
    "minicpm3": Family("neox", has_latent=True, fixed_scales=FixedScales(12.0, 1.4, 256)),
    # No logits: what these make of a text is a vector, or a score.
    "bert": Family(
        "neox", activation="gelu_erf", layer_norms=True, pre_norms=False, has_gate=False,
        output_norm="", sees_all=True, norms_sums=True, learns_positions=True,
    ),
    "nomic-bert": Family(
        "neox", layer_norms=True, pre_norms=False, output_norm="", sees_all=True, norms_sums=True,
    ),
    "gemma-embedding": Family(
        "neox", activation="gelu", qk_norm=True, post_norms=True, scaled_embedding=True,
        has_window=True, window_pattern=6, plain_window=True, window_base=10000.0, sees_all=True,
    ),
    "olmoe": Family("neox", wide_qk_norm=True, experts=ExpertsOfFamily(normalises=False)),
}  # fmt: skip
