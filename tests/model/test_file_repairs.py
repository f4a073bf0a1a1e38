"""What other programs put right when they load a file is put right here, or refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from models.families import engine_logits, make_family
from models.file_repairs import REPAIRS, Keys, Repair
from models.gguf_edit import Tensors, rewritten
from models.tiny_gguf import write_tiny

from hypocenter.base.errors import BadModelFile
from hypocenter.model.facts.architecture import Architecture, read_architecture
from hypocenter.model.facts.experts import read_experts
from hypocenter.model.facts.families import FAMILIES
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.tensors.footprint import needed_bytes
from hypocenter.model.tensors.tensor_reader import check_tensors
from hypocenter.model.text.vocabulary import read_vocabulary
from hypocenter.settings.config import EngineConfig


@pytest.mark.parametrize("repair", REPAIRS, ids=lambda repair: repair.label)
def test_keys_that_files_lack_or_call_otherwise(repair: Repair, tmp_path: Path) -> None:
    found = _read(repair, repair.found, tmp_path)
    assert found == _read(repair, repair.meant, tmp_path)
    try:
        other = _read(repair, _otherwise(repair.meant), tmp_path)
    except BadModelFile:
        return  # it is read, and contradicts others
    assert found != other, "the key means nothing"


def _otherwise(keys: Keys) -> Keys:
    """Those keys with other values."""
    others: dict[type, Callable[[Any], Any]] = {
        bool: lambda flag: not flag,
        int: lambda count: count + 2,
        float: lambda number: 1.5 * number + 0.25,
        str: lambda text: text,
    }
    return {key: others[type(value)](value) for key, value in keys.items()}


def _read(repair: Repair, keys: Keys, folder: Path) -> Architecture:
    metadata = {**repair.base, **keys}
    path = write_tiny(
        folder / "tiny.gguf", repair.arch, metadata=metadata, num_layers=repair.num_layers
    )
    with open_gguf(path) as file:
        return read_architecture(file)


@pytest.mark.parametrize(
    ("arch", "num_layers", "num_tokens", "scores"),
    [
        ("deepseek2", 47, 154_880, "sigmoid"),
        ("deepseek2", 48, 154_880, "sigmoid"),
        ("deepseek2", 46, 154_880, "softmax"),
        ("deepseek2", 47, 128_256, "softmax"),
        ("qwen3moe", 48, 154_880, "softmax"),
    ],
)
def test_glm_flash_is_known_by_its_layers_and_tokens(
    arch: str, num_layers: int, num_tokens: int, scores: str, tmp_path: Path
) -> None:
    """src/models/deepseek2.cpp: files of its first days do not say that scores are sigmoids."""
    metadata = {"expert_count": 4, "expert_used_count": 2, "vocab_size": num_tokens}
    assert _scores(arch, num_layers, write_tiny(tmp_path / "a", arch, metadata=metadata)) == scores
    said = {**metadata, "expert_gating_func": 1}
    assert _scores(arch, num_layers, write_tiny(tmp_path / "b", arch, metadata=said)) == "softmax"


def test_glm_flash_is_known_by_its_vocabulary_too(tmp_path: Path) -> None:
    metadata = {"expert_count": 4, "expert_used_count": 2}
    tokens = [str(index) for index in range(154_880)]
    path = write_tiny(tmp_path / "a", "deepseek2", metadata=metadata, tokens=tokens)
    assert _scores("deepseek2", 47, path) == "sigmoid"


def _scores(arch: str, num_layers: int, path: Path) -> str:
    with open_gguf(path) as file:
        found = read_experts(
            file, arch, FAMILIES[arch].experts, num_layers=num_layers, ffn_width=8, max_width=99
        )
    assert found is not None
    return found.choice.scores


def _with_leading_ones(tensors: Tensors) -> Tensors:
    return {name: values[(None,) * (4 - values.ndim)] for name, values in tensors.items()}


def _without_leading_ones(tensors: Tensors) -> Tensors:
    return {
        name: values.reshape([size for size in values.shape if size != 1] or [1])
        if values.shape[0] == 1
        else values
        for name, values in tensors.items()
    }


def _joined_qkv(tensors: Tensors) -> Tensors:
    return _joined(tensors, "blk.{}.attn_qkv.weight", [f"blk.{{}}.attn_{x}.weight" for x in "qkv"])


def _joined_experts(tensors: Tensors) -> Tensors:
    parts = [f"blk.{{}}.ffn_{part}_exps.weight" for part in ("gate", "up")]
    return _joined(tensors, "blk.{}.ffn_gate_up_exps.weight", parts)


def _joined(tensors: Tensors, whole: str, parts: list[str]) -> Tensors:
    """Of each layer that has all those parts, these one behind the other along their rows."""
    rest = dict(tensors)
    for layer in range(_NUM_LAYERS):
        names = [part.format(layer) for part in parts]
        if all(name in rest for name in names):
            rest[whole.format(layer)] = np.concatenate([rest.pop(name) for name in names], axis=-2)
    return rest


def _one_input(tensors: Tensors) -> Tensors:
    """As src/models/qwen3next.cpp reads it: of each head of keys its rows of q, k, v and gate."""
    rest = dict(tensors)
    num_heads, keys, values = 3, 48, 96  # of the family qwen3next
    for layer in range(_NUM_LAYERS):
        qkv = rest.pop(f"blk.{layer}.attn_qkv.weight", None)
        if qkv is None:
            continue
        parts = [*np.split(qkv, [keys, 2 * keys]), rest.pop(f"blk.{layer}.attn_gate.weight")]
        assert len(parts[2]) == len(parts[3]) == values
        by_head = [part.reshape(num_heads, -1, part.shape[-1]) for part in parts]
        rest[f"blk.{layer}.ssm_in.weight"] = np.concatenate(by_head, axis=1).reshape(
            -1, qkv.shape[-1]
        )
    return rest


_NUM_LAYERS = 8


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen2moe", _with_leading_ones),
        ("granitehybrid-moe", _without_leading_ones),
        ("mamba2", _without_leading_ones),
        ("qwen3moe-tied", _joined_experts),
        ("qwen3moe-tied", _joined_qkv),
        ("qwen3next", _one_input),
    ],
)
def test_tensors_that_files_hold_otherwise(
    family: str, change: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    """ggml has no rank: llama-quantize drops axes of 1, and converters keep some."""
    model = make_family(family, tmp_path)
    names: list[set[tuple[str, tuple[int, ...]]]] = []

    def changed(tensors: Tensors) -> Tensors:
        after = change(tensors)
        names.extend({(name, x.shape) for name, x in of.items()} for of in (tensors, after))
        return after

    path = rewritten(model.path, tmp_path / "other.gguf", changed)
    assert names[0] != names[1]
    with open_gguf(path) as file:
        arch = read_architecture(file)
        check_tensors(file, arch)
        needed = needed_bytes(file, arch, EngineConfig(), 64)
    with open_gguf(model.path) as file:
        weights = needed_bytes(file, arch, EngineConfig(), 64)["weights"]
    assert needed["weights"] == pytest.approx(weights, rel=0.1)
    ids = model.token_ids[:24]
    ours = engine_logits(path, ids, 64)
    assert np.array_equal(ours, engine_logits(model.path, ids, 64))


def test_experts_one_by_one_are_told(tmp_path: Path) -> None:
    """Converters wrote them so until April 2024; llama.cpp no longer reads them either."""
    tensors: dict[str, Any] = {"blk.0.ffn_gate_inp.weight": np.ones((4, 20))}
    tensors |= dict.fromkeys(f"blk.0.ffn_{part}.weight" for part in ("gate", "up", "down"))
    for part, shape in (("gate", (22, 20)), ("up", (22, 20)), ("down", (20, 22))):
        tensors |= {f"blk.0.ffn_{part}.{expert}.weight": np.ones(shape) for expert in range(4)}
    keys = {"expert_count": 4, "expert_used_count": 2}
    path = write_tiny(tmp_path / "old.gguf", metadata=keys, tensors=tensors)
    with open_gguf(path) as file, pytest.raises(BadModelFile, match="one by one there") as caught:
        check_tensors(file, read_architecture(file))
    assert "(blk.0.ffn_gate.0.weight)" in str(caught.value)
    assert str(caught.value).endswith("convert the model again")


@pytest.mark.parametrize(
    ("key", "role"),
    [("padding", None), ("mask", None), ("prefix", "fim_pre"), ("suffix", "fim_suf")],
)
def test_roles_of_tokens(
    key: str, role: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """src/llama-vocab.cpp passes ids outside over, and knows first names of infill tokens."""
    path = tmp_path / "words.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b"])
    writer.add_token_scores([0.0] * 5)
    writer.add_uint32(f"tokenizer.ggml.{key}_token_id", 5 if role is None else 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with open_gguf(path) as file:
        roles = read_vocabulary(file, "llama").roles
    assert roles == {"bos": 1, "eos": 2, "unknown": 0} | ({role: 3} if role else {})
    warned = f"words.gguf: tokenizer.ggml.{key}_token_id is 5, but there are 5 tokens"
    assert (warned in caplog.text) == (role is None)
