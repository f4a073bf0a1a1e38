"""Facts of an architecture: metadata that would crash, or be computed wrongly, are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.families import FamilyModel, engine_logits, hf_logits, make_family
from models.family_table import FAMILIES, WINDOW
from models.tiny_gguf import write_tiny

from hypocenter.base.errors import BadModelFile, UnsupportedModel
from hypocenter.base.tensor import DType
from hypocenter.model.facts.architecture import Architecture, read_architecture
from hypocenter.model.facts.layer_shapes import LayerShape
from hypocenter.model.gguf.file import open_gguf


def read(folder: Path, name: str = "llama", **changes: Any) -> Architecture:
    with open_gguf(write_tiny(folder / "tiny.gguf", name, **changes)) as file:
        return read_architecture(file)


def refusal(folder: Path, name: str, **metadata: Any) -> BadModelFile:
    with pytest.raises(BadModelFile) as caught:
        read(folder, name, metadata={key.replace("__", "."): v for key, v in metadata.items()})
    return caught.value


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    arch = read(tmp_path)
    assert (len(arch.draft_layers), len(arch.layers), arch.layers[0].head_dim) == (0, 1, 10)
    assert arch.attn_scale == 1 / math.sqrt(10)
    assert arch.layers[0].window == 0


def test_draft_layers_are_taken_off_and_one_layer_stays(tmp_path: Path) -> None:
    arch = read(tmp_path, metadata={"block_count": 3, "nextn_predict_layers": 2})
    assert (arch.num_layers, len(arch.draft_layers)) == (1, 2)
    for num_drafts in (1, 16):
        error = refusal(tmp_path, "llama", nextn_predict_layers=num_drafts)
        assert error.field == "llama.nextn_predict_layers"
        assert "must be below llama.block_count, which is 1" in str(error)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(32, 0), (20, 1)])
def test_heads_that_leave_no_columns_are_refused(
    num_heads: int, head_dim: int, tmp_path: Path
) -> None:
    heads = {"attention__head_count": num_heads, "attention__head_count_kv": num_heads}
    error = refusal(tmp_path, "llama", **heads)
    assert error.field == "llama.attention.head_count"
    assert f"heads have 2 to 512 columns, and 20 / heads is {head_dim}" in str(error)


def test_heads_too_wide_by_default_are_refused(tmp_path: Path) -> None:
    table = {"token_embd.weight": np.ones((7, 1026))}
    metadata = {"embedding_length": 1026, "attention.head_count": 1}
    with pytest.raises(BadModelFile, match="heads have 2 to 512 columns, and 1026 / heads is 1026"):
        read(tmp_path, metadata=metadata, tensors=table)


def test_gemma_27b_whose_heads_outnumber_its_columns_is_refused(tmp_path: Path) -> None:
    sizes = {"attention__head_count": 32, "attention__key_length": 2, "attention__value_length": 2}
    error = refusal(tmp_path, "gemma2", block_count=46, **sizes)
    assert error.field == "gemma2.attention.head_count"
    assert "46 layers scale by embedding_length / heads, and that is 20" in str(error)


@pytest.mark.parametrize("count", [math.nan, math.inf, 2.7, 2.0])
def test_counts_per_layer_must_be_integers(count: float, tmp_path: Path) -> None:
    error = refusal(tmp_path, "llama", attention__head_count=[count])
    assert error.field == "llama.attention.head_count"
    assert "counts must be integers" in str(error)
    assert read(tmp_path, metadata={"attention.head_count": [2]}).num_heads == 2


#: Fine in the file's f64, but 0, subnormal or infinite in the f32 of the kernels.
BEYOND_F32 = (1e300, 3.5e38, 1e-300, 1e-39, -1.0)


@pytest.mark.parametrize("value", BEYOND_F32)
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama", "attention.layer_norm_rms_epsilon"),
        ("llama", "rope.freq_base"),
        ("llama", "rope.scaling.factor"),
        ("llama", "rope.scale_linear"),
        ("llama", "rope.scaling.attn_factor"),
        ("llama", "rope.scaling.yarn_beta_fast"),
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
        ("gemma3", "rope.freq_base_swa"),
    ],
)
def test_numbers_must_fit_f32(name: str, key: str, value: float, tmp_path: Path) -> None:
    error = refusal(tmp_path, name, **{key: value})
    assert error.field == f"{name}.{key}"
    assert "the range of f32" in str(error)


def test_the_ends_of_f32_are_taken(tmp_path: Path) -> None:
    ends = np.finfo(np.float32)
    for value in (float(ends.tiny), float(ends.max)):
        assert read(tmp_path, "gemma2", metadata={"final_logit_softcapping": value}).final_softcap


def test_longrope_needs_something_to_scale_by(tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 1}
    error = refusal(tmp_path, "phi3", **keys)
    assert error.field == "phi3.rope.scaling.original_context_length"
    assert "must be at least 2" in str(error)
    read(tmp_path, "phi3", metadata={**keys, "rope.scaling.attn_factor": 1.5})
    read(tmp_path, "phi3", metadata={**keys, "rope.scaling.original_context_length": 2})


@pytest.mark.parametrize("base", [1.0, 0.5])
def test_yarn_needs_a_base_above_one(base: float, tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.freq_base": base}
    assert refusal(tmp_path, "llama", **keys).field == "llama.rope.freq_base"
    read(tmp_path, metadata={"rope.freq_base": base})


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "glm4"])
def test_a_window_that_the_family_does_not_explain_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name}.attention.sliding_window is 8, but for"):
        read(tmp_path, name, metadata={"attention.sliding_window": 8})
    arch = read(tmp_path, name, metadata={"attention.sliding_window": 0})
    assert arch.layers[0].window == 0


def test_a_llama_file_with_a_window_in_some_layers_is_refused(tmp_path: Path) -> None:
    keys = {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2}
    with pytest.raises(UnsupportedModel, match=r"llama.attention.sliding_window_pattern is 2"):
        read(tmp_path, metadata=keys)


def test_which_layers_turn_queries_and_keys(tmp_path: Path) -> None:
    def turned(name: str, **keys: Any) -> str:
        arch = read(tmp_path, name, metadata={"block_count": 8, **keys})
        return "".join("x" if arch.is_rotated(layer) else "." for layer in range(8))

    assert turned("llama") == "xxxxxxxx"
    assert turned("llama", **{"rope.dimension_count": 0}) == "........"
    assert turned("smollm3") == "xxx.xxx."
    assert turned("exaone4") == "xxxxxxxx"
    assert turned("exaone4", **{"attention.sliding_window": 8}) == "xxx.xxx."


@pytest.mark.parametrize("name", ["granite", "granitemoe"])
def test_a_granite_file_may_switch_positions_off(name: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rope.scaling.finetuned": False}
    if name == "granitemoe":
        keys |= {"expert_count": 2, "expert_used_count": 1}
    assert read(tmp_path, name, metadata=keys).rope.dim == 0
    keys["rope.scaling.finetuned"] = True
    assert read(tmp_path, name, metadata=keys).rope.dim == 10


def test_queries_grow_beyond_the_original_context_alone(tmp_path: Path) -> None:
    keys = {"attention.temperature_scale": 0.1, "rope.scaling.original_context_length": 16}
    arch = read(tmp_path, "mistral3", metadata=keys)
    assert (arch.scales_queries(16), arch.scales_queries(17)) == (False, True)
    assert not read(tmp_path, "llama", metadata=keys).scales_queries(64)
    keys["rope.dimension_count"] = 4
    limit = r"temperature_scale is .*of heads of 10 columns all must be rotated, and 4 are"
    with pytest.raises(UnsupportedModel, match=limit):
        read(tmp_path, "mistral3", metadata=keys)


def test_families_have_the_epsilon_of_their_norms(tmp_path: Path) -> None:
    keys = {"attention.layer_norm_epsilon": 2e-5, "attention.layer_norm_rms_epsilon": 3e-5}
    assert read(tmp_path, "phi2", metadata=keys).norm_eps == 2e-5
    assert read(tmp_path, "arcee", metadata=keys).norm_eps == 3e-5


def test_logits_are_multiplied_or_divided(tmp_path: Path) -> None:
    keys = {"logit_scale": 0.25}
    assert read(tmp_path, "command-r", metadata=keys).logit_scale == 4
    assert read(tmp_path, "granite", metadata=keys).logit_scale == 0.25
    assert read(tmp_path, "command-r").logit_scale == 1


def test_a_window_may_be_named_layer_by_layer(tmp_path: Path) -> None:
    keys = {"attention.sliding_window": 8, "block_count": 5}
    named = {**keys, "attention.sliding_window_pattern": [True, True, True, False, True]}
    arch = read(tmp_path, "olmo2", metadata=named)
    assert [shape.window for shape in arch.layers] == [8, 8, 8, 0, 8]
    named["attention.sliding_window_pattern"] = [True, True, False, False, True]
    with pytest.raises(UnsupportedModel, match=r"sliding_window_pattern is .*must be 4"):
        read(tmp_path, "olmo2", metadata=named)


def _gemma4(num_layers: int = 2, **changes: Any) -> dict[str, Any]:
    keys = {
        "block_count": num_layers,
        "attention.key_length": 12,
        "attention.key_length_swa": 6,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, False],
        "attention.head_count_kv": [2, 1],
        "feed_forward_length": [16, 32],
    }
    return keys | {key.replace("__", "."): value for key, value in changes.items()}


def test_layers_may_differ_in_shape(tmp_path: Path) -> None:
    arch = read(tmp_path, "gemma4", metadata=_gemma4())
    assert arch.layers == (LayerShape(2, 6, 16, 8), LayerShape(1, 12, 32, 0))
    assert (arch.attn_scale, arch.rope.dim, arch.local_rope.dim) == (1, 12, 6)
    # Keys of 2 heads of 6 and values padded to 16; of 1 of 12 and 16.
    assert arch.kv_bytes_per_token(DType.F16) == 2 * (2 * (6 + 16) + 12 + 16)
    assert (arch.widest_q, arch.widest_kv, arch.dense_width) == (24, 12, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__sliding_window_pattern": [True]}, "of each of 2 layers"),
        ({"attention__sliding_window_pattern": 6}, "of each of 2 layers"),
        ({"attention__head_count_kv": [2, 1], "num_layers": 3,
          "attention__sliding_window_pattern": [True] * 3}, "one for each of 3 layers"),
        ({"attention__head_count_kv": [2, 3]}, "must divide 2 heads"),
        ({"attention__head_count_kv": [2, 0]}, "from 1 to"),
        ({"attention__key_length_swa": 7}, "must be even"),
        ({"rope__dimension_count_swa": 3}, "must be even"),
    ],
)  # fmt: skip
def test_shapes_that_make_no_sense_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadModelFile, match=message):
        read(tmp_path, "gemma4", metadata=_gemma4(**changes))


@pytest.fixture
def windowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FamilyModel:
    """Mistral as its first version was: all layers look back on a window."""
    family = FAMILIES["mistral"]
    family = replace(
        family,
        config={**family.config, "sliding_window": WINDOW},
        metadata={**family.metadata, "attention.sliding_window": WINDOW},
    )
    monkeypatch.setitem(FAMILIES, "mistral-window", family)
    return make_family("mistral-window", tmp_path)


def test_mistral_with_a_window_computes_what_transformers_does(windowed: FamilyModel) -> None:
    ids = windowed.token_ids[: 3 * WINDOW]
    ours, theirs = (
        engine_logits(windowed.path, ids, windowed.context_length),
        hf_logits(windowed.hf_model, ids),
    )
    largest = np.abs(theirs).max()
    assert np.abs(ours - theirs).max() < 3e-5 * largest
    windowed.hf_model.config.sliding_window = None
    without = hf_logits(windowed.hf_model, ids)
    assert np.abs(without - theirs)[WINDOW:].max() > 1e-2 * largest, "the window must matter"
