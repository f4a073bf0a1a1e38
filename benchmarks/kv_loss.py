"""What types of the KV cache cost: perplexity and divergence of each, beside those of an f16 cache.

    python benchmarks/kv_loss.py TEXT... [--model FILE] [--chunks 64] [--gain 1] [--device cpu]

With `--gain` 2 and more some columns of each key are that much larger and those of queries that
much smaller, so the model is the same function, bit for bit in exact arithmetic, and its keys have
the few large channels that those of large models have (KIVI, arXiv 2402.02750, figure 2). It is
written in F32, where powers of two change no digit. For files of the llama architecture.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hypocenter import LLM, EngineConfig
from hypocenter.base.tensor import DType
from hypocenter.engine import perplexity
from hypocenter.kernels.weights.block_types import dequantise
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.model.gguf.writing import PlannedTensor, alignment_of, head_of, new_file

_DEMO = Path(__file__).parents[1] / "src/hypocenter/assets/demo-q8_0.gguf"
#: Pairs of columns that turn together, of each head of a key; of a layer and head their own.
_LARGE_PAIRS = 2
#: As MOSTLY_F32 in GGUF's list of file types.
_ALL_F32 = 0


def with_large_keys(source: Path, gain: int, path: Path) -> None:
    """Write the model with keys that have a few columns `gain` times as large."""
    with open_gguf(source) as file:
        planned = [
            PlannedTensor(name, DType.F32, info.shape) for name, info in file.tensors.items()
        ]
        head = head_of(file, planned, {"general.file_type": _ALL_F32}, ())
        with new_file(path, head, alignment_of(file)) as writer:
            for tensor in planned:
                weights = _floats(file, tensor.name) * _factors(file, tensor.name, gain)
                writer.write(np.ascontiguousarray(weights, np.float32).view(np.uint8).reshape(-1))
                writer.end_tensor()


def _floats(file: GGUFFile, name: str) -> np.ndarray:
    info = file.tensors[name]
    rows = file.raw(name).reshape(-1, info.dtype.num_bytes(info.shape[-1]))
    return dequantise(rows, info.dtype, info.shape[-1])


def _factors(file: GGUFFile, name: str, gain: int) -> np.ndarray | float:
    """What each row of a matrix that makes keys or queries is multiplied by, [num_rows, 1]."""
    is_key = name.endswith("attn_k.weight")
    if not is_key and not name.endswith("attn_q.weight"):
        return 1.0
    num_heads, num_kv_heads = (
        int(file.integer(f"llama.attention.{key}", low=1))
        for key in ("head_count", "head_count_kv")
    )
    layer = int(name.split(".")[1])
    num_rows = file.tensors[name].shape[0]
    head_dim = num_rows // (num_kv_heads if is_key else num_heads)
    rng = np.random.default_rng(layer)
    factors = np.ones((num_kv_heads, head_dim // 2, 2))
    for head in range(num_kv_heads):
        pairs = rng.choice(head_dim // 2, _LARGE_PAIRS, replace=False)
        factors[head, pairs] = gain
    if is_key:
        return factors.reshape(num_rows, 1)
    return (1 / factors.repeat(num_heads // num_kv_heads, axis=0)).reshape(num_rows, 1)


def compare(
    path: Path, text: str, num_chunks: int, device: str, types: Sequence[str]
) -> Iterator[str]:
    """A line for f16, which is the base, and for each type of the cache."""
    base = path.with_suffix(".base")
    for name in ("f16", *types):
        config = EngineConfig(
            context_length=512, kv_dtype=name, max_batch_requests=1, prefix_cache=False,
            device=device,
        )  # fmt: skip
        with LLM(path, config) as llm:
            if name == "f16":
                chunks = perplexity.chunks_of(llm, text, 512, num_chunks)
                writer = perplexity.LogitsWriter(base, chunks, llm.vocab_size)
                found = perplexity.measure(llm, chunks, writer, lambda *_: None)
                writer.close()
                yield f"{name:14} perplexity {found.perplexity:.5f} of {found.num_tokens} tokens"
                continue
            reader = perplexity.LogitsReader(base)
            beside = perplexity.compare(llm, reader, lambda *_: None)
            reader.close()
        ratio, more, same = beside.log_ratio, beside.divergence, 100 * beside.same_top.mean
        yield (
            f"{name:14} perplexity {beside.model.perplexity:.5f}, "
            f"{100 * np.expm1(ratio.mean):+.3f} +/- {100 * ratio.error:.3f} %; divergence "
            f"{more.mean:.6f} +/- {more.error:.6f}, same most likely {same:.2f} %"
        )
    base.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--model", type=Path, default=_DEMO)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--gain", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--types", nargs="+", default=["q8_0", "q4_0", "q4_0_hadamard"])
    asked = parser.parse_args()
    text = "\n".join(path.read_text("utf-8") for path in asked.texts)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        with_large_keys(asked.model, asked.gain, path)
        for line in compare(path, text, asked.chunks, asked.device, asked.types):
            print(line, flush=True)


if __name__ == "__main__":
    main()
