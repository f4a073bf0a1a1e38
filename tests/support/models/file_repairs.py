"""What llama.cpp puts right when it loads a file, as facts: which keys a file may lack or call
otherwise, and what that means. No behaviour.

Gathered from the sources of llama.cpp that llama-cpp-python 0.3.36 carries; each row names its own.
What concerns tensors and vocabularies is in `tests/model/test_file_repairs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Metadata of a tiny file, without the architecture's prefix.
Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Repair:
    """A file of `arch` with keys `found` means what one with `meant` does; both have `base`.

    `source` is a file of llama.cpp.
    """

    arch: str
    found: Keys
    meant: Keys
    source: str
    base: Keys = field(default_factory=dict)
    num_layers: int = 1

    @property
    def label(self) -> str:
        keys = [f"{key}={value}" for key, value in self.found.items()] or ["no"]
        return f"{self.arch} {' '.join(keys)} is {' '.join(self.meant) or 'none'}"


_MODEL, _HPARAMS = "src/llama-model.cpp", "src/llama-hparams.h"
_MOE = {"expert_count": 4, "expert_used_count": 2, "feed_forward_length": 32}
_LATENT = {
    "attention.kv_lora_rank": 8,
    "attention.key_length": 12,
    "attention.value_length": 8,
    "attention.head_count_kv": 2,
    "rope.dimension_count": 4,
    "expert_feed_forward_length": 8,
    "expert_shared_count": 1,
    **_MOE,
}
_STATES = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 4,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 16,
}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.dimension_count": 10}
_GEMMA4 = {
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True],
    "attention.key_length": 10,
    "attention.value_length": 10,
    "attention.key_length_swa": 10,
    "attention.value_length_swa": 10,
}
_SHARED = ("qwen2moe", "qwen3next", "qwen35moe")

REPAIRS: tuple[Repair, ...] = (
    Repair("llama", {"rope.scale_linear": 4.0},
           {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, _MODEL),
    Repair("llama", {"rope.scaling.factor": 4.0},
           {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, _MODEL),
    Repair("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0},
           {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, _MODEL),
    Repair("llama", {"rope.scaling.type": "linear"},
           {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, _MODEL),
    Repair("llama", {}, {"rope.freq_base": 10000.0}, _MODEL),
    Repair("llama", {}, {"rope.dimension_count": 10}, _MODEL),
    Repair("llama", {}, {"attention.key_length": 10, "attention.value_length": 10}, _MODEL),
    Repair("llama", {"attention.head_count_kv": None}, {"attention.head_count_kv": 2}, _MODEL),
    Repair("llama", {}, {"nextn_predict_layers": 0}, _MODEL),
    Repair("llama", {}, {"expert_count": 0}, _MODEL),
    Repair("llama", {}, {"rope.scaling.original_context_length": 64}, _MODEL, _YARN),
    Repair("llama", {}, {"rope.scaling.yarn_beta_fast": 32.0}, _HPARAMS, _YARN),
    Repair("llama", {}, {"rope.scaling.yarn_beta_slow": 1.0}, _HPARAMS, _YARN),
    Repair("mistral3", {}, {"attention.temperature_scale": 0.0}, "src/models/mistral3.cpp"),
    Repair("mistral3", {}, {"rope.scaling.yarn_log_multiplier": 0.0}, "src/models/mistral3.cpp",
           _YARN),
    Repair("gemma2", {}, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
           _HPARAMS),
    Repair("gemma2", {}, {"attention.sliding_window": 4096}, "src/models/gemma2.cpp"),
    Repair("gemma3", {}, {"final_logit_softcapping": 0.0}, "src/models/gemma3.cpp"),
    Repair("gemma3", {}, {"attention.sliding_window": 0}, "src/models/gemma3.cpp"),
    Repair("gemma3", {}, {"rope.freq_base_swa": 10000.0}, _HPARAMS,
           {"attention.sliding_window": 8, "rope.freq_base": 1e6}),
    Repair("gemma4", {}, {"final_logit_softcapping": 0.0}, "src/models/gemma4.cpp", _GEMMA4),
    Repair("gemma4", {}, {"attention.shared_kv_layers": 0}, "src/models/gemma4.cpp", _GEMMA4),
    Repair("gemma4", {}, {"rope.freq_base_swa": 10000.0}, _HPARAMS,
           {**_GEMMA4, "rope.freq_base": 1e6}),
    Repair("gemma4", {}, {"rope.dimension_count_swa": 10}, _MODEL, _GEMMA4),
    Repair("olmo2", {}, {"attention.sliding_window": 0}, "src/models/olmo2.cpp"),
    Repair("olmo2", {}, {"rope.freq_base_swa": 5e5}, "src/models/olmo2.cpp",
           {"attention.sliding_window": 8, "rope.freq_base": 5e5}),
    Repair("phi3", {}, {"attention.sliding_window": 0}, "src/models/phi3.cpp"),
    Repair("exaone4", {}, {"attention.sliding_window": 4096}, "src/models/exaone4.cpp",
           num_layers=64),
    Repair("exaone4", {}, {"attention.sliding_window": 0}, "src/models/exaone4.cpp",
           num_layers=30),
    *(Repair(arch, {}, {"expert_feed_forward_length": 16}, f"src/models/{arch}.cpp",
             {**_MOE, **(_STATES if arch not in ("qwen2moe", "qwen3moe") else {})}, 4)
      for arch in ("qwen2moe", "qwen3moe", "qwen3next", "qwen35moe")),
    *(Repair(arch, {}, {"expert_shared_feed_forward_length": 32}, f"src/models/{arch}.cpp",
             {**_MOE, **(_STATES if arch != "qwen2moe" else {})}, 4)
      for arch in _SHARED),
    *(Repair(arch, {}, {"full_attention_interval": 4}, f"src/models/{arch}.cpp",
             {**_MOE, **_STATES}, 8)
      for arch in ("qwen3next", "qwen35moe")),
    Repair("qwen35", {}, {"full_attention_interval": 4}, "src/models/qwen35.cpp", _STATES, 8),
    Repair("glm4moe", {}, {"expert_gating_func": 2}, "src/models/glm4-moe.cpp", _MOE),
    Repair("glm4moe", {}, {"expert_weights_norm": False}, _HPARAMS, _MOE),
    Repair("glm4moe", {}, {"leading_dense_block_count": 0}, _HPARAMS, _MOE),
    *(Repair("deepseek2", {}, {key: value}, source, _LATENT)
      for key, value, source in (
          ("expert_gating_func", 1, "src/models/deepseek2.cpp"),
          ("expert_weights_norm", False, _HPARAMS),
          ("expert_weights_scale", 1.0, "src/llama-graph.cpp"),
          ("leading_dense_block_count", 0, _HPARAMS),
          ("expert_group_count", 1, _HPARAMS),
          ("rope.scaling.yarn_log_multiplier", 0.0, _HPARAMS),
          ("attention.q_lora_rank", 0, _HPARAMS),
      )),
    Repair("deepseek2", {"expert_weights_scale": 0.0}, {"expert_weights_scale": 1.0},
           "src/llama-graph.cpp", _LATENT),
    *(Repair("granite", {key: 0.0}, {key: 1.0}, "src/models/granite.cpp")
      for key in ("embedding_scale", "residual_scale", "logit_scale")),
    *(Repair("granite", {}, {key: 1.0}, "src/models/granite.cpp")
      for key in ("embedding_scale", "residual_scale", "logit_scale")),
    Repair("granite", {}, {"attention.scale": 0.0}, "src/models/granite.cpp"),
    Repair("granite", {}, {"rope.scaling.finetuned": True}, "src/models/granite.cpp"),
    Repair("command-r", {}, {"logit_scale": 0.0}, "src/models/command-r.cpp"),
    Repair("hunyuan-dense", {"expert_count": 1}, {"expert_count": 0}, _MODEL),
    Repair("hunyuan-dense", {"rope.scaling.alpha": 16.0}, {"rope.freq_base": 320000.0},
           "src/models/hunyuan-vl.cpp"),
)  # fmt: skip
