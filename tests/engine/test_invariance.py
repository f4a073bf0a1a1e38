"""Logits are bitwise equal whatever the batch, the chunk, the page and the number of threads."""

from __future__ import annotations

import importlib.resources
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from models.demo_variants import demo_with
from models.expert_model import write_experts
from ops.kernel_launch import bits
from repository import DEMO

from hypocenter import LLM, EngineConfig, SamplingParams
from hypocenter.base.tensor import DType
from hypocenter.engine.batch import Batch
from hypocenter.engine.runner import Runner, load_runner
from hypocenter.model.gguf.file import open_gguf

NUM_TOKENS = 96


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    asset = importlib.resources.files("hypocenter") / "assets" / "demo-q8_0.gguf"
    with importlib.resources.as_file(asset) as path:
        yield path


@pytest.fixture(scope="module")
def token_ids() -> np.ndarray:
    return np.random.default_rng(0).integers(2, 4096, NUM_TOKENS).astype(np.int32)


@pytest.fixture(scope="module")
def reference(model: Path, token_ids: np.ndarray) -> np.ndarray:
    return _chunked(_runner(model), token_ids, NUM_TOKENS)


def _runner(model: Path, **settings: object) -> Runner:
    with open_gguf(model) as file:
        return load_runner(file, EngineConfig(**settings))  # type: ignore[arg-type]


def _step(
    runner: Runner, sequences: list[tuple[np.ndarray, int, int]], tables: np.ndarray
) -> np.ndarray:
    """Run token ids start..stop of each (ids, start, stop) in one step; all their logits."""
    size, parts = runner.block_size, []
    for row, (ids, start, stop) in enumerate(sequences):
        positions = np.arange(start, stop, dtype=np.int32)
        slots = tables[row, positions // size] * size + positions % size
        parts.append((ids[start:stop], positions, slots, np.full_like(positions, row)))
    token_ids, positions, slots, rows = (
        np.concatenate(x).astype(np.int32) for x in zip(*parts, strict=True)
    )
    wanted = np.arange(len(token_ids), dtype=np.int32)
    batch = Batch(token_ids, positions, slots, rows, tables, wanted)
    return np.array(runner.run(batch).data[:, : runner.vocab_size])


def _chunked(runner: Runner, token_ids: np.ndarray, chunk: int) -> np.ndarray:
    num_blocks = -(-len(token_ids) // runner.block_size)
    # Pages in reverse: where a page lies must not matter.
    order = np.arange(runner.num_blocks - 1, runner.num_blocks - 1 - num_blocks, -1)
    tables = order.astype(np.int32)[None]
    starts = range(0, len(token_ids), chunk)
    return np.concatenate(
        [
            _step(runner, [(token_ids, start, min(start + chunk, len(token_ids)))], tables)
            for start in starts
        ]
    )


@pytest.mark.parametrize("chunk", [1, 16, 37])
def test_chunks(model: Path, token_ids: np.ndarray, reference: np.ndarray, chunk: int) -> None:
    assert (bits(_chunked(_runner(model), token_ids, chunk)) == bits(reference)).all()


def test_a_chunk_of_512(model: Path) -> None:
    token_ids = np.random.default_rng(1).integers(2, 4096, 512).astype(np.int32)
    whole = _chunked(_runner(model), token_ids, 512)
    assert (bits(_chunked(_runner(model), token_ids, 16)) == bits(whole)).all()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads(
    model: Path, token_ids: np.ndarray, reference: np.ndarray, num_threads: int
) -> None:
    runner = _runner(model, num_threads=num_threads)
    assert (bits(_chunked(runner, token_ids, NUM_TOKENS)) == bits(reference)).all()


@pytest.mark.parametrize("block_size", [32, 128])
def test_pages(model: Path, token_ids: np.ndarray, reference: np.ndarray, block_size: int) -> None:
    runner = _runner(model, block_size=block_size)
    assert (bits(_chunked(runner, token_ids, NUM_TOKENS)) == bits(reference)).all()


@pytest.mark.parametrize("batch_size", [1, 2, 7, 32])
def test_batches(
    model: Path, token_ids: np.ndarray, reference: np.ndarray, batch_size: int
) -> None:
    """Sequences of different lengths, one token each per step, next to ours in the last row."""
    runner = _runner(model)
    length = runner.block_size  # a page each: 32 sequences fill the cache
    rng = np.random.default_rng(2)
    others = [rng.integers(2, 4096, NUM_TOKENS).astype(np.int32) for _ in range(batch_size - 1)]
    tables = rng.permutation(runner.num_blocks)[:batch_size, None].astype(np.int32)
    for position in range(length):
        step = [(ids, position, position + 1) for ids in [*others, token_ids]]
        logits = _step(runner, step, tables)[-1]
        assert (bits(logits) == bits(reference[position])).all(), position


def test_products_in_bf16(tmp_path: Path, token_ids: np.ndarray) -> None:
    with open_gguf(DEMO) as file:
        matrices = [name for name, info in file.tensors.items() if len(info.shape) == 2]
    kinds = dict.fromkeys(matrices, GGMLQuantizationType.F16)
    path = demo_with(tmp_path / "f16.gguf", {}, kinds)
    whole = _chunked(_runner(path, float_products="bf16"), token_ids, NUM_TOKENS)
    for chunk, num_threads in ((1, 2), (37, 1), (64, 2)):
        runner = _runner(path, float_products="bf16", num_threads=num_threads, block_size=32)
        assert (bits(_chunked(runner, token_ids, chunk)) == bits(whole)).all(), chunk


#: Codes whose gate and up share a launch; where types differ they do not; and floats.
MIXTURES = {
    "codes": (DType.Q4_K, {"ffn_down_exps.weight": DType.Q6_K}),
    "gpt-oss": (DType.MXFP4, {"attn_q.weight": DType.Q8_0}),
    "several": (
        DType.Q8_0,
        {"ffn_up_exps.weight": DType.Q4_0, "0.ffn_down_exps.weight": DType.F16},
    ),
    "floats": (DType.F16, {}),
    "grids": (
        DType.IQ2_XS,
        {
            "ffn_down_exps.weight": DType.IQ3_S,
            "attn_q.weight": DType.IQ1_M,
            "attn_k.weight": DType.NVFP4,
            "token_embd.weight": DType.TQ1_0,
        },
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.tier("sim", fast=lambda case: case.name in ("codes", "gpt-oss"))
def test_mixtures_of_experts(tmp_path: Path, name: str) -> None:
    """Chunks, threads, pages and company; which experts the others take changes nothing."""
    kind, kinds = MIXTURES[name]
    arch = name if name == "gpt-oss" else "qwen3moe"
    path = write_experts(tmp_path / "experts.gguf", kind, kinds=kinds, arch=arch)
    ids = np.random.default_rng(0).integers(2, 512, NUM_TOKENS).astype(np.int32)
    whole = _chunked(_runner(path), ids, NUM_TOKENS)
    assert np.isfinite(whole).all()
    assert np.ptp(whole, axis=0).min() > 0
    for chunk, num_threads in ((1, 2), (5, 1), (37, 2)):
        runner = _runner(path, num_threads=num_threads, block_size=32)
        assert (bits(_chunked(runner, ids, chunk)) == bits(whole)).all(), chunk
    runner = _runner(path)
    others = [np.roll(ids, shift) for shift in range(1, 7)]
    tables = np.arange(7, dtype=np.int32)[:, None]
    for position in range(16):
        step = [(row, position, position + 1) for row in [*others, ids]]
        logits = _step(runner, step, tables)[-1]
        assert (bits(logits) == bits(whole[position])).all(), position


def test_a_checked_run_gives_the_same_bits(
    model: Path, token_ids: np.ndarray, reference: np.ndarray
) -> None:
    runner = _runner(model, launch_mode="checked")
    assert (bits(_chunked(runner, token_ids, 37)) == bits(reference)).all()


def test_generated_text_is_the_same_alone_and_in_company(model: Path) -> None:
    prompts = ["import os\n", "def parse(", "class Reader:\n    ", "# A comment", "x"]
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    with LLM(model) as llm:
        together = llm.generate(prompts, params)
        alone = [llm.generate(prompt, params) for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


PROGRAM = """
import sys, threading, numba
from hypocenter import LLM, SamplingParams
llms = [LLM(sys.argv[1]) for _ in range(2)]
params = SamplingParams(max_tokens=24)
expected = llms[0].generate("import os", params).token_ids
results = []
def work(llm):
    for _ in range(3):
        results.append(llm.generate("import os", params).token_ids)
threads = [threading.Thread(target=work, args=(llms[i % 2],)) for i in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert numba.threading_layer() == "workqueue", numba.threading_layer()
assert len(results) == 12 and set(results) == {expected}
print("equal")
"""


def test_two_threads_and_two_models_on_the_workqueue_layer(model: Path) -> None:
    """numba's workqueue layer aborts the process when two threads enter it at once."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        env={
            "PATH": "/usr/bin:/bin",
            "NUMBA_THREADING_LAYER": "workqueue",
            "HOME": str(Path.home()),
            **({"HYPO_CACHE_DIR": cache} if (cache := os.environ.get("HYPO_CACHE_DIR")) else {}),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
