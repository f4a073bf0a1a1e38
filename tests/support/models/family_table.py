"""Facts of the families under test: transformers configuration and what GGUF adds; no behaviour."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

VOCAB_SIZE = 331
#: Shorter than every test text, so that sliding windows hide something.
WINDOW = 24


@dataclass(frozen=True)
class Family:
    """One architecture variant: the transformers class and configuration, and how GGUF holds it."""

    arch: str
    model_class: str
    config: Mapping[str, Any]
    vocabulary: str = "gpt2"
    pre: str = "llama-bpe"
    #: llama.cpp rotates neighbouring rows of llama's q and k, transformers rotates halves.
    permuted_rows: bool = False
    #: Gemma multiplies by (1 + weight); GGUF holds the sum.
    shifted_norms: bool = False
    #: Norms of what attention and feed-forward add to the residual stream.
    branch_norms: tuple[str, ...] = ()
    context_length: int = 2048
    metadata: Mapping[str, int | float | str | bool | list[int] | list[bool]] = field(
        default_factory=dict
    )
    #: False where llama.cpp knowingly computes something else than transformers, has no place for
    #: biases, or ends with an assertion at layers in an order that no published model has.
    llama_cpp_agrees: bool = True


_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
#: What is common to those that have layer norms, which each name the epsilon otherwise.
_LAYER_NORMS = {key: value for key, value in _BASE.items() if key != "rms_norm_eps"}
#: For the deep ones, which would take long otherwise.
_NARROW = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
_ROPE_10K = {"rope_type": "default", "rope_theta": 10000.0}


def _longrope(original: int) -> dict[str, Any]:
    num_pairs = 8
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": original,
        "factor": 2048 / original,
        "short_factor": [1.0 + 0.1 * pair for pair in range(num_pairs)],
        "long_factor": [1.0 + 0.9 * pair for pair in range(num_pairs)],
    }


def _phi3(original: int, context_length: int) -> Family:
    config = {
        **_BASE,
        "original_max_position_embeddings": original,
        "rope_parameters": _longrope(original),
        "sliding_window": None,
    }
    factor = math.sqrt(1 + math.log(2048 / original) / math.log(original))
    return Family(
        "phi3",
        "Phi3",
        config,
        vocabulary="llama",
        context_length=context_length,
        metadata={
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": factor,
            "attention.sliding_window": 0,
        },
    )


def _gemma2(
    num_layers: int,
    score_width: int,
    caps: tuple[float, float] | None = (3.0, 30.0),
    sizes: Mapping[str, int] | None = None,
) -> Family:
    """Scores are divided by sqrt(score_width) and capped, as the logits are.

    Files do not carry the width: it is the head size, but for 27B, known by its 46 layers, it is
    hidden size / heads (llama.cpp `src/models/gemma2.cpp`, gemma_pytorch `config.py`). The first
    files carried no caps (None) and meant Gemma 2's 50 and 30 (llama.cpp `src/llama-hparams.h`).
    """
    score_cap, logit_cap = caps or (50.0, 30.0)
    cap_keys = {"attn_logit_softcapping": score_cap, "final_logit_softcapping": logit_cap}
    config = {
        **_BASE,
        **(sizes or {}),
        "num_hidden_layers": num_layers,
        "head_dim": 24,
        "query_pre_attn_scalar": score_width,
        "sliding_window": WINDOW,
        **cap_keys,
        "tie_word_embeddings": True,
        "rope_parameters": _ROPE_10K,
    }
    return Family(
        "gemma2",
        "Gemma2",
        config,
        vocabulary="llama",
        shifted_norms=True,
        branch_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        metadata={"attention.sliding_window": WINDOW, **(cap_keys if caps else {})},
    )


def _gemma3(num_layers: int, score_width: int, sizes: Mapping[str, int] | None = None) -> Family:
    """As `_gemma2`; the 27B has 62 layers. Linear scaling holds for the global layers only."""
    config = {
        **_BASE,
        **(sizes or {}),
        "num_hidden_layers": num_layers,
        "head_dim": 24,
        "query_pre_attn_scalar": score_width,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": _ROPE_10K,
        },
    }
    return Family(
        "gemma3",
        "Gemma3",
        config,
        vocabulary="llama",
        shifted_norms=True,
        branch_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        metadata={
            "attention.sliding_window": WINDOW,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    )


#: What heads of layers with a window have, and those of the others, of which a part is turned.
_GEMMA4_ROPE: dict[str, Any] = {
    "sliding_attention": _ROPE_10K,
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}


def _gemma4(
    num_heads: int,
    kv_heads: tuple[int, int],
    head_dims: tuple[int, int],
    num_layers: int = 7,
    step: int = 6,
    num_shared: int = 0,
    **more: Any,
) -> Family:
    """Heads by those of layers with a window and of the others, which are every `step`-th and the
    last. The last `num_shared` read keys and values of others and are twice as wide."""
    local = [layer % step < step - 1 and layer < num_layers - 1 for layer in range(num_layers)]
    widths = [_BASE["intermediate_size"]] * (num_layers - num_shared)
    widths += [2 * _BASE["intermediate_size"]] * num_shared
    config = {
        **_BASE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": kv_heads[0],
        "num_global_key_value_heads": kv_heads[1],
        "head_dim": head_dims[0],
        "global_head_dim": head_dims[1],
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": num_shared > 0,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "sliding_window": WINDOW,
        "layer_types": [("full", "sliding")[is_local] + "_attention" for is_local in local],
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "rope_parameters": _GEMMA4_ROPE,
        **more,
    }
    return Family(
        "gemma4",
        "Gemma4",
        config,
        vocabulary="llama",
        branch_norms=(
            "post_attention_layernorm",
            "post_feedforward_layernorm",
            "post_per_layer_input_norm",
        ),
        metadata={
            "feed_forward_length": widths,
            "attention.head_count_kv": [kv_heads[not is_local] for is_local in local]
            if kv_heads[0] != kv_heads[1]
            else kv_heads[0],
            "attention.key_length": head_dims[1],
            "attention.value_length": head_dims[1],
            "attention.key_length_swa": head_dims[0],
            "attention.value_length_swa": head_dims[0],
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": local,
            "attention.shared_kv_layers": num_shared,
            "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            "rope.dimension_count": head_dims[1],
            "rope.dimension_count_swa": head_dims[0],
            "final_logit_softcapping": 30.0,
            **(_EXPERT_KEYS if "num_experts" in more else {}),
        },
    )


#: An odd number of experts and of choices; experts are no multiple of 16 wide.
_EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 7,
    "top_k_experts": 3,
    "moe_intermediate_size": 40,
}
_EXPERT_KEYS = {"expert_count": 7, "expert_used_count": 3, "expert_feed_forward_length": 40}


def _delta_net(
    arch: str,
    model_class: str,
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    layers: str,
    **config: Any,
) -> Family:
    """So many heads of keys and of values, columns of each, and a letter for each layer: s where it
    carries a state, a where it has attention."""
    (num_keys, num_values), (key_dim, value_dim) = heads, dims
    kinds = {"s": "linear_attention", "a": "full_attention"}
    turned = 0.5 if num_keys == 2 else 0.25
    rope: dict[str, Any] = {**_ROPE_10K, "partial_rotary_factor": turned}
    keys: dict[str, Any] = {
        "ssm.conv_kernel": 4,
        "ssm.state_size": key_dim,
        "ssm.group_count": num_keys,
        "ssm.time_step_rank": num_values,
        "ssm.inner_size": num_values * value_dim,
    }
    interval = layers.index("a") + 1
    if layers == ("s" * (interval - 1) + "a") * (len(layers) // interval):
        keys["full_attention_interval"] = interval
    else:
        keys["attention.recurrent_layers"] = [kind == "s" for kind in layers]
    if arch != "qwen3next":
        rope["mrope_section"] = [3, 3, 2]
        keys["rope.dimension_sections"] = [3, 3, 2, 0]
    base = dict(_BASE)
    if model_class != "Qwen3_5":
        base |= {**_EXPERTS, "shared_expert_intermediate_size": 56, "norm_topk_prob": True}
        keys |= {**_EXPERT_KEYS, "expert_shared_feed_forward_length": 56}
    return Family(
        arch,
        model_class,
        {
            **base,
            "head_dim": 32,
            "num_hidden_layers": len(layers),
            "layer_types": [kinds[kind] for kind in layers],
            "linear_num_key_heads": num_keys,
            "linear_num_value_heads": num_values,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": value_dim,
            "rope_parameters": rope,
            **config,
        },
        pre="qwen35" if arch != "qwen3next" else "qwen2",
        shifted_norms=True,
        metadata=keys,
        llama_cpp_agrees=key_dim == value_dim,
    )


def _lfm2(arch: str, model_class: str, layers: str, **config: Any) -> Family:
    """A letter for each layer: c where it is a convolution, a where it has attention."""
    kinds = {"c": "conv", "a": "full_attention"}
    keys: dict[str, Any] = {
        "shortconv.l_cache": 3,
        "attention.head_count_kv": [_BASE["num_key_value_heads"] * (x == "a") for x in layers],
    }
    base = {**_BASE, "norm_eps": _BASE["rms_norm_eps"], "rope_parameters": _ROPE_10K}
    if arch == "lfm2":
        base |= {"block_auto_adjust_ff_dim": False}
    else:
        base |= {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        keys |= {**_EXPERT_KEYS, "leading_dense_block_count": 1, "expert_gating_func": 2}
        base |= {"num_dense_layers": 1}
    types = [kinds[kind] for kind in layers]
    sizes = {"num_hidden_layers": len(layers), "layer_types": types}
    return Family(arch, model_class, {**base, **sizes, **config}, pre="lfm2", metadata=keys)


_GRANITE: dict[str, Any] = {
    **_BASE,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.11,
    "logits_scaling": 6.0,
    "rope_parameters": _ROPE_10K,
}
_GRANITE_KEYS = {
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention.scale": 0.11,
    "logit_scale": 6.0,
}


def _granite(*, is_tied: bool, has_biases: bool) -> Family:
    biases = {"attention_bias": has_biases, "mlp_bias": has_biases}
    config = {**_GRANITE, "tie_word_embeddings": is_tied, **biases}
    return Family(
        "granite", "Granite", config, pre="refact", permuted_rows=True, metadata=_GRANITE_KEYS
    )


def _granitemoe(model_class: str, shared: Mapping[str, int]) -> Family:
    config = {
        **_GRANITE,
        **shared,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
    }
    keys: dict[str, int | float] = {"expert_count": 7, "expert_used_count": 3, **_GRANITE_KEYS}
    if shared:
        keys["expert_shared_feed_forward_length"] = shared["shared_intermediate_size"]
    return Family(
        "granitemoe", model_class, config, pre="refact", permuted_rows=True, metadata=keys
    )


def _granitehybrid(layers: str, num_experts: int, *, num_groups: int, is_tied: bool) -> Family:
    """Layers by their letters: a for attention, s for a state space."""
    types = {"a": "attention", "s": "linear_attention"}
    config = {
        **_GRANITE,
        "num_hidden_layers": len(layers),
        "layer_types": [types[layer] for layer in layers],
        "mamba_n_heads": 6,
        "mamba_d_head": 32,
        "mamba_n_groups": num_groups,
        "mamba_d_state": 24,
        "num_local_experts": num_experts,
        "num_experts_per_tok": 3 if num_experts else 0,
        "shared_intermediate_size": 56 if num_experts else 176,
        "tie_word_embeddings": is_tied,
    }
    keys: dict[str, Any] = {
        **_GRANITE_KEYS,
        "attention.head_count_kv": [2 if layer == "a" else 0 for layer in layers],
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 192,
        "ssm.state_size": 24,
        "ssm.time_step_rank": 6,
        "ssm.group_count": num_groups,
    }
    if num_experts:
        keys |= {"expert_count": num_experts, "expert_used_count": 3}
        keys["expert_shared_feed_forward_length"] = 56
    return Family(
        "granitehybrid", "GraniteMoeHybrid", config, pre="refact", permuted_rows=True, metadata=keys
    )


def _mamba2(*, is_tied: bool) -> Family:
    """Of one group: transformers norms all groups as one, and llama.cpp each by itself."""
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "layer_norm_epsilon": 1e-5,
        "num_heads": 6,
        "head_dim": 32,
        "n_groups": 1,
        "state_size": 24,
        "tie_word_embeddings": is_tied,
    }
    keys = {
        "context_length": 1 << 20,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 192,
        "ssm.state_size": 24,
        "ssm.time_step_rank": 6,
        "ssm.group_count": 1,
    }
    return Family("mamba2", "Mamba2", config, metadata=keys)


def _falcon_h1(*, num_groups: int, is_tied: bool, has_norm: bool) -> Family:
    """With a number of its own for each factor that converters fold into weights."""
    factors = {
        "mlp_multipliers": [0.7, 0.4],
        "key_multiplier": 0.5,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_multipliers": [0.6, 1.1, 0.7, 0.9, 0.8],
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.5,
    }
    if not is_tied:  # one table cannot have two factors
        factors |= {"lm_head_multiplier": 0.3, "embedding_multiplier": 5.0}
    config = {
        **_BASE,
        **factors,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "rope_parameters": _ROPE_10K,
        "mamba_d_ssm": 120,
        "mamba_n_heads": 6,
        "mamba_d_head": 20,
        "mamba_n_groups": num_groups,
        "mamba_d_state": 24,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": has_norm,
        "tie_word_embeddings": is_tied,
    }
    keys = {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 120,
        "ssm.state_size": 24,
        "ssm.time_step_rank": 6,
        "ssm.group_count": num_groups,
        "attention.key_length": 16,
        "attention.value_length": 16,
    }
    return Family("falcon-h1", "FalconH1", config, pre="falcon-h1", metadata=keys)


def _ministral3(*, is_tied: bool, multiplier: float) -> Family:
    """q grows from the 33rd position on; a multiplier of 1 takes back what yarn multiplies by."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": multiplier,
        "llama_4_scaling_beta": 0.1,
    }
    config = {
        **_BASE,
        "head_dim": 32,
        "tie_word_embeddings": is_tied,
        "sliding_window": None,
        "rope_parameters": rope,
    }
    keys: dict[str, float | str] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_log_multiplier": multiplier,
        "attention.temperature_scale": 0.1,
    }
    return Family("mistral3", "Ministral3", config, pre="tekken", permuted_rows=True, metadata=keys)


#: Norms of what is added, and none of what is read.
_NORMED_BRANCHES = ("post_attention_layernorm", "post_feedforward_layernorm")


def _olmo3(*, is_stretched: bool) -> Family:
    """Every fourth layer sees all, and alone has its positions stretched."""
    stretched: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    layer_types = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]
    config = {
        **_BASE,
        "num_hidden_layers": 5,
        "sliding_window": WINDOW,
        "layer_types": layer_types,
        "rope_parameters": {
            "full_attention": stretched if is_stretched else _ROPE_10K,
            "sliding_attention": _ROPE_10K,
        },
    }
    keys: dict[str, Any] = {
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": [kind == layer_types[0] for kind in layer_types],
    }
    if is_stretched:
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 512,
        }
    return Family(
        "olmo2", "Olmo3", config, pre="dbrx", branch_norms=_NORMED_BRANCHES, metadata=keys
    )


def _exaone4(num_layers: int, window: int | None, sizes: Mapping[str, int] | None = None) -> Family:
    """llama.cpp looks for a window where there are 64 layers, as the 32B has them."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"] if window else ["full_attention"]
    config = {
        **_BASE,
        **(sizes or {}),
        "num_hidden_layers": num_layers,
        "sliding_window": window,
        "layer_types": [kinds[layer % len(kinds)] for layer in range(num_layers)],
        "rope_parameters": _LLAMA3_ROPE,
    }
    return Family(
        "exaone4",
        "Exaone4",
        config,
        pre="exaone4",
        branch_norms=_NORMED_BRANCHES,
        metadata={"attention.sliding_window": window} if window else {},
    )


def _glm4moe(*, use_qk_norm: bool) -> Family:
    """The first of its layers is dense."""
    config = {
        **_BASE,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": True,
        "use_qk_norm": use_qk_norm,
        "attention_bias": True,
        "head_dim": 24,
        "rope_parameters": {**_ROPE_10K, "partial_rotary_factor": 0.5},
    }
    return Family(
        "glm4moe",
        "Glm4Moe",
        config,
        pre="glm4",
        metadata={
            **_EXPERT_KEYS,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.7,
            "expert_weights_norm": True,
        },
    )


#: Past 64 positions, which models of latents are stretched from; the score grows by mscale_all_dim.
_STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}


def _deepseek2(
    model_class: str,
    *,
    is_split: bool,
    dims: tuple[int, int, int, int] = (24, 8, 20, 12),
    query_rank: int | None = None,
    mscale: float = 0.0,
    beta_fast: float = 32.0,
    pre: str = "deepseek-llm",
    metadata: Mapping[str, Any] | None = None,
    **config: Any,
) -> Family:
    """`dims`: of a latent, of what is turned, and of heads; `is_split`: as files are today.

    Norms of latents have an epsilon of their own in transformers, which is that of the models.
    """
    rank, turned, plain, value = dims
    own = {"mscale": mscale, "mscale_all_dim": mscale, "beta_fast": beta_fast}
    rope = {**_STRETCHED, **own} if mscale else _ROPE_10K
    keys: dict[str, Any] = {
        **_EXPERT_KEYS,
        "expert_shared_count": 2,
        "leading_dense_block_count": 1,
        "expert_weights_scale": 1.7,
        "rope.dimension_count": turned,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turned if is_split else plain + turned,
        "attention.value_length": rank if is_split else value,
        **(metadata or {}),
    }
    if is_split:
        of_heads = {"key_length_mla": plain + turned, "value_length_mla": value, "head_count_kv": 1}
        keys |= {f"attention.{key}": number for key, number in of_heads.items()}
    if query_rank:
        keys["attention.q_lora_rank"] = query_rank
    if mscale:
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_log_multiplier": 0.1 * mscale,
            "rope.scaling.yarn_beta_fast": beta_fast,
        }
    experts = {
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
    }
    return Family(
        "deepseek2",
        model_class,
        {
            **_BASE,
            **experts,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-6,
            "kv_lora_rank": rank,
            "qk_rope_head_dim": turned,
            "qk_nope_head_dim": plain,
            "v_head_dim": value,
            "q_lora_rank": query_rank,
            "rope_parameters": rope,
            **config,
        },
        pre=pre,
        metadata=keys,
        # llama.cpp takes two of each group for the choice of groups, whatever the scores are, and
        # knows those whose queries come of no latent by their number of layers. What files say of
        # where yarn begins it does not read here: it takes 32.
        llama_cpp_agrees=model_class != "DeepseekV2" and beta_fast == 32,
    )


_MINICPM3_FACTORS = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 2048,
    "factor": 1.0,
    "short_factor": [1.0, 1.3, 1.7, 2.2],
    "long_factor": [1.0, 1.3, 1.7, 2.2],
}


def _minicpm3(rope: Mapping[str, Any]) -> Family:
    """Files say nothing of the scales, of the base, or of how long values are."""
    return Family(
        "minicpm3",
        "MiniCPM3",
        {
            **_BASE,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "kv_lora_rank": 24,
            "q_lora_rank": 28,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 20,
            "v_head_dim": 24,
            "tie_word_embeddings": True,
            "rope_parameters": rope,
        },
        vocabulary="llama",
        metadata={
            "rope.dimension_count": 8,
            "attention.kv_lora_rank": 24,
            "attention.q_lora_rank": 28,
            "attention.key_length": 28,
        },
    )


def _gpt_oss(*, is_stretched: bool, **config: Any) -> Family:
    """llama.cpp rounds the pairs between which yarn blends, which the model's own code does not."""
    stretched: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 256,
    }
    keys: dict[str, Any] = {**_EXPERT_KEYS, "attention.sliding_window": WINDOW}
    if is_stretched:
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 256,
        }
    return Family(
        "gpt-oss",
        "GptOss",
        {
            **_BASE,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "rope_parameters": stretched if is_stretched else _ROPE_10K,
            **config,
        },
        pre="gpt-4o",
        metadata=keys,
        llama_cpp_agrees=not is_stretched,
    )


FAMILIES: dict[str, Family] = {
    "deepseek2-lite": _deepseek2(
        "DeepseekV2", is_split=False, mscale=0.707, n_group=1, topk_group=1, topk_method="greedy"
    ),
    "deepseek2-v2": _deepseek2(
        "DeepseekV2",
        is_split=True,
        query_rank=28,
        mscale=1.0,
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        metadata={"expert_count": 12, "expert_group_count": 4, "expert_group_used_count": 2},
    ),
    "deepseek2-v3": _deepseek2(
        "DeepseekV3",
        is_split=True,
        dims=(40, 16, 24, 32),
        query_rank=36,
        mscale=1.0,
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        num_attention_heads=5,
        num_key_value_heads=5,
        hidden_size=120,
        metadata={
            "expert_count": 12,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
        },
    ),
    # GLM-4.7-Flash: values that are longer than what is not turned of keys, and one group.
    "deepseek2-glm": _deepseek2(
        "Glm4MoeLite",
        is_split=True,
        dims=(40, 8, 24, 32),
        query_rank=28,
        pre="glm4",
        n_shared_experts=1,
        norm_topk_prob=True,
        metadata={
            "expert_shared_count": 1,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
        },
    ),
    # Kimi K2: yarn that blends nothing, for one pair is both where it begins and where it ends.
    "deepseek2-kimi": _deepseek2(
        "DeepseekV3",
        is_split=True,
        dims=(32, 16, 32, 32),
        query_rank=36,
        mscale=1.0,
        beta_fast=1.0,
        pre="kimi-k2",
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.827,
        num_attention_heads=4,
        num_key_value_heads=4,
        metadata={
            "expert_shared_count": 1,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.827,
        },
    ),
    "minicpm3": _minicpm3(_ROPE_10K),
    # The published one has factors for its pairs, though it stretches nothing.
    "minicpm3-factors": _minicpm3(_MINICPM3_FACTORS),
    "gpt-oss": _gpt_oss(is_stretched=True),
    "gpt-oss-odd": _gpt_oss(
        is_stretched=False,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=24,
        num_hidden_layers=4,
    ),
    "llama": Family(
        "llama",
        "Llama",
        {**_BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        permuted_rows=True,
    ),
    "llama-tied": Family(
        "llama",
        "Llama",
        {**_BASE, "head_dim": 24, "tie_word_embeddings": True, "rope_parameters": _ROPE_10K},
        vocabulary="llama",
        permuted_rows=True,
    ),
    # Mistral's files are llama files; they carry no window, whatever the configuration says.
    "mistral": Family(
        "llama",
        "Mistral",
        {**_BASE, "head_dim": 32, "sliding_window": None, "rope_parameters": _ROPE_10K},
        vocabulary="llama",
        permuted_rows=True,
    ),
    "llama-rope-factors": Family(
        "llama",
        "Llama",
        {
            **_BASE,
            "head_dim": 32,
            "rope_parameters": _LLAMA3_ROPE,
        },
        permuted_rows=True,
    ),
    "llama-linear-rope": Family(
        "llama",
        "Llama",
        {
            **_BASE,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
        vocabulary="llama",
        permuted_rows=True,
        metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama-older-linear-rope": Family(
        "llama",
        "Llama",
        {
            **_BASE,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
        permuted_rows=True,
        # The key of the first files; it stands alone.
        metadata={"rope.scale_linear": 4.0},
    ),
    "llama-biased": Family(
        "llama",
        "Llama",
        {**_BASE, "attention_bias": True, "mlp_bias": True, "rope_parameters": _ROPE_10K},
        permuted_rows=True,
    ),
    # Mistral Small 3 has a name of its own, and nothing else; Ministral 3 has its q scaled.
    "mistral3": Family(
        "mistral3",
        "Mistral",
        {**_BASE, "head_dim": 32, "sliding_window": None, "rope_parameters": _ROPE_10K},
        pre="tekken",
        permuted_rows=True,
    ),
    "mistral3-scaled": _ministral3(is_tied=False, multiplier=1.0),
    "mistral3-scaled-tied": _ministral3(is_tied=True, multiplier=0.0),
    "qwen2": Family(
        "qwen2",
        "Qwen2",
        {**_BASE, "tie_word_embeddings": True, "rope_parameters": _ROPE_10K},
        pre="qwen2",
    ),
    "qwen2-yarn": Family(
        "qwen2",
        "Qwen2",
        {
            **_BASE,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
        pre="qwen2",
        metadata={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 512,
        },
    ),
    "qwen3": Family(
        "qwen3",
        "Qwen3",
        {**_BASE, "head_dim": 32, "rope_parameters": _ROPE_10K},
        pre="qwen2",
    ),
    "qwen3moe": Family(
        "qwen3moe",
        "Qwen3Moe",
        {**_BASE, **_EXPERTS, "head_dim": 32, "norm_topk_prob": True, "rope_parameters": _ROPE_10K},
        pre="qwen2",
        metadata=_EXPERT_KEYS,
    ),
    "qwen3moe-tied": Family(
        "qwen3moe",
        "Qwen3Moe",
        {
            **_BASE,
            **_EXPERTS,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "norm_topk_prob": True,
            "rope_parameters": _ROPE_10K,
        },
        pre="qwen2",
        metadata=_EXPERT_KEYS,
    ),
    "qwen2moe": Family(
        "qwen2moe",
        "Qwen2Moe",
        {
            **_BASE,
            **_EXPERTS,
            "shared_expert_intermediate_size": 56,
            "norm_topk_prob": False,
            "rope_parameters": _ROPE_10K,
        },
        pre="qwen2",
        metadata={**_EXPERT_KEYS, "expert_shared_feed_forward_length": 56},
    ),
    "qwen35": _delta_net("qwen35", "Qwen3_5", heads=(2, 6), dims=(16, 16), layers="ssas"),
    "qwen35-tied": _delta_net(
        "qwen35",
        "Qwen3_5",
        heads=(3, 3),
        dims=(20, 12),
        layers="sasa",
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    "qwen35moe": _delta_net("qwen35moe", "Qwen3_5Moe", heads=(2, 4), dims=(16, 16), layers="ssa"),
    "qwen3next": _delta_net("qwen3next", "Qwen3Next", heads=(3, 6), dims=(16, 16), layers="ssa"),
    "lfm2": _lfm2("lfm2", "Lfm2", "ccac", hidden_size=80, num_attention_heads=4),
    "lfm2-tied": _lfm2("lfm2", "Lfm2", "ac", tie_word_embeddings=True),
    "lfm2moe": _lfm2("lfm2moe", "Lfm2Moe", "cacc", tie_word_embeddings=True),
    "mixtral": Family(
        "llama",
        "Mixtral",
        {
            **_BASE,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "rope_parameters": _ROPE_10K,
        },
        vocabulary="llama",
        permuted_rows=True,
        metadata={"expert_count": 5, "expert_used_count": 2},
    ),
    "olmoe": Family(
        "olmoe",
        "Olmoe",
        {
            **_BASE,
            # llama.cpp takes a norm on k for one as wide as the model.
            "num_key_value_heads": 6,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "rope_parameters": _ROPE_10K,
        },
        pre="olmo",
        metadata={"expert_count": 7, "expert_used_count": 3},
    ),
    "granitehybrid": _granitehybrid("sas", 0, num_groups=2, is_tied=False),
    "granitehybrid-moe": _granitehybrid("ssa", 7, num_groups=1, is_tied=True),
    "mamba2": _mamba2(is_tied=False),
    "mamba2-tied": _mamba2(is_tied=True),
    "falcon-h1": _falcon_h1(num_groups=1, is_tied=False, has_norm=False),
    "falcon-h1-normed": _falcon_h1(num_groups=2, is_tied=True, has_norm=True),
    "granite": _granite(is_tied=True, has_biases=False),
    "granite-biased": _granite(is_tied=False, has_biases=True),
    # The fourth layer is not turned, so five show both kinds.
    "smollm3": Family(
        "smollm3",
        "SmolLM3",
        {
            **_BASE,
            "num_hidden_layers": 5,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE_10K,
        },
        pre="smaug-bpe",
        permuted_rows=True,
    ),
    "olmo2": Family(
        "olmo2",
        "Olmo2",
        {**_BASE, "rope_parameters": _ROPE_10K},
        pre="dbrx",
        branch_norms=_NORMED_BRANCHES,
    ),
    "olmo3": _olmo3(is_stretched=False),
    "olmo3-yarn": _olmo3(is_stretched=True),
    "exaone4": _exaone4(3, None),
    "exaone4-32b": _exaone4(64, WINDOW, _NARROW),
    # It turns neighbouring rows in transformers too.
    "ernie4_5": Family(
        "ernie4_5",
        "Ernie4_5",
        {**_BASE, "head_dim": 24, "tie_word_embeddings": True, "rope_parameters": _ROPE_10K},
        vocabulary="llama",
    ),
    "seed_oss": Family(
        "seed_oss",
        "SeedOss",
        {
            **_BASE,
            "head_dim": 24,
            "attention_bias": True,
            "attention_out_bias": False,
            "rope_parameters": _ROPE_10K,
        },
        pre="seed-coder",
    ),
    "hunyuan-dense": Family(
        "hunyuan-dense",
        "HunYuanDenseV1",
        {**_BASE, "head_dim": 24, "tie_word_embeddings": True, "rope_parameters": _ROPE_10K},
        pre="hunyuan-dense",
    ),
    "hunyuan-dense-biased": Family(
        "hunyuan-dense",
        "HunYuanDenseV1",
        {
            **_BASE,
            "head_dim": 32,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "rope_parameters": _ROPE_10K,
        },
        pre="hunyuan-dense",
        llama_cpp_agrees=False,
    ),
    "arcee": Family(
        "arcee",
        "Arcee",
        {**_BASE, "head_dim": 24, "rope_parameters": _ROPE_10K},
        permuted_rows=True,
    ),
    "arcee-tied": Family(
        "arcee",
        "Arcee",
        {
            **_BASE,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _ROPE_10K,
        },
        permuted_rows=True,
        llama_cpp_agrees=False,
    ),
    "starcoder2": Family(
        "starcoder2",
        "Starcoder2",
        {
            **_LAYER_NORMS,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
            "sliding_window": None,
            "rope_parameters": _ROPE_10K,
        },
        pre="starcoder",
    ),
    "starcoder2-untied": Family(
        "starcoder2",
        "Starcoder2",
        {
            **_LAYER_NORMS,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "sliding_window": None,
            "rope_parameters": _ROPE_10K,
        },
        pre="starcoder",
    ),
    # It turns neighbouring rows in transformers too.
    "command-r": Family(
        "command-r",
        "Cohere",
        {
            **_LAYER_NORMS,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE_10K,
        },
        pre="command-r",
        metadata={"logit_scale": 0.0625},
    ),
    "command-r-biased": Family(
        "command-r",
        "Cohere",
        {
            **_LAYER_NORMS,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "layer_norm_eps": 1e-5,
            "logit_scale": 2.0,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": _ROPE_10K,
        },
        pre="command-r",
        metadata={"logit_scale": 2.0},
        llama_cpp_agrees=False,
    ),
    # Command R+, which norms heads.
    "command-r-plus": Family(
        "command-r",
        "Cohere",
        {
            **_LAYER_NORMS,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.83,
            "use_qk_norm": True,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE_10K,
        },
        pre="command-r",
        metadata={"logit_scale": 0.83},
        # It looks for norms of heads from 64 layers on.
        llama_cpp_agrees=False,
    ),
    # StableLM 2 12B: it norms heads, and its feed-forward reads what attention does.
    "stablelm-12b": Family(
        "stablelm",
        "StableLm",
        {
            **_LAYER_NORMS,
            "layer_norm_eps": 1e-5,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "rope_parameters": {**_ROPE_10K, "partial_rotary_factor": 0.25},
        },
        pre="stablelm2",
    ),
    "stablelm": Family(
        "stablelm",
        "StableLm",
        {
            **_LAYER_NORMS,
            "layer_norm_eps": 1e-5,
            "use_qkv_bias": True,
            "rope_parameters": {**_ROPE_10K, "partial_rotary_factor": 0.25},
        },
        pre="stablelm2",
    ),
    "nemotron": Family(
        "nemotron",
        "Nemotron",
        {
            **_LAYER_NORMS,
            "norm_eps": 1e-5,
            "rope_parameters": {**_ROPE_10K, "partial_rotary_factor": 0.5},
        },
        vocabulary="llama",
        shifted_norms=True,
    ),
    "phi2": Family(
        "phi2",
        "Phi",
        {
            **_LAYER_NORMS,
            "num_key_value_heads": 6,
            "layer_norm_eps": 1e-5,
            "rope_parameters": {**_ROPE_10K, "partial_rotary_factor": 0.5},
        },
        pre="phi-2",
    ),
    "gemma": Family(
        "gemma",
        "Gemma",
        {**_BASE, "head_dim": 24, "tie_word_embeddings": True, "rope_parameters": _ROPE_10K},
        vocabulary="llama",
        shifted_norms=True,
    ),
    "granitemoe": _granitemoe("GraniteMoe", {}),
    "granitemoe-shared": _granitemoe("GraniteMoeShared", {"shared_intermediate_size": 56}),
    "glm4moe": _glm4moe(use_qk_norm=False),
    "glm4moe-qk-norm": _glm4moe(use_qk_norm=True),
    "gemma2": _gemma2(num_layers=3, score_width=24),
    "gemma2-without-cap-keys": _gemma2(num_layers=3, score_width=24, caps=None),
    "gemma2-27b": _gemma2(num_layers=46, score_width=16, sizes=_NARROW),
    # Files carry no pattern: every sixth layer is global, so seven show both kinds.
    "gemma3": _gemma3(num_layers=7, score_width=24),
    "gemma3-27b": _gemma3(num_layers=62, score_width=16, sizes=_NARROW),
    "gemma4": _gemma4(6, (2, 1), (24, 40), attention_k_eq_v=True),
    "gemma4-experts": _gemma4(
        6, (2, 1), (24, 40), num_layers=3, attention_k_eq_v=True, **_GEMMA4_EXPERTS
    ),
    "gemma4-e": replace(
        _gemma4(
            3, (1, 1), (20, 36), num_layers=6, step=2, num_shared=3, hidden_size_per_layer_input=24
        ),
        llama_cpp_agrees=False,
    ),
    "gemma4-e-whole": replace(
        _gemma4(
            6, (2, 2), (24, 40), num_layers=2, step=1, num_shared=1, hidden_size_per_layer_input=32
        ),
        llama_cpp_agrees=False,
    ),
    "gemma4-whole": replace(
        _gemma4(6, (2, 1), (24, 40), num_layers=1, attention_k_eq_v=True, **_GEMMA4_EXPERTS),
        llama_cpp_agrees=False,
    ),
    "gemma4-odd": _gemma4(3, (3, 3), (20, 36), attention_k_eq_v=False),
    "phi3": Family(
        "phi3",
        "Phi3",
        {**_BASE, "rope_parameters": _ROPE_10K, "sliding_window": None},
        vocabulary="llama",
        metadata={"attention.sliding_window": 0},
    ),
    # llama.cpp switches Phi-3's window off (src/models/phi3.cpp); transformers and we do not.
    "phi3-window": Family(
        "phi3",
        "Phi3",
        {**_BASE, "rope_parameters": _ROPE_10K, "sliding_window": WINDOW},
        vocabulary="llama",
        metadata={"attention.sliding_window": WINDOW},
        llama_cpp_agrees=False,
    ),
    "phi3-longrope-short": _phi3(original=512, context_length=512),
    "phi3-longrope-long": _phi3(original=32, context_length=2048),
    "glm4": Family(
        "glm4",
        "Glm4",
        {
            **_BASE,
            "head_dim": 24,
            "attention_bias": True,
            "rope_parameters": {**_ROPE_10K, "partial_rotary_factor": 0.5},
        },
        pre="glm4",
        branch_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
}
