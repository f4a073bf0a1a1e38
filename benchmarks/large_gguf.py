"""A GGUF file of an 8B Llama's shape with random weights in Q4_K and Q6_K, written in seconds.

It needs no other package than numpy. Blocks are random but for their scales, which keep all numbers
finite. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, FFN, VOCAB = 4096, 32, 32, 8, 14336, 128256
_U32, _F32, _STRING, _ARRAY, _I32 = 4, 6, 8, 9, 5
_F32_TENSOR, _Q4_K, _Q6_K = 0, 12, 14
#: Bytes of a block of 256 weights.
_BLOCK_BYTES = {_Q4_K: 144, _Q6_K: 210}
_ALIGNMENT = 32


def write_8b(path: Path, num_layers: int = NUM_LAYERS) -> None:
    """Write the file, some 5 GB."""
    rng = np.random.default_rng(0)
    pools = {kind: _blocks(rng, kind) for kind in _BLOCK_BYTES}
    tensors = list(_tensors(num_layers))
    fields = _fields(num_layers)
    infos, offset = b"", 0
    for name, shape, kind in tensors:
        sizes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
        infos += _text(name) + struct.pack("<I", len(shape)) + sizes
        infos += struct.pack("<IQ", kind, offset)
        offset += _padded(_num_bytes(shape, kind))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    head += b"".join(fields) + infos
    with path.open("wb") as file:
        file.write(head.ljust(_padded(len(head)), b"\0"))
        for _, shape, kind in tensors:
            num_bytes = _num_bytes(shape, kind)
            if kind == _F32_TENSOR:
                data = np.ones(shape, np.float32).tobytes()
                file.write(data.ljust(_padded(num_bytes), b"\0"))
                continue
            pool, left = pools[kind], num_bytes
            while left:
                part = pool[: min(left, len(pool))]
                file.write(part)
                left -= len(part)
            file.write(b"\0" * (_padded(num_bytes) - num_bytes))


def _blocks(rng: np.random.Generator, kind: int) -> bytes:
    """Some 64 MB of blocks whose weights are some hundredths."""
    blocks = rng.integers(0, 256, ((64 << 20) // _BLOCK_BYTES[kind], _BLOCK_BYTES[kind]), np.uint8)
    scales = np.array([2e-5, 3e-4], np.float16).view(np.uint8)
    if kind == _Q4_K:
        blocks[:, :4] = scales
    else:
        blocks[:, -2:] = np.array([1e-5], np.float16).view(np.uint8)
    return blocks.tobytes()


def _tensors(num_layers: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    kv = WIDTH // NUM_HEADS * NUM_KV_HEADS
    yield "token_embd.weight", (VOCAB, WIDTH), _Q4_K
    for layer in range(num_layers):
        matrices = {
            "attn_q": (WIDTH, WIDTH), "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH),
            "attn_output": (WIDTH, WIDTH), "ffn_gate": (FFN, WIDTH), "ffn_up": (FFN, WIDTH),
            "ffn_down": (WIDTH, FFN),
        }  # fmt: skip
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", (WIDTH,), _F32_TENSOR
        for name, shape in matrices.items():
            # As Q4_K_M has it, where half of these are of the better type.
            is_better = name in ("attn_v", "ffn_down") and layer % 2 == 0
            yield f"blk.{layer}.{name}.weight", shape, _Q6_K if is_better else _Q4_K
    yield "output_norm.weight", (WIDTH,), _F32_TENSOR
    yield "output.weight", (VOCAB, WIDTH), _Q6_K


def _fields(num_layers: int) -> list[bytes]:
    numbers = {
        "llama.context_length": 8192, "llama.embedding_length": WIDTH,
        "llama.block_count": num_layers, "llama.feed_forward_length": FFN,
        "llama.attention.head_count": NUM_HEADS, "llama.attention.head_count_kv": NUM_KV_HEADS,
        "llama.rope.dimension_count": WIDTH // NUM_HEADS, "llama.vocab_size": VOCAB,
        "general.file_type": 15, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    floats = {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 500000.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"\u2581w{number}" for number in range(VOCAB - len(tokens))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (VOCAB - 259)]
    return [
        _text("general.architecture") + struct.pack("<I", _STRING) + _text("llama"),
        _text("tokenizer.ggml.model") + struct.pack("<I", _STRING) + _text("llama"),
        *(_text(k) + struct.pack("<II", _U32, number) for k, number in numbers.items()),
        *(_text(k) + struct.pack("<If", _F32, number) for k, number in floats.items()),
        _array("tokenizer.ggml.tokens", _STRING, b"".join(map(_text, tokens))),
        _array("tokenizer.ggml.scores", _F32, -np.arange(VOCAB, dtype=np.float32)),
        _array("tokenizer.ggml.token_type", _I32, np.array(kinds, np.int32)),
    ]


def _array(name: str, kind: int, data: Any) -> bytes:
    raw = data if isinstance(data, bytes) else data.tobytes()
    return _text(name) + struct.pack("<IIQ", _ARRAY, kind, VOCAB) + raw


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _num_bytes(shape: tuple[int, ...], kind: int) -> int:
    num_weights = int(np.prod(shape))
    return 4 * num_weights if kind == _F32_TENSOR else num_weights // 256 * _BLOCK_BYTES[kind]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


if __name__ == "__main__":
    write_8b(Path(sys.argv[1]))
