"""Makes small random models that embed or score texts, in transformers and as F32 GGUF files in the
layout of llama.cpp's converter; runs none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

WIDTH, NUM_HEADS, NUM_LAYERS, INNER = 48, 4, 2, 88
NUM_POSITIONS = 64

_WORDS = ["the", "hello", "world", "king", "queen", "##ing", "##ly", "über", "uber", "cafe"]
_SIGNS = [*"abcdefghijklmnopqrstuvwxyz0123456789.,!?-'中国éß"]
#: As a file of transformers has it.
WORD_PIECES = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS, *_SIGNS, *(f"##{x}" for x in _SIGNS),
]  # fmt: skip
UNIGRAMS = [
    ("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0), ("▁the", -3.5),
    ("▁hello", -7.0), ("▁he", -6.0), ("llo", -6.5), ("▁world", -7.5), ("ing", -4.0),
    ("▁k", -5.0), ("s", -4.5), ("▁a", -3.9),
    *((sign, -8.0 - 0.01 * place) for place, sign in enumerate(_SIGNS) if sign != "s"),
]  # fmt: skip


@dataclass(frozen=True)
class Encoder:
    """How one is made: `model` is transformers' class, `tensors` renames what that has."""

    arch: str
    model: str
    config: dict[str, Any]
    tensors: dict[str, str]
    metadata: dict[str, Any] = field(default_factory=dict)
    is_unigram: bool = False
    #: Rows of positions that converters leave out.
    position_offset: int = 0
    change: Callable[[str, np.ndarray], np.ndarray] = lambda name, values: values


@dataclass(frozen=True)
class EncoderModel:
    path: Path
    hf_model: Any

    def rows(self, ids: list[int], first: int | None = None) -> np.ndarray:
        """What the last layer says of each token in float32, [num_tokens, width]."""
        given: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if first is not None:
            given["token_type_ids"] = torch.tensor([[0] * first + [1] * (len(ids) - first)])
        with torch.no_grad():
            rows: np.ndarray = self.hf_model(**given).last_hidden_state[0].numpy()
        return rows

    def scores(self, ids: list[int], first: int | None = None) -> np.ndarray:
        """The logits of a model that scores, [num_labels]."""
        given: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if first is not None:
            given["token_type_ids"] = torch.tensor([[0] * first + [1] * (len(ids) - first)])
        with torch.no_grad():
            logits: np.ndarray = self.hf_model(**given).logits[0].numpy()
        return logits


_BASE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": NUM_POSITIONS,
    "attn_implementation": "eager",
}
_BERT_TENSORS = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
    "classifier": "cls.output",
}
_NOMIC_TENSORS = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "embeddings.layer_norm": "token_embd_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
}
_DECODER_TENSORS = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
}


def _shifted(name: str, values: np.ndarray) -> np.ndarray:
    """Gemma's norms have 1 added in files."""
    return values + 1 if "norm" in name else values


ENCODERS = {
    "bert": Encoder("bert", "BertModel", _BASE, _BERT_TENSORS, {"pooling_type": 2}),
    "bert-scores": Encoder(
        "bert",
        "BertForSequenceClassification",
        {**_BASE, "num_labels": 1},
        {**_BERT_TENSORS, "pooler.dense": "cls"},
        {"pooling_type": 4},
    ),
    "xlm-roberta": Encoder(
        "bert",
        "XLMRobertaModel",
        {**_BASE, "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
         "max_position_embeddings": NUM_POSITIONS + 2},
        _BERT_TENSORS,
        {"pooling_type": 1, "attention.layer_norm_epsilon": 1e-5},
        is_unigram=True,
        position_offset=2,
    ),
    "xlm-roberta-scores": Encoder(
        "bert",
        "XLMRobertaForSequenceClassification",
        {**_BASE, "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
         "max_position_embeddings": NUM_POSITIONS + 2, "num_labels": 1},
        _BERT_TENSORS,
        {"pooling_type": 4, "attention.layer_norm_epsilon": 1e-5},
        is_unigram=True,
        position_offset=2,
    ),
    "nomic-bert": Encoder(
        "nomic-bert",
        "NomicBertModel",
        {**_BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        _NOMIC_TENSORS,
        {"pooling_type": 1, "rope.freq_base": 1000.0},
    ),
    "qwen3": Encoder(
        "qwen3",
        "Qwen3Model",
        {**_BASE, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        _DECODER_TENSORS,
        {"pooling_type": 3, "attention.head_count_kv": 2, "attention.key_length": 16,
         "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-6},
    ),
    "gemma-embedding": Encoder(
        "gemma-embedding",
        "Gemma3TextModel",
        {**_BASE, "num_hidden_layers": 7, "num_key_value_heads": 2, "head_dim": 16,
         "rms_norm_eps": 1e-6, "use_bidirectional_attention": True, "sliding_window": 2 * 48,
         "query_pre_attn_scalar": 16, "max_position_embeddings": NUM_POSITIONS},
        {**_DECODER_TENSORS, "post_attention_layernorm": "post_attention_norm",
         "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"},
        {"pooling_type": 1, "attention.head_count_kv": 2, "attention.key_length": 16,
         "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-6,
         "attention.sliding_window": 2 * 48, "rope.freq_base": 1000000.0},
        change=_shifted,
    ),
}  # fmt: skip


def make_encoder(name: str, folder: Path, **metadata: Any) -> EncoderModel:
    """The random model of that name, written to `folder`; equal calls give equal bytes.

    `metadata` adds or replaces keys of the file, without the architecture's prefix; None leaves one
    out. `dense` in it is no key but the shapes of a head's matrices.
    """
    kind, dense = ENCODERS[name], metadata.pop("dense", ())
    vocab_size = len(UNIGRAMS if kind.is_unigram else WORD_PIECES)
    config_class = getattr(transformers, kind.model).config_class
    config = config_class(**{**kind.config, "vocab_size": vocab_size})
    torch.manual_seed(sum(name.encode()))
    model = getattr(transformers, kind.model)(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms matter too
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    path = folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, kind.arch)
    _add_metadata(writer, kind, config, metadata)
    (add_unigrams if kind.is_unigram else add_word_pieces)(writer)
    for tensor, values in _tensors(kind, model):
        writer.add_tensor(tensor, np.ascontiguousarray(values, np.float32))
    random = np.random.default_rng(3)
    for place, shape in enumerate(dense, 2):
        matrix = random.standard_normal(shape) / shape[1] ** 0.5
        writer.add_tensor(f"dense_{place}.weight", matrix.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return EncoderModel(path, model)


def _add_metadata(writer: Any, kind: Encoder, config: Any, changed: dict[str, Any]) -> None:
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": NUM_POSITIONS,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": NUM_HEADS,
        "attention.layer_norm_epsilon": 1e-12,
        "attention.causal": kind.arch == "qwen3",
        **kind.metadata,
        **changed,
    }
    for key, value in keys.items():
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_array)(f"{kind.arch}.{key}", value)


def _tensors(kind: Encoder, model: Any) -> Iterator[tuple[str, np.ndarray]]:
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        own, _, end = name.rpartition(".")
        parts = own.split(".")
        layer = next((parts[i + 1] for i, x in enumerate(parts) if x in ("layer", "layers")), None)
        where = parts[parts.index(layer) + 1 :] if layer is not None else parts
        spelled = next((".".join(where[i:]) for i in range(len(where))
                        if ".".join(where[i:]) in kind.tensors), None)  # fmt: skip
        if spelled is None:
            if own.endswith(("pooler.dense", "embeddings")):
                continue
            raise ValueError(f"{name} has no place in the file")
        if spelled == "embeddings.position_embeddings":
            values = values[kind.position_offset :]
        prefix = "" if layer is None else f"blk.{layer}."
        yield f"{prefix}{kind.tensors[spelled]}.{end}", kind.change(spelled, values)


def add_word_pieces(writer: Any) -> None:
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [
            text if text.startswith("[") else text[2:] if text.startswith("##") else "▁" + text
            for text in WORD_PIECES
        ]
    )
    writer.add_token_types([3 if text.startswith("[") else 1 for text in WORD_PIECES])
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)


def add_unigrams(writer: Any) -> None:
    writer.add_tokenizer_model("t5")
    writer.add_token_list([text for text, _ in UNIGRAMS])
    writer.add_token_scores([score for _, score in UNIGRAMS])
    kinds = {"<s>": 3, "<pad>": 3, "</s>": 3, "<unk>": 2}
    writer.add_token_types([kinds.get(text, 1) for text, _ in UNIGRAMS])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
