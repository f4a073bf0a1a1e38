"""GGUF files of random weights in Q4_K and Q6_K, written in seconds: of an 8B Llama's shape, of
that of Qwen3-30B-A3B, a mixture of experts, and of models whose layers carry states.

It needs no other package than numpy. Blocks are random but for their scales, which keep all numbers
finite. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_U32, _F32, _STRING, _ARRAY, _I32 = 4, 6, 8, 9, 5
_F32_TENSOR, _Q8_0, _Q4_K, _Q6_K = 0, 8, 12, 14
#: Bytes of 256 weights: of a block, and of eight of Q8_0.
_BLOCK_BYTES = {_Q4_K: 144, _Q6_K: 210}
_NUM_BYTES = {**_BLOCK_BYTES, _Q8_0: 272}
_ALIGNMENT = 32
_TABLE = "token_embd.weight"
#: The scale of blocks of a table of tokens whose rows are large beside what layers add to them.
_TABLE_SCALE = 20.0
#: By what a head that drafts multiplies a token's normed embedding, for the same reason.
_HEAD_SCALE = 1000.0


@dataclass(frozen=True)
class Shape:
    """A model; `ffn` is of each of its experts, where it has some."""

    arch: str
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    ffn: int
    vocab: int
    num_experts: int = 0
    num_used: int = 0
    #: Heads of keys and of values in layers that carry a state, which are three of four.
    delta_heads: tuple[int, int] | None = None

    def has_state(self, layer: int) -> bool:
        return self.delta_heads is not None and layer % 4 != 3 and layer < self.num_layers


LLAMA_8B = Shape("llama", 32, 4096, 32, 8, 14336, 128256)
LLAMA_1B = Shape("llama", 16, 2048, 16, 4, 8192, 128256)
#: What drafts for an 8B may be as small as.
LLAMA_SMALL = Shape("llama", 6, 1024, 8, 2, 4096, 128256)
#: As Qwen3.5 9B, and a few layers as Qwen3-Next 80B has them.
DELTA_9B = Shape("qwen35", 32, 4096, 32, 8, 12288, 151936, delta_heads=(16, 32))
DELTA_EXPERTS = Shape("qwen3next", 8, 2048, 16, 2, 512, 151936, 512, 10, (16, 32))
DELTA_SMALL = Shape("qwen35", 4, 512, 4, 2, 1024, 4096, delta_heads=(2, 4))
SHAPES = {
    "8b": LLAMA_8B, "1b": LLAMA_1B, "small": LLAMA_SMALL, "delta-9b": DELTA_9B,
    "delta-experts": DELTA_EXPERTS, "delta-small": DELTA_SMALL,
}  # fmt: skip
QWEN3_30B = Shape("qwen3moe", 48, 2048, 32, 4, 768, 151936, num_experts=128, num_used=8)
HEAD_DIM = 128


def write_8b(path: Path, num_layers: int = LLAMA_8B.num_layers) -> None:
    """Write the file, some 5 GB."""
    write(path, LLAMA_8B, num_layers)


def write(
    path: Path,
    shape_of: Shape,
    num_layers: int,
    quality: float | None = None,
    head_quality: float | None = None,
) -> None:
    """Write a file of the first layers of a shape; 340 MB for each with experts.

    With `quality` the model says token t + 1 behind token t, in that share of tokens, and what is
    no neighbour in the others: so two files agree as often as is wanted, of whatever sizes. What
    layers add is small beside a token's own row, and yet computed. With `head_quality` there is a
    head behind the last layer that drafts as well as that.
    """
    rng = np.random.default_rng(0)
    pools = {kind: _blocks(rng, kind) for kind in _BLOCK_BYTES}
    tensors = list(_tensors(shape_of, num_layers))
    tables = {}
    if quality is not None:
        tensors = [(n, shape, _Q6_K if n == _TABLE else kind) for n, shape, kind in tensors]
        tables = _saying_neighbours(pools[_Q6_K], shape_of, quality)
    fields = _fields(shape_of, num_layers)
    if head_quality is not None:
        of_head = dict(_tables_of_head(pools[_Q6_K], shape_of, num_layers, head_quality))
        tables |= of_head
        tensors += _tensors_of_head(shape_of, num_layers)
        fields = _fields(shape_of, num_layers, num_heads=1)
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
        for name, shape, kind in tensors:
            num_bytes = _num_bytes(shape, kind)
            if kind == _F32_TENSOR:
                is_router = name.endswith("ffn_gate_inp.weight")
                values = rng.normal(size=shape) if is_router else np.ones(shape)
                if name.endswith("ssm_a"):
                    values = -values
                data = values.astype("<f4").tobytes()
                file.write(data.ljust(_padded(num_bytes), b"\0"))
                continue
            if name in tables:
                file.write(tables[name].tobytes().ljust(_padded(num_bytes), b"\0"))
                continue
            pool, left = pools[kind], num_bytes
            while left:
                part = pool[: min(left, len(pool))]
                file.write(part)
                left -= len(part)
            file.write(b"\0" * (_padded(num_bytes) - num_bytes))


def _saying_neighbours(pool: bytes, of: Shape, quality: float) -> dict[str, Any]:
    """Blocks of the two tables. Row t + 1 of the output is the embedding of t, which it is most
    alike of all rows; where the model is wrong it is another row."""
    per_row, size = of.width // 256, _BLOCK_BYTES[_Q6_K]
    blocks = np.frombuffer(pool, np.uint8).reshape(-1, size)
    rows = np.resize(blocks, (of.vocab * per_row, size)).reshape(of.vocab, per_row, size)
    others = np.roll(rows.reshape(-1, size), 5, axis=0).reshape(rows.shape)
    is_wrong = np.random.default_rng(7).random(of.vocab) >= quality
    output = np.roll(np.where(is_wrong[:, None, None], others, rows), 1, axis=0)
    table = rows.copy()
    table[:, :, -2:] = np.array([_TABLE_SCALE], np.float16).view(np.uint8)
    return {_TABLE: table, "output.weight": output}


def _tensors_of_head(of: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    prefix = f"blk.{layer}.nextn."
    yield from _layer(of, layer)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        yield f"{prefix}{name}.weight", (of.width,), _F32_TENSOR
    yield f"{prefix}eh_proj.weight", (of.width, 2 * of.width), _Q8_0
    yield f"{prefix}shared_head_head.weight", (of.vocab, of.width), _Q6_K


def _tables_of_head(
    pool: bytes, of: Shape, layer: int, quality: float
) -> Iterator[tuple[str, Any]]:
    """A head that reads a token's embedding alone, and says its neighbour in that share."""
    output = _saying_neighbours(pool, of, quality)["output.weight"]
    yield f"blk.{layer}.nextn.shared_head_head.weight", output
    blocks = np.zeros((of.width, of.width // 16, 34), np.uint8)
    blocks[:, :, :2] = np.array([_HEAD_SCALE / 127], np.float16).view(np.uint8)
    each = np.arange(of.width)
    blocks[each, each // 32, 2 + each % 32] = 127
    yield f"blk.{layer}.nextn.eh_proj.weight", blocks


def _blocks(rng: np.random.Generator, kind: int) -> bytes:
    """Some 64 MB of blocks whose weights are some hundredths."""
    blocks = rng.integers(0, 256, ((64 << 20) // _BLOCK_BYTES[kind], _BLOCK_BYTES[kind]), np.uint8)
    scales = np.array([2e-5, 3e-4], np.float16).view(np.uint8)
    if kind == _Q4_K:
        blocks[:, :4] = scales
    else:
        blocks[:, -2:] = np.array([1e-5], np.float16).view(np.uint8)
    return blocks.tobytes()


def _layer(of: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    heads, kv = of.num_heads * HEAD_DIM, of.num_kv_heads * HEAD_DIM
    is_delta = of.delta_heads is not None
    lead, end = ((of.num_experts,), "_exps") if of.num_experts else ((), "")
    matrices: dict[str, tuple[int, ...]] = {
        "attn_q": (heads * (2 if is_delta else 1), of.width), "attn_k": (kv, of.width),
        "attn_v": (kv, of.width), "attn_output": (of.width, heads),
    }  # fmt: skip
    if of.has_state(layer):
        yield from _vectors_of_state(of, layer)
        matrices = _matrices_of_state(of)
    matrices |= {
        f"ffn_gate{end}": (*lead, of.ffn, of.width), f"ffn_up{end}": (*lead, of.ffn, of.width),
        f"ffn_down{end}": (*lead, of.width, of.ffn),
    }  # fmt: skip
    if of.num_experts and is_delta:
        matrices |= {
            "ffn_gate_shexp": (of.ffn, of.width), "ffn_up_shexp": (of.ffn, of.width),
            "ffn_down_shexp": (of.width, of.ffn),
        }  # fmt: skip
        yield f"blk.{layer}.ffn_gate_inp_shexp.weight", (of.width,), _F32_TENSOR
    for name in ("attn_norm", "post_attention_norm" if is_delta else "ffn_norm"):
        yield f"blk.{layer}.{name}.weight", (of.width,), _F32_TENSOR
    if (of.num_experts or is_delta) and not of.has_state(layer):
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"blk.{layer}.{name}.weight", (HEAD_DIM,), _F32_TENSOR
    if of.num_experts:
        router = f"blk.{layer}.ffn_gate_inp.weight"
        yield router, (of.num_experts, of.width), _F32_TENSOR
    for name, shape in matrices.items():
        # As Q4_K_M has it, where half of these are of the better type.
        is_better = name.startswith(("attn_v", "ffn_down")) and layer % 2 == 0
        yield f"blk.{layer}.{name}.weight", shape, _Q6_K if is_better else _Q4_K


def _vectors_of_state(of: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    assert of.delta_heads is not None
    num_keys, num_values = of.delta_heads
    mixed = (2 * num_keys + num_values) * HEAD_DIM
    vectors = {
        "ssm_dt.bias": (num_values,), "ssm_a": (num_values,), "ssm_conv1d.weight": (mixed, 4),
        "ssm_norm.weight": (HEAD_DIM,),
    }  # fmt: skip
    for name, shape in vectors.items():
        yield f"blk.{layer}.{name}", shape, _F32_TENSOR


def _matrices_of_state(of: Shape) -> dict[str, tuple[int, ...]]:
    assert of.delta_heads is not None
    num_keys, num_values = of.delta_heads
    is_joined = of.arch == "qwen3next"
    gates = {"ssm_ba": 2} if is_joined else {"ssm_beta": 1, "ssm_alpha": 1}
    return {
        "attn_qkv": ((2 * num_keys + num_values) * HEAD_DIM, of.width),
        "attn_gate": (num_values * HEAD_DIM, of.width),
        **{name: (num * num_values, of.width) for name, num in gates.items()},
        "ssm_out": (of.width, num_values * HEAD_DIM),
    }


def _tensors(of: Shape, num_layers: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    yield _TABLE, (of.vocab, of.width), _Q4_K
    for layer in range(num_layers):
        yield from _layer(of, layer)
    yield "output_norm.weight", (of.width,), _F32_TENSOR
    yield "output.weight", (of.vocab, of.width), _Q6_K


def _fields(of: Shape, num_layers: int, num_heads: int = 0) -> list[bytes]:
    own = {
        "context_length": 8192, "embedding_length": of.width, "block_count": num_layers + num_heads,
        "feed_forward_length": of.ffn, "attention.head_count": of.num_heads,
        "attention.head_count_kv": of.num_kv_heads, "rope.dimension_count": HEAD_DIM,
        "vocab_size": of.vocab, "nextn_predict_layers": num_heads,
    }  # fmt: skip
    if of.num_experts:
        own |= {
            "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM,
            "expert_count": of.num_experts, "expert_used_count": of.num_used,
            "expert_feed_forward_length": of.ffn,
        }  # fmt: skip
    if of.delta_heads is not None:
        num_keys, num_values = of.delta_heads
        own |= {
            "ssm.conv_kernel": 4, "ssm.state_size": HEAD_DIM, "ssm.group_count": num_keys,
            "ssm.time_step_rank": num_values, "ssm.inner_size": num_values * HEAD_DIM,
            "full_attention_interval": 4, "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM,
        }  # fmt: skip
        own |= {"expert_shared_feed_forward_length": of.ffn} if of.num_experts else {}
    numbers = {f"{of.arch}.{key}": number for key, number in own.items()}
    numbers |= {
        "general.file_type": 15, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    floats = {
        f"{of.arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{of.arch}.rope.freq_base": 500000.0,
    }
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"\u2581w{number}" for number in range(of.vocab - len(tokens))]
    sections = np.array([22, 22, 20, 0], np.int32)  # as columns of a head are rotated, in pairs
    kinds = [2, 3, 3, *[6] * 256, *[1] * (of.vocab - 259)]
    return [
        _text("general.architecture") + struct.pack("<I", _STRING) + _text(of.arch),
        _text("tokenizer.ggml.model") + struct.pack("<I", _STRING) + _text("llama"),
        *(_text(k) + struct.pack("<II", _U32, number) for k, number in numbers.items()),
        *(_text(k) + struct.pack("<If", _F32, number) for k, number in floats.items()),
        *(
            [_array(f"{of.arch}.rope.dimension_sections", _I32, sections, 4)]
            * (of.arch == "qwen35")
        ),
        _array("tokenizer.ggml.tokens", _STRING, b"".join(map(_text, tokens)), of.vocab),
        _array("tokenizer.ggml.scores", _F32, -np.arange(of.vocab, dtype=np.float32), of.vocab),
        _array("tokenizer.ggml.token_type", _I32, np.array(kinds, np.int32), of.vocab),
    ]


def _array(name: str, kind: int, data: Any, size: int) -> bytes:
    raw = data if isinstance(data, bytes) else data.tobytes()
    return _text(name) + struct.pack("<IIQ", _ARRAY, kind, size) + raw


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _num_bytes(shape: tuple[int, ...], kind: int) -> int:
    num_weights = int(np.prod(shape))
    return 4 * num_weights if kind == _F32_TENSOR else num_weights // 256 * _NUM_BYTES[kind]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


if __name__ == "__main__":
    if sys.argv[2:3] and sys.argv[2] in SHAPES:  # PATH SHAPE QUALITY [QUALITY OF A HEAD]
        shape = SHAPES[sys.argv[2]]
        write(Path(sys.argv[1]), shape, shape.num_layers, *map(float, sys.argv[3:5]))
    else:
        write_8b(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
