"""Models whose cache holds latents: chunks, shared beginnings, layouts, types, what is refused.

Their logits stand beside those of transformers in `test_families.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from models.families import FamilyModel, engine_logits, hf_logits, make_family, new_model
from models.family_gguf import write_gguf
from models.family_table import FAMILIES, Family
from ops.kernel_launch import bits, random_rows

from hypocenter import LLM, EngineConfig, SamplingParams
from hypocenter.base.errors import BadModelFile
from hypocenter.base.tensor import DType
from hypocenter.engine.runner import load_runner
from hypocenter.kernels.weights.block_types import dequantise
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.tensors.tensor_reader import check_tensors

#: Twice as many as the models are stretched from.
NUM_TOKENS = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    return make_family("deepseek2-v3", tmp_path_factory.mktemp("latents"))


def test_chunks_do_not_change_a_bit(model: FamilyModel) -> None:
    ids = model.token_ids[:NUM_TOKENS]
    whole = engine_logits(model.path, ids, 256)
    assert np.abs(whole - hf_logits(model.hf_model, ids)).max() < 1e-4 * np.abs(whole).max()
    for most in (1, 7, 64):
        assert (bits(engine_logits(model.path, ids, 256, most)) == bits(whole)).all(), most


def test_a_shared_beginning_does_not_change_a_bit(model: FamilyModel) -> None:
    ids, params = model.token_ids[:NUM_TOKENS], SamplingParams(max_tokens=6, ignore_eos=True)

    def answer(llm: LLM, logprobs: int = 5) -> tuple[int, Any]:
        request = llm.engine.request(ids, replace(params, logprobs=logprobs))
        llm.engine.submit(request)
        while llm.engine.step():
            pass
        return request.num_cached, (request.output_ids, request.logprobs)

    with LLM(model.path, EngineConfig(context_length=256, num_threads=1)) as llm:
        (first, alone), (second, shared) = answer(llm), answer(llm)
    assert (first, second) == (0, 112)
    assert alone == shared


def test_the_cache_holds_a_latent_for_all_heads(model: FamilyModel) -> None:
    with open_gguf(model.path) as file:
        arch = read_architecture(file)
    assert arch.latent is not None
    assert (arch.latent.rank, arch.latent.cached_dim) == (40, 56)
    # Keys of 56, and values of 40 that are padded to 48, in three layers.
    assert arch.kv_bytes_per_token(DType.F16) == 3 * 2 * (56 + 48)


def as_older(family: Family) -> Family:
    """The same model in the layout of older files."""
    keys = dict(family.metadata)
    for kind in ("key", "value"):
        keys[f"attention.{kind}_length"] = keys.pop(f"attention.{kind}_length_mla")
    del keys["attention.head_count_kv"]
    return replace(family, metadata=keys)


def test_both_layouts_give_the_same_bits(model: FamilyModel, tmp_path: Path) -> None:
    ids, older = model.token_ids[:20], tmp_path / "older.gguf"
    write_gguf(as_older(model.family), model.hf_model, older)
    with open_gguf(older) as file:
        assert "blk.0.attn_kv_b.weight" in file.tensors
    assert (bits(engine_logits(older, ids, 64)) == bits(engine_logits(model.path, ids, 64))).all()


Quantise = Callable[[np.ndarray], np.ndarray]


def _q8_0(values: np.ndarray) -> np.ndarray:
    made: np.ndarray = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    return made


def _q4_k(values: np.ndarray) -> np.ndarray:
    """Anything, of about the size that the values have."""
    raw = random_rows(DType.Q4_K, len(values), values.shape[-1]).reshape(len(values), -1, 144)
    for at in (0, 2):
        scales = raw[..., at : at + 2].copy().view(np.float16)
        raw[..., at : at + 2] = (scales * np.float16(2e-4)).view(np.uint8)
    return raw.reshape(len(values), -1)


@pytest.mark.parametrize(
    ("is_split", "sizes", "dtype", "make"),
    [
        (True, (64, 8, 32, 20), DType.Q8_0, _q8_0),
        (False, (64, 8, 20, 12), DType.Q8_0, _q8_0),
        (False, (256, 8, 20, 12), DType.Q4_K, _q4_k),
    ],
)
def test_quantised_weights_of_heads(
    is_split: bool,
    sizes: tuple[int, int, int, int],
    dtype: DType,
    make: Quantise,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are held as f16, which rounds them once: beside the same numbers in F32."""
    family = _of_sizes(FAMILIES["deepseek2-v3"], sizes, is_split=is_split)
    monkeypatch.setitem(FAMILIES, "deepseek2-sizes", family)
    model = make_family("deepseek2-sizes", tmp_path)
    add, found = gguf.GGUFWriter.add_tensor, []

    def written(path: Path, *, is_quantised: bool) -> Path:
        def add_tensor(writer: Any, name: str, values: np.ndarray, **more: Any) -> None:
            if not name.endswith(("attn_k_b.weight", "attn_v_b.weight", "attn_kv_b.weight")):
                add(writer, name, values, **more)
                return
            found.append(name)
            raw = make(values)
            if is_quantised:
                kind = gguf.GGMLQuantizationType[dtype.name]
                add(writer, name, raw, raw_dtype=kind, **more)
            else:
                rows = raw.reshape(-1, raw.shape[-1])
                plain = dequantise(rows, dtype, values.shape[-1]).reshape(values.shape)
                add(writer, name, np.ascontiguousarray(plain), **more)

        monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
        write_gguf(family, model.hf_model, path)
        return path

    paths = [written(tmp_path / f"{kind}.gguf", is_quantised=kind) for kind in (True, False)]
    ids = model.token_ids[:20]
    ours, plain = (engine_logits(path, ids, 64) for path in paths)
    assert len(found) == 2 * 3 * (1 + is_split)
    assert 0 < np.abs(ours - plain).max() < 3e-3 * np.abs(plain).max()


def _of_sizes(family: Family, sizes: tuple[int, int, int, int], *, is_split: bool) -> Family:
    rank, rotated, plain, value = sizes
    names = "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
    keys = {
        **family.metadata,
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rotated,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": plain + rotated,
        "attention.value_length_mla": value,
    }
    config = {**family.config, **dict(zip(names, sizes, strict=True))}
    made = replace(family, config=config, metadata=keys)
    return made if is_split else as_older(made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 24}, "key_length is 56, but the other numbers of attention say 40"),
        ({"value_length": 32}, "value_length is 32, but the other numbers of attention say 40"),
        ({"kv_lora_rank": 513}, "kv_lora_rank is 513, but attention's kernels hold 2 to 512"),
        ({"key_length_mla": 16}, "key_length_mla is 16, but must be above"),
        ({"key_length_mla": 44}, "blk.0.attn_k_b.weight shape is (5, 40, 24)"),
        ({"value_length_mla": 36}, "blk.0.attn_v_b.weight shape is (5, 32, 40)"),
        ({"head_count_kv": 5}, "head_count_kv is 5, but the other numbers of attention say 1"),
        ({"q_lora_rank": 0}, "blk.0.attn_q.weight is missing"),
        ({"q_lora_rank": 40}, "blk.0.attn_q_a.weight shape is (36, 120)"),
        ({"temperature_scale": 0.1}, "latent queries that grow with their position"),
        (
            {"kv_lora_rank": 24, "key_length": 40, "value_length": 24},
            "blk.0.attn_kv_a_mqa.weight shape is (56, 120), but the metadata say (40, 120)",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(
    changes: dict[str, Any], message: str, model: FamilyModel, tmp_path: Path
) -> None:
    keys = {f"attention.{key}": value for key, value in changes.items()}
    family = replace(model.family, metadata={**model.family.metadata, **keys})
    path = tmp_path / "refused.gguf"
    write_gguf(family, new_model(family), path)
    with open_gguf(path) as file, pytest.raises(BadModelFile) as caught:
        check_tensors(file, read_architecture(file))
    with open_gguf(path) as file, pytest.raises(type(caught.value)) as again:
        load_runner(file, EngineConfig(max_batch_tokens=4))
    assert str(again.value) == str(caught.value), "inspect says what run does"
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
