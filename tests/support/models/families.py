"""Makes a small random model of a family, in transformers and as GGUF, and runs it; no verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from hypocenter.engine.llm import LLM
from hypocenter.settings.config import EngineConfig
from models.delta_gguf import is_of_delta_net
from models.family_gguf import write_gguf
from models.family_table import FAMILIES, VOCAB_SIZE, Family

NUM_TOKENS = 512
#: Mean next-token entropy of every model on its text, in bits: sharp enough that a fault shows.
ENTROPY_BITS = 2.0
#: Standard deviation of the embedding rows. Its square lies near a hundred times `rms_norm_eps`,
#: so that a wrong epsilon changes the first norm visibly.
EMBEDDING_STD = 0.03
#: What transformers calls the matrices of which the results are added to the residual stream.
INTO_RESIDUAL = (
    "o_proj",
    "down_proj",
    "output_linear",
    "out_proj",
    "c_proj",
    "self_attn.dense",
    "fc2",
    "feed_forward.w2",
)


@dataclass(frozen=True)
class FamilyModel:
    """A model on disk and in transformers (float32, eager attention) with a text to run it on."""

    name: str
    family: Family
    path: Path
    hf_model: Any
    token_ids: list[int]

    @property
    def context_length(self) -> int:
        """Positions to open the file with."""
        return self.family.context_length


def make_family(name: str, folder: Path, seed: int = 0) -> FamilyModel:
    """The random model of family `name`, written to `folder`; equal seeds give equal bytes."""
    family = FAMILIES[name]
    hf_model, token_ids = random_model(name, family, seed)
    path = folder / f"{name}-{seed}.gguf"
    write_gguf(family, hf_model, path)
    return FamilyModel(name, family, path, hf_model, token_ids)


def random_model(name: str, family: Family, seed: int = 0) -> tuple[Any, list[int]]:
    """A transformers model of `family` in which every weight matters, and a text for it."""
    hf_model = new_model(family)
    generator = np.random.default_rng([seed, *name.encode()])
    token_ids = [int(id) for id in generator.integers(3, VOCAB_SIZE, NUM_TOKENS)]
    _randomise(family, hf_model, generator)
    _set_entropy(family, hf_model, token_ids[:128])
    return hf_model, token_ids


def new_model(family: Family) -> Any:
    """The transformers model of `family` with its own random weights."""
    config = getattr(transformers, _class_name(family, "Config"))(
        **family.config, attn_implementation="eager"
    )
    model = getattr(transformers, _class_name(family, "ForCausalLM"))(config).float().eval()
    # Layers may differ in sizes; what is common to most may be read all the same.
    model.config.allow_global_per_layer_attribute_access = True
    return model


def hf_logits(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Logits of every position in one pass, float32 [num_tokens, vocab_size]."""
    with _inference():
        logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return np.asarray(logits.float().numpy())


def engine_logits(
    path: Path,
    ids: Sequence[int],
    context_length: int,
    max_batch_tokens: int = 512,
    device: str = "cpu",
    tensor_parallel: int = 1,
) -> np.ndarray:
    """Logits of every position from hypocenter with an f32 cache, [num_tokens, vocab_size]."""
    config = EngineConfig(
        context_length=context_length,
        kv_dtype="f32",
        num_threads=1,
        device=device,
        max_batch_tokens=max_batch_tokens,
        tensor_parallel=tensor_parallel,
    )
    llm = LLM(path, config)
    try:
        return np.array(llm.logits(list(ids)))
    finally:
        llm.close()


@contextmanager
def _inference() -> Iterator[None]:
    """These models are too small to share out, and a second thread would wait by spinning."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)


def _class_name(family: Family, kind: str) -> str:
    if family.model_class in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") and kind == "Config":
        return f"{family.model_class}TextConfig"
    return family.model_class + kind


def _randomise(family: Family, hf_model: Any, generator: np.random.Generator) -> None:
    """Fill every parameter so that each one matters; see the comments for the scales."""
    for name, parameter in hf_model.named_parameters():
        shape = tuple(parameter.shape)
        noise = generator.standard_normal(shape)
        if "norm" in name and name.endswith("bias"):
            values = 0.2 * noise
        elif "norm" in name:
            values = generator.uniform(0.5, 1.5, shape)
            if any(branch in name for branch in family.branch_norms):
                # Keeps the branch near the size of the embedding.
                values = values * 0.15
            if family.arch == "gemma4" and "q_norm" in name:
                values = values * 0.4  # for nothing else scales its scores
            if family.shifted_norms and not is_of_delta_net(name):
                values = values - 1.0
        elif name.endswith(("down_proj_bias", *(f"{part}.bias" for part in INTO_RESIDUAL))):
            values = 0.03 * noise
        elif name.endswith("router.scale"):
            values = generator.uniform(0.5, 1.5, shape) * math.sqrt(shape[0])
        elif name.endswith("per_expert_scale"):
            values = generator.uniform(0.5, 1.5, shape)
        elif name.endswith("bias"):
            values = 0.5 * noise
        elif name.endswith("sinks"):
            values = 2.0 * noise
        elif family.arch == "gpt-oss" and ".experts." in name:
            # Some of what gates see is beyond their limit. Columns come before outputs here.
            values = (0.02 if "down" in name else 5.0) * noise / math.sqrt(shape[1])
        elif "embed_tokens_per_layer" in name:
            # It is multiplied by the root of a layer's columns, and added to a norm.
            values = noise / math.sqrt(hf_model.config.hidden_size_per_layer_input)
        elif "embed_tokens" in name:
            # Gemma multiplies the rows by sqrt(hidden size) when it reads them, Granite by a
            # number of its own.
            std = EMBEDDING_STD / (math.sqrt(shape[1]) if "Gemma" in family.model_class else 1.0)
            for factor in ("embedding_multiplier", "scale_emb"):
                std /= getattr(hf_model.config, factor, 1.0)
            values = std * noise * generator.uniform(0.4, 1.6, (shape[0], 1))
        elif name.endswith(("experts.down_proj", *(f"{part}.weight" for part in INTO_RESIDUAL))):
            values = 0.2 * noise / math.sqrt(shape[-1])
        else:
            # With unit inputs the attention scores then have a standard deviation near 2.
            values = 1.5 * noise / math.sqrt(shape[-1])
        parameter.data = torch.from_numpy(values.astype(np.float32))
    for name, buffer in hf_model.named_buffers():
        if name.endswith(
            ("e_score_correction_bias", "expert_bias")
        ):  # it decides which experts are taken
            buffer.copy_(torch.from_numpy(generator.uniform(-0.4, 0.4, buffer.shape)))
        elif name.endswith("layer_scalar"):
            buffer.copy_(torch.from_numpy(generator.uniform(0.5, 1.5, buffer.shape)))
    hf_model.tie_weights()


def _set_entropy(family: Family, hf_model: Any, token_ids: Sequence[int]) -> None:
    """Scale the last norm, and with it the logits, until the mean entropy is ENTROPY_BITS."""
    with _inference():
        hidden = hf_model.base_model(torch.tensor([list(token_ids)]), use_cache=False)[0]
        logits = hf_model.lm_head(hidden[0]).double()
        logits /= getattr(hf_model.config, "logits_scaling", 1.0)
        for factor in ("logit_scale", "lm_head_multiplier"):
            logits *= getattr(hf_model.config, factor, None) or 1.0
    cap = getattr(hf_model.config, "final_logit_softcapping", None)
    scale = 1e-3
    # A capped head grows flat again past its sharpest scale, so walk up to the first hit.
    for step in (1.3, 1.01):
        while (entropy := _entropy_bits(logits * scale, cap)) > ENTROPY_BITS:
            scale *= step
            if scale > 1e6:
                raise ValueError(f"{family.arch}: the entropy stays at {entropy:.2f} bits")
        scale = scale / step if step > 1.1 else scale
    shift = 1.0 if family.shifted_norms else 0.0
    last = hf_model.base_model
    names = ("final_layernorm", "embedding_norm", "norm_f", "norm")
    norm = next(getattr(last, name) for name in names if hasattr(last, name))
    norm.weight.data = (norm.weight.data + shift) * scale - shift
    for biased in (norm, hf_model.lm_head):
        if getattr(biased, "bias", None) is not None:
            biased.bias.data *= scale


def _entropy_bits(logits: torch.Tensor, cap: float | None) -> float:
    capped = torch.tanh(logits / cap) * cap if cap else logits
    log_probs = torch.log_softmax(capped, dim=-1)
    return float(-(log_probs.exp() * log_probs).sum(-1).mean()) / math.log(2)
