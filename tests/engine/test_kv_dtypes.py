"""The KV cache in blocks of Q8_0 and Q4_0, also behind a Hadamard matrix: a whole model against one
of transformers whose keys and values GGUF's package rounds, and bit for bit against itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from models.families import FamilyModel, hf_logits, make_family
from models.family_table import FAMILIES, _deepseek2
from models.tiny_gguf import write_tiny
from ops.kernel_launch import bits

from hypocenter import LLM, EngineConfig, SamplingParams
from hypocenter.base.errors import BadSetting
from hypocenter.base.tensor import DType
from hypocenter.engine.runner import load_runner
from hypocenter.kernels.rowwise import hadamard
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.tensors import footprint

KINDS = {
    "q8_0": GGMLQuantizationType.Q8_0,
    "q4_0": GGMLQuantizationType.Q4_0,
    "q4_0_hadamard": GGMLQuantizationType.Q4_0,
}
NUM_TOKENS = 120
each = pytest.mark.parametrize("kv_dtype", KINDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    return make_family("qwen3", tmp_path_factory.mktemp("qwen3"))  # heads of 32


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    """One whose latents and rotated parts are whole blocks."""
    with pytest.MonkeyPatch.context() as patched:
        family = _deepseek2(
            "DeepseekV2",
            is_split=True,
            dims=(64, 32, 24, 20),
            n_group=1,
            topk_group=1,
            topk_method="greedy",
        )
        patched.setitem(FAMILIES, "latents", family)
        return make_family("latents", tmp_path_factory.mktemp("latents"))


def _logits(model: FamilyModel, kv_dtype: str, most: int = 512, **settings: Any) -> np.ndarray:
    config = EngineConfig(context_length=256, kv_dtype=kv_dtype, max_batch_tokens=most, **settings)
    with LLM(model.path, config) as llm:
        return np.array(llm.logits(model.token_ids[:NUM_TOKENS]))


def _rounded_by_gguf(kv_dtype: str, attend: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' attention, whose keys and values go through blocks."""
    kind, is_turned = KINDS[kv_dtype], kv_dtype.endswith("hadamard")

    def turned(x: np.ndarray) -> np.ndarray:
        """Heads [..., head_dim] times the matrix, which is its own inverse."""
        if not is_turned:
            return x
        found = hadamard.reference(x.reshape(-1, x.shape[-1]), x.shape[-1])
        return found.reshape(x.shape).astype(np.float32)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        blocks = quantize(turned(x.numpy()), kind)
        return torch.from_numpy(turned(dequantize(blocks, kind).reshape(x.shape)))

    def attend_rounded(module: Any, q: Any, k: Any, v: Any, *given: Any, **more: Any) -> Any:
        return attend(module, q, rounded(k.contiguous()), rounded(v.contiguous()), *given, **more)

    return attend_rounded


def _error_of_flips(kv_dtype: str, config: Any) -> float:
    """By how much logits differ because codes do, as a share of what rounding to codes changes.

    Two float32 sums of n values are some 2 u sqrt(n) of their size apart (u = 2^-24). A code is
    another one where an edge lies between them: by that over a step, of which 2^bits make up some
    four sizes. Rounding is off by a step over sqrt(12), a code that flips by a step. Where less
    than one code of all flips, none does.
    """
    bits_of_code = 8 if KINDS[kv_dtype] is GGMLQuantizationType.Q8_0 else 4
    longest = max(config.hidden_size, config.intermediate_size)
    chance = 2 * 2.0**-24 * math.sqrt(longest) / (4 / 2**bits_of_code)
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return math.sqrt(12 * chance) if chance * of_token * NUM_TOKENS >= 1 else 0.0


@each
def test_logits_are_those_of_keys_and_values_that_gguf_rounds(
    kv_dtype: str, model: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sums that differ by a bit round to another code, logits differ by more
    (`_error_of_flips`)."""
    from transformers.models.qwen3 import modeling_qwen3  # two seconds, in each process

    ids = model.token_ids[:NUM_TOKENS]
    exact, found = hf_logits(model.hf_model, ids), _logits(model, kv_dtype)
    attend = _rounded_by_gguf(kv_dtype, modeling_qwen3.eager_attention_forward)
    monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", attend)
    wanted = hf_logits(model.hf_model, ids)
    of_rounding = np.abs(wanted - exact).max(axis=1)
    error = np.abs(found - wanted).max(axis=1)
    share = _error_of_flips(kv_dtype, model.hf_model.config)
    bound = 3e-5 * np.abs(wanted).max() + share * np.median(of_rounding)
    assert np.median(error) < bound < np.median(of_rounding) / 10
    assert error.max() < of_rounding.max() / 10


@each
@pytest.mark.parametrize("name", ["model", "latents"])
@pytest.mark.tier("sim", fast=lambda case: (case.kv_dtype == "q4_0") == (case.name == "model"))
def test_bits_hang_on_no_chunk_page_or_thread(
    kv_dtype: str, name: str, request: pytest.FixtureRequest
) -> None:
    chosen: FamilyModel = request.getfixturevalue(name)
    whole = _logits(chosen, kv_dtype)
    for most, num_threads, block_size in ((1, 1, 16), (7, 2, 32), (64, 2, 128)):
        found = _logits(chosen, kv_dtype, most, num_threads=num_threads, block_size=block_size)
        assert (bits(found) == bits(whole)).all(), most
    in_f32 = _logits(chosen, "f32")
    # Half of the tokens: a router that chooses another expert makes more of a difference.
    error = np.median(np.abs(whole - in_f32).max(axis=1)) / np.abs(in_f32).max()
    assert 1e-3 < error < (0.03 if kv_dtype == "q8_0" else 0.4)


@each
def test_requests_that_share_and_give_way_get_what_they_get_alone(
    kv_dtype: str, model: FamilyModel
) -> None:
    """Room for two and a half of five requests: some are preempted, some adopt blocks."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
    ids = model.token_ids
    prompts = [ids[:50], ids[:33] + ids[60:70], ids[100:150], ids[:50], ids[200:230]]
    config = EngineConfig(context_length=128, kv_dtype=kv_dtype, num_threads=1)
    with LLM(model.path, replace(config, prefix_cache=False)) as alone:
        wanted = [alone.engine.request(prompt, params) for prompt in prompts]
        for request in wanted:
            alone.engine.complete([request])
    with LLM(model.path, replace(config, kv_tokens=240)) as llm:
        requests = [llm.engine.request(prompt, params) for prompt in prompts]
        for request in requests:
            llm.engine.submit(request)
        while llm.engine.step():
            llm.engine.scheduler.check_integrity()
        assert sum(request.num_preemptions for request in requests) > 0
        assert sum(request.num_cached for request in requests) > 0
    for request, one in zip(requests, wanted, strict=True):
        assert (request.output_ids, request.logprobs) == (one.output_ids, one.logprobs)


@each
@pytest.mark.parametrize("name", ["model", "latents"])
def test_needed_bytes_are_those_of_the_pages(
    kv_dtype: str, name: str, request: pytest.FixtureRequest
) -> None:
    config = EngineConfig(context_length=64, kv_tokens=64, kv_dtype=kv_dtype)
    with open_gguf(request.getfixturevalue(name).path) as file:
        arch = read_architecture(file)
        needed = footprint.needed_bytes(file, arch, config, 64)["KV cache"]
        pages = load_runner(file, config)._pages.each
    assert needed == sum(page.data.nbytes for page in pages)
    assert needed == sum(page.allocation.num_bytes for page in pages)
    in_f16 = 64 * arch.kv_bytes_per_token(DType.F16)
    assert needed * 64 == in_f16 * (34 if kv_dtype == "q8_0" else 18)


@each
def test_heads_that_are_no_whole_blocks_are_refused(kv_dtype: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    wanted = f"kv_dtype is '{kv_dtype}', but heads of 10 columns are no whole blocks of 32; "
    with open_gguf(path) as file:
        with pytest.raises(BadSetting, match=wanted + "use f16 or f32"):
            load_runner(file, EngineConfig(kv_dtype=kv_dtype))
        assert list(footprint.kv_dtypes_for(read_architecture(file))) == ["f16", "f32"]


@each
def test_parts_refuse_them_and_capitals_do_not_matter(kv_dtype: str) -> None:
    assert EngineConfig(kv_dtype=kv_dtype.upper()) == EngineConfig(kv_dtype=kv_dtype)
    with pytest.raises(BadSetting, match=f"kv_dtype is '{kv_dtype}', but parts of attention read"):
        EngineConfig(kv_dtype=kv_dtype.upper(), device="cuda", attention="parts")
