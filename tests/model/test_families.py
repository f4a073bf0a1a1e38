"""Every family against transformers in float32, on small random models; no quantised weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from models.families import FamilyModel, engine_logits, hf_logits, make_family, new_model
from models.family_gguf import Fault, write_gguf
from models.family_table import FAMILIES
from models.resident import resident_bytes

from hypocenter.base.errors import UnsupportedModel
from hypocenter.cli.verbs import bench, inspect
from hypocenter.engine.llm import LLM
from hypocenter.engine.runner import load_runner
from hypocenter.model.facts import layer_shapes
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.facts.families import FAMILIES as OUR_FAMILIES
from hypocenter.model.facts.families import FixedScales
from hypocenter.model.facts.recurrence import RecurrenceOfFamily
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.tensors import footprint
from hypocenter.model.tensors.tensor_reader import check_tensors
from hypocenter.settings.config import EngineConfig

#: Largest logit difference over largest logit. Both sides sum in float32 in their own order over
#: some ten matrices per layer; sound families stay below 1e-5, faults far above (see tests/peer).
TOLERANCE = 3e-5
NUM_PROMPT_TOKENS = 96
NUM_DECODE_TOKENS = 40


def is_of_few_families(case: SimpleNamespace) -> bool:
    """The one that most are like, one with much of its own, and a mixture of experts."""
    return case.model in (
        "llama",
        "gemma2",
        "gemma4",
        "gemma4-experts",
        "gemma4-e",
        "glm4moe",
        "gpt-oss",
        "deepseek2-v3",
    )


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    return make_family(request.param, tmp_path_factory.mktemp("family"))


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.tier("sim", fast=is_of_few_families)
def test_prompt_in_one_pass(model: FamilyModel) -> None:
    ids = model.token_ids[:NUM_PROMPT_TOKENS]
    ours = engine_logits(model.path, ids, model.context_length)
    assert relative_error(ours, hf_logits(model.hf_model, ids)) < TOLERANCE
    with open_gguf(model.path) as file:
        check_tensors(file, read_architecture(file))  # inspect says what run does


@pytest.mark.tier("sim", fast=is_of_few_families)
def test_token_by_token(model: FamilyModel) -> None:
    """Chunks of one token are decode steps: each reads all earlier positions from the cache."""
    ids = model.token_ids[:NUM_DECODE_TOKENS]
    ours = engine_logits(model.path, ids, model.context_length, max_batch_tokens=1)
    assert relative_error(ours, hf_logits(model.hf_model, ids)) < TOLERANCE
    in_one_pass = engine_logits(model.path, ids, model.context_length)
    assert np.array_equal(ours, in_one_pass), "the chunk that a token came in changed its logits"


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        ("hunyuan-dense", 6),
        ("llama-biased", 6),
        ("mistral3-scaled", 40),
        ("arcee", 6),
        ("starcoder2", 6),
        ("command-r", 6),
        ("command-r-plus", 6),
        ("stablelm-12b", 6),
        ("phi2", 6),
        ("gpt-oss", 6),
        ("gpt-oss", 30),
        ("gemma4-whole", 4),
        ("gemma4-e-whole", 3),
        ("deepseek2-lite", 4),
        ("deepseek2-v3", 4),
        ("deepseek2-glm", 4),
        ("deepseek2-kimi", 4),
        ("minicpm3", 4),
    ],
)
@pytest.mark.tier(
    "sim",
    fast=lambda case: (case.name, case.num_tokens) == ("gpt-oss", 6),
)
def test_a_gpu_gives_the_same_logits(
    name: str, num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of those that need launches which others do not; Ministral's is past its context."""
    config = FAMILIES[name].config
    if FAMILIES[name].arch != "gemma4":  # those are made small by themselves
        one_layer = {**config, "num_hidden_layers": 1}
        monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], config=one_layer))
    model = make_family(name, tmp_path)
    ids = model.token_ids[:num_tokens]
    ours = engine_logits(model.path, ids, 64, device="sim:h200")
    assert relative_error(ours, hf_logits(model.hf_model, ids)) < TOLERANCE


@pytest.mark.tier("sim", fast=is_of_few_families)
def test_the_text_reaches_what_it_should(model: FamilyModel) -> None:
    """The comparison means little unless window, caps and long-rope factors are in play."""
    config = model.hf_model.config
    assert (getattr(config, "sliding_window", None) or 0) < NUM_DECODE_TOKENS
    logits = hf_logits(model.hf_model, model.token_ids[:NUM_PROMPT_TOKENS])
    if cap := getattr(config, "final_logit_softcapping", None):
        assert np.abs(logits).max() > 0.5 * cap
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    entropy = -(probs * np.log2(np.maximum(probs, 1e-30))).sum(-1).mean()
    assert entropy < 3.0


@pytest.mark.parametrize(
    ("name", "metadata", "config", "field"),
    [
        ("glm4", {"rope.dimension_sections": [2, 2, 2, 0]}, {}, "glm4.rope.dimension_sections"),
        ("gemma3", {"attention.sliding_window_pattern": 3}, {}, "sliding_window_pattern"),
        ("olmo3", {"attention.sliding_window_pattern": [True] * 5}, {}, "sliding_window_pattern"),
        ("qwen2", {"rope.scaling.type": "dynamic"}, {}, "qwen2.rope.scaling.type"),
        ("qwen3", {"expert_count": 8}, {}, "qwen3.expert_count"),
        ("llama", {"attention.value_length": 8}, {}, "llama.attention.value_length"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    name: str, metadata: dict[str, Any], config: dict[str, Any], field: str, tmp_path: Path
) -> None:
    sound = FAMILIES[name]
    family = replace(
        sound, metadata={**sound.metadata, **metadata}, config={**sound.config, **config}
    )
    path = tmp_path / "refused.gguf"
    write_gguf(family, new_model(family), path)
    with pytest.raises(UnsupportedModel, match=field):
        LLM(path)


@pytest.mark.parametrize(
    ("name", "device", "num_tokens"),
    [
        ("olmo2", "cpu", NUM_DECODE_TOKENS),
        ("arcee", "cpu", NUM_DECODE_TOKENS),
        ("phi2", "cpu", NUM_DECODE_TOKENS),
        ("phi2", "sim:h200", 4),
    ],
)
@pytest.mark.tier("sim", fast=lambda case: case.device == "cpu")
def test_quantised_weights_read_codes(
    name: str, device: str, num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of Q8_0 read codes alone: of what has no norm, of relu2, of layer norms."""
    add = gguf.GGUFWriter.add_tensor

    def add_quantised(writer: Any, name: str, values: np.ndarray, **more: Any) -> None:
        kind = gguf.GGMLQuantizationType.Q8_0
        if values.ndim == 2:
            add(writer, name, gguf.quants.quantize(values, kind), raw_dtype=kind, **more)
        else:
            add(writer, name, values, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_quantised)
    sizes = {**FAMILIES[name].config, "intermediate_size": 160, "head_dim": 32}
    monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], config=sizes))
    model = make_family(name, tmp_path)
    ids = model.token_ids[:num_tokens]
    ours = engine_logits(model.path, ids, 64, device=device)
    theirs = hf_logits(model.hf_model, ids)
    # Rounding to 8 bits, of weights and of what they are multiplied with, in three layers.
    assert relative_error(ours, theirs) < 0.1


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("smollm3", {"no_rope_every": 0}),
        ("exaone4-32b", {"rotates_global_layers": True}),
        ("olmo3", {"window_pattern": 2}),
        ("olmo3-yarn", {"plain_window": False}),
        ("gemma", {"scaled_embedding": False}),
        ("granite", {"has_scales": False}),
        ("hunyuan-dense", {"norms_after_rope": False}),
        ("mistral3-scaled", {"scales_queries": False}),
        ("arcee", {"activation": "gelu"}),
        ("command-r", {"multiplies_logits": False}),
        ("command-r-plus", {"norms_after_rope": True}),
        ("stablelm-12b", {"norms_after_rope": True}),
        ("gpt-oss", {"rounds_ramp": True}),
        ("gpt-oss", {"window_pattern": 3}),
        ("gpt-oss", {"activation": "silu"}),
        ("gemma4", {"scales_scores": True}),
        ("gemma4-odd", {"norms_values": False}),
        ("gemma4-experts", {"activation": "silu"}),
        ("gemma4-e", {"activation": "silu"}),
        ("qwen35", {"recurrence": RecurrenceOfFamily(heads_by_turns=False)}),
        ("deepseek2-v3", {"rope_style": "neox"}),
        ("minicpm3", {"rope_style": "normal"}),
        *(
            ("minicpm3", {"fixed_scales": FixedScales(*scales)})
            for scales in ((6.0, 1.4, 256), (12.0, 1.0, 256), (12.0, 1.4, 128))
        ),
    ],
)
@pytest.mark.tier("sim", fast=lambda case: case.name == "smollm3")
def test_a_wrong_fact_of_a_family_shows(
    name: str, wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards this file too: what only some families have moves their logits far."""
    model = make_family(name, tmp_path)
    arch, ids = model.family.arch, model.token_ids[:NUM_PROMPT_TOKENS]
    if "window_pattern" in wrong:  # the file would name the right one
        monkeypatch.setattr(layer_shapes, "expect_pattern", lambda *_: None)
    monkeypatch.setitem(OUR_FAMILIES, arch, replace(OUR_FAMILIES[arch], **wrong))
    ours = engine_logits(model.path, ids, model.context_length)
    assert relative_error(ours, hf_logits(model.hf_model, ids)) > 100 * TOLERANCE


@pytest.mark.parametrize(
    "fault",
    [Fault(rope_base_factor=1.01), Fault(epsilon_factor=2), Fault(swapped_rows=True)],
)
def test_a_fault_in_the_file_shows(fault: Fault, tmp_path: Path) -> None:
    """Guards this file: the models are such that a wrong fact moves the logits far."""
    model = make_family("qwen3", tmp_path)
    path, ids = tmp_path / "fault.gguf", model.token_ids[:NUM_DECODE_TOKENS]
    write_gguf(model.family, model.hf_model, path, fault)
    ours = engine_logits(path, ids, model.context_length)
    assert relative_error(ours, hf_logits(model.hf_model, ids)) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["gemma4-e", "gemma4-experts", "deepseek2-lite", "deepseek2-v3"])
def test_needed_bytes_are_those_of_layers_of_several_shapes(name: str, tmp_path: Path) -> None:
    model = make_family(name, tmp_path)
    config = EngineConfig(context_length=40, kv_tokens=40, max_batch_tokens=8, max_batch_requests=3)
    with open_gguf(model.path) as file:
        arch = read_architecture(file)
        needed = footprint.needed_bytes(file, arch, config, 40)
        runner = load_runner(file, config)
    angles_in_f64 = 40 * arch.rope.dim // 2 * 3 * 8
    held = resident_bytes(runner)
    assert sum(needed.values()) == held + angles_in_f64


def test_a_token_reads_one_row_of_the_embeddings_of_layers(tmp_path: Path) -> None:
    with open_gguf(make_family("gemma4-e", tmp_path).path) as file:
        model = bench.model_size(file)
        shape = inspect.collect(file, None)["architecture"]
        table = file.tensors["per_layer_token_embd.weight"].num_bytes
    assert model.num_bytes - model.bytes_per_token == table
    assert shape["head_dim"] == [20, 36] * 3
    assert (shape["num_kv_heads"], shape["ffn_width"]) == (1, [176] * 3 + [352] * 3)
