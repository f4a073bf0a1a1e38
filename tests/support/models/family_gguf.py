"""Writes a transformers model as an F32 GGUF file, sound or with a fault; knows no random numbers.

The GGUF layout (tensor names, row order, shifted norms, metadata) follows llama.cpp's conversion
scripts (`conversion/*.py`) and loaders (`src/models/*.cpp`), so that llama.cpp reads the files too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from models.delta_gguf import as_converted_delta, is_of_delta_net
from models.family_table import VOCAB_SIZE, Family
from models.head_norms_gguf import with_joined_norms
from models.latent_gguf import as_converted_latent
from models.space_gguf import as_converted_space, is_of_space, with_falcon_factors


@dataclass(frozen=True)
class Fault:
    """What `write_gguf` gets wrong on purpose; the default is a sound file."""

    rope_base_factor: float = 1.0
    epsilon_factor: float = 1.0
    swapped_rows: bool = False
    #: Replaces entries of `Family.metadata`; keys that the family lacks do nothing.
    metadata: Mapping[str, int | float | str | bool | list[int] | list[bool]] = field(
        default_factory=dict
    )


SOUND = Fault()
#: Architectures whose files say how much of a head is turned.
_ROPE_DIMENSIONS = (
    "llama", "phi3", "glm4", "granite", "granitemoe", "glm4moe", "smollm3", "stablelm", "nemotron",
    "phi2", "qwen35", "qwen35moe", "qwen3next",
)  # fmt: skip


def write_gguf(family: Family, hf_model: Any, path: Path, fault: Fault = SOUND) -> None:
    """Write `hf_model` as an F32 GGUF file in llama.cpp's layout, with `fault` if one is asked."""
    writer = gguf.GGUFWriter(path, family.arch)
    _add_metadata(writer, family, hf_model.config, fault)
    add_vocabulary(writer, family.vocabulary, family.pre)
    for name, values in _rope_tensors(family, hf_model).items():
        writer.add_tensor(name, values)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    names = gguf.get_tensor_name_map(arch, hf_model.config.num_hidden_layers)
    for name, tensor in with_joined_norms(hf_model.state_dict()).items():
        if name == "lm_head.weight" and hf_model.config.tie_word_embeddings:
            continue
        values = np.asarray(tensor.numpy(), dtype=np.float32)
        for part, rows in _parts(family, hf_model.config, name, values).items():
            is_final = part.startswith("blk.")
            gguf_name = part if is_final else names.get_name(part, (".weight", ".bias"))
            if gguf_name is None:
                raise ValueError(f"{family.arch}: GGUF has no name for {part}")
            in_layout = _in_gguf_layout(family, hf_model.config, name, rows, fault)
            writer.add_tensor(gguf_name, in_layout)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: Any, vocabulary: str, pre: str) -> None:
    """Write a vocabulary of VOCAB_SIZE tokens, of bytes and few more: gpt2 or llama."""
    _ADD_VOCABULARY[vocabulary](writer, pre)


def head_dim_of(config: Any) -> int:
    """Elements of one attention head; configurations leave it out when it follows from the rest."""
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)


def interleave_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder each head's rows from (first half, second half) to neighbouring pairs.

    `rows` is [num_heads * head_dim, ...]. Turns transformers' rotation into the one of ggml's
    NORM rope: row 2i is the old row i, row 2i + 1 the old row head_dim / 2 + i.
    """
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _parts(family: Family, config: Any, name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    if is_of_delta_net(name):
        return as_converted_delta(family.arch, config, name, values)
    if is_of_space(name):
        return as_converted_space(config, name, values)
    if family.arch == "falcon-h1":
        values = np.float32(1) * with_falcon_factors(config, name, values).astype(np.float32)
    if family.arch == "deepseek2" and ".self_attn." in name:
        return as_converted_latent(family.metadata, config, name, values)
    if family.arch == "granitehybrid" and not config.num_local_experts:
        return _as_converted_dense_granite(name, values)
    return _AS_CONVERTED.get(family.arch, _as_converted)(name, values)


def _as_converted(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor under the names that converters know; transformers joins what files keep apart."""
    layer, _, own = name.partition(".mlp.")
    if not own:
        layer, _, own = name.partition(".block_sparse_moe.")
    mlp, shared = f"{layer}.mlp.", f"{name.partition('.shared_mlp.')[0]}.mlp.shared_experts."
    if own == "experts.gate_up_proj":
        gate, up = np.split(values, 2, axis=1)  # [num_experts, width, columns] each
        parts = {f"{mlp}experts.gate_proj.weight": gate, f"{mlp}experts.up_proj.weight": up}
    elif name.endswith(".shared_mlp.input_linear.weight"):
        gate, up = np.split(values, 2)
        parts = {f"{shared}gate_proj.weight": gate, f"{shared}up_proj.weight": up}
    else:
        parts = {
            {
                "experts.down_proj": f"{mlp}experts.down_proj.weight",
                "router.weight": f"{layer}.block_sparse_moe.router.layer.weight",
                "gate.e_score_correction_bias": f"{mlp}gate.e_score_correction.bias",
                "shared_expert_gate.weight": f"{mlp}shared_expert_gate.weight",
            }.get(own, name): values[0] if own == "shared_expert_gate.weight" else values
        }
    return {part: np.ascontiguousarray(rows) for part, rows in parts.items()}


def _as_converted_gpt_oss(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """The same: rows of gate and up lie by turns there, and stacks of experts are turned."""
    if name.endswith(".sinks"):
        return {f"{name}.weight": values}
    stem, _, own = name.partition("experts.")
    if not own:
        return {name: values}
    kind = "bias" if own.endswith("_bias") else "weight"
    rows = values if kind == "bias" else values.swapaxes(1, 2)
    experts = f"{stem}experts."
    if own.startswith("gate_up_proj"):
        parts = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
    else:
        parts = {"down_proj": rows}
    return {f"{experts}{part}.{kind}": np.ascontiguousarray(x) for part, x in parts.items()}


def _as_converted_gemma4(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """The same: what layers and experts are scaled by has names of its own."""
    prefix, _, own = name.rpartition(".")
    layer = prefix.removeprefix("model.layers.").partition(".")[0]
    if own == "layer_scalar" or prefix.endswith(".experts"):
        return {f"{name}.weight": values}
    if own == "per_expert_scale":
        return {f"blk.{layer}.ffn_down_exps.scale": values}
    if prefix.endswith(".router") and own == "scale":
        return {f"blk.{layer}.ffn_gate_inp.scale": values}
    return {name: values}


def _as_converted_dense_granite(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """The same of a hybrid without experts, whose shared expert is a feed-forward."""
    stem, _, own = name.partition(".shared_mlp.")
    if own == "input_linear.weight":
        gate, up = np.split(values, 2)
        parts = {f"{stem}.mlp.gate_proj.weight": gate, f"{stem}.mlp.up_proj.weight": up}
        return {part: np.ascontiguousarray(rows) for part, rows in parts.items()}
    return {f"{stem}.mlp.down_proj.weight" if own == "output_linear.weight" else name: values}


def _as_converted_lfm2(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """The same: experts come joined, and a convolution has an axis for nothing."""
    stem, _, own = name.partition(".feed_forward.")
    experts = f"blk.{stem.removeprefix('model.layers.')}.ffn_"
    if own == "experts.gate_up_proj":
        gate, up = (np.ascontiguousarray(half) for half in np.split(values, 2, axis=1))
        return {f"{experts}gate_exps.weight": gate, f"{experts}up_exps.weight": up}
    if own == "experts.down_proj":
        return {f"{experts}down_exps.weight": values}
    if own == "expert_bias":
        return {f"{name}.bias": values}
    return {name: values[:, 0] if name.endswith(".conv.conv.weight") else values}


_AS_CONVERTED = {
    "lfm2": _as_converted_lfm2,
    "lfm2moe": _as_converted_lfm2,
    "gpt-oss": _as_converted_gpt_oss,
    "gemma4": _as_converted_gemma4,
}


def _add_metadata(writer: Any, family: Family, config: Any, fault: Fault) -> None:
    writer.add_name("random model")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    if family.arch == "mamba2":
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon * fault.epsilon_factor)
    else:
        _add_attention(writer, family, config, fault)
    for key, sound in family.metadata.items():
        value = fault.metadata.get(key, sound)
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](f"{family.arch}.{key}", value)


def _add_attention(writer: Any, family: Family, config: Any, fault: Fault) -> None:
    head_dim = head_dim_of(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    for key, value in {
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count_kv": config.num_key_value_heads,
    }.items():
        if value is not None and key not in family.metadata:
            writer.add_uint32(f"{family.arch}.{key}", value)
    if (epsilon := getattr(config, "rms_norm_eps", None)) is not None:
        writer.add_layer_norm_rms_eps(epsilon * fault.epsilon_factor)
    for name in ("layer_norm_eps", "norm_eps", "norm_epsilon"):
        if (epsilon := getattr(config, name, None)) is not None:
            writer.add_layer_norm_eps(epsilon * fault.epsilon_factor)
    is_named = "attention.key_length" in family.metadata
    if head_dim * config.num_attention_heads != config.hidden_size and not is_named:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(
            rope["sliding_attention"]["rope_theta"] * fault.rope_base_factor
        )
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"] * fault.rope_base_factor)
    if family.arch in _ROPE_DIMENSIONS:
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if family.arch == "llama":
        writer.add_vocab_size(config.vocab_size)


def _rope_tensors(family: Family, hf_model: Any) -> dict[str, np.ndarray]:
    """The frequency divisors that GGUF keeps as tensors, [rotated dimensions / 2] each."""
    rope = getattr(hf_model.config, "rope_parameters", {})
    if family.arch == "gemma4":
        # Pairs that a head does not turn are divided by so much that they hardly turn.
        head_dim = family.metadata["attention.key_length"]
        assert isinstance(head_dim, int)
        num_turned = int(head_dim * rope["full_attention"]["partial_rotary_factor"] / 2)
        divisors = np.where(np.arange(head_dim // 2) < num_turned, 1.0, 1e30)
        return {"rope_freqs.weight": divisors.astype(np.float32)}
    if rope.get("rope_type") == "llama3":
        head_dim = head_dim_of(hf_model.config)
        plain = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
        divisors = plain / hf_model.model.rotary_emb.inv_freq.double().numpy()
        return {"rope_freqs.weight": divisors.astype(np.float32)}
    if rope.get("rope_type") == "longrope":
        return {
            "rope_factors_long.weight": np.array(rope["long_factor"], dtype=np.float32),
            "rope_factors_short.weight": np.array(rope["short_factor"], dtype=np.float32),
        }
    return {}


def _in_gguf_layout(
    family: Family, config: Any, name: str, values: np.ndarray, fault: Fault
) -> np.ndarray:
    if family.shifted_norms and name.endswith("norm.weight") and not is_of_delta_net(name):
        return values + np.float32(1.0)
    if family.permuted_rows == fault.swapped_rows:
        return values
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    if ".q_proj." in name:
        return interleave_halves(values, num_heads)
    if ".k_proj." in name:
        return interleave_halves(values, num_kv_heads)
    if ".qkv_proj." in name:
        head_dim = head_dim_of(config)
        ends = [num_heads * head_dim, (num_heads + num_kv_heads) * head_dim]
        q, k, v = np.split(values, ends)
        return np.concatenate(
            [interleave_halves(q, num_heads), interleave_halves(k, num_kv_heads), v]
        )
    return values


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte value (openai/gpt-2 `bytes_to_unicode`)."""
    own = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]


def _add_gpt2(writer: Any, pre: str) -> None:
    alphabet = _byte_alphabet()
    space = alphabet[ord(" ")]
    merges = [("t", "h"), ("th", "e"), (space, "the"), ("i", "n"), (space, "s"), ("e", "r")]
    specials = ["<|unk|>", "<|bos|>", "<|eos|>"]
    tokens = specials + alphabet + [left + right for left, right in merges]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    tokens, types = _padded(tokens, types)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    _add_specials(writer)


def _add_sentencepiece(writer: Any, pre: str) -> None:
    del pre  # SentencePiece vocabularies have no pre-tokenizer.
    pieces = ["▁", *"etaoinshrdlucmfw", "th", "the", "▁the", "in", "er", "▁s"]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    types = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2
    types += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(pieces)
    tokens, types = _padded(tokens, types)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(id) for id in range(len(tokens))])
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    _add_specials(writer)


def _add_specials(writer: Any) -> None:
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _padded(tokens: list[str], types: list[int]) -> tuple[list[str], list[int]]:
    unused = [f"[PAD{id}]" for id in range(len(tokens), VOCAB_SIZE)]
    return tokens + unused, types + [gguf.TokenType.UNUSED] * len(unused)


_ADD_VOCABULARY = {"gpt2": _add_gpt2, "llama": _add_sentencepiece}
