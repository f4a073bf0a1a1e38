"""The lab's model: a llama of 2 layers, width 64 and 512 tokens, made from a fixed seed.

Its numbers mean nothing; they only have to be the same everywhere, and to react to every defect.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.settings.environment import Environment

VOCAB_SIZE, WIDTH, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, FFN_WIDTH = (
    512, 64, 2, 4, 2, 16, 96,
)  # fmt: skip
CONTEXT_LENGTH = 1 << 16
#: Of the model with states.
KEY_DIM, VALUE_DIM, NUM_TAPS = 16, 64, 4
#: Types that a matrix of the lab model may have.
FORMATS = ("q8_0", "f32")

# Source of the layout: the GGUF specification of ggml (docs/gguf.md), version 3.
_MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
_U32, _I32, _F32, _STRING, _ARRAY = 4, 5, 6, 8, 9
_F32_TENSOR, _Q8_0_TENSOR, _Q8_0_BLOCK = 0, 8, 32
_NORMAL, _CONTROL = 1, 3


def model_path(kind: str = "f32", *, nan_in: str = "", rope_base: float = 10000.0) -> Path:
    """The file of the lab model with matrices of type `kind`; written when it is not there.

    `nan_in` names a tensor whose first number is NaN.
    """
    content = build(kind, nan_in=nan_in, rope_base=rope_base)
    name = f"lab-{kind}{'-nan' * bool(nan_in)}{f'-{rope_base:g}' * (not rope_base)}.gguf"
    return _write(name, content)


def state_model_path() -> Path:
    """The file of a model like it whose first layer is a Gated Delta Net."""
    tensors = [(name, *_encode(values, "f32")) for name, values in _state_tensors().items()]
    return _write("lab-states.gguf", _assemble(_state_fields(), tensors))


def _write(name: str, content: bytes) -> Path:
    folder = Environment.read().cache_dir / "lab"
    path = folder / name
    if not path.is_file() or path.read_bytes() != content:
        folder.mkdir(parents=True, exist_ok=True)
        # Another process may be about to do the same.
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(content)
        own.replace(path)
    return path


def build(kind: str = "f32", *, nan_in: str = "", rope_base: float = 10000.0) -> bytes:
    """The model as the bytes of a GGUF file."""
    numbers = _tensors()
    if nan_in:
        numbers[nan_in][0, 0] = np.nan
    tensors = [(name, *_encode(values, kind)) for name, values in numbers.items()]
    return _assemble(_fields(rope_base), tensors)


def _assemble(
    fields: dict[str, bytes], tensors: list[tuple[str, tuple[int, ...], int, bytes]]
) -> bytes:
    head = _MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(fields))
    head += b"".join(_text(key) + value for key, value in fields.items())
    offset, body = 0, b""
    for name, shape, tensor_type, data in tensors:
        dims = shape[::-1]  # the format counts the fastest axis first
        head += _text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        head += struct.pack("<IQ", tensor_type, offset)
        padded = data + bytes(-len(data) % _ALIGNMENT)
        offset, body = offset + len(padded), body + padded
    return head + bytes(-len(head) % _ALIGNMENT) + body


def _tensors() -> dict[str, Array]:
    """Matrices large enough that attention and feed-forward outweigh what flows past them."""
    matrix, norm = _make_draws()
    tensors = {"token_embd.weight": matrix(VOCAB_SIZE, WIDTH, 8.0)}
    heads, kv_heads = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    for index in range(NUM_LAYERS):
        tensors |= {
            f"blk.{index}.{name}.weight": values
            for name, values in (
                ("attn_norm", norm()),
                ("attn_q", matrix(heads, WIDTH, 1.4)),
                ("attn_k", matrix(kv_heads, WIDTH, 1.4)),
                ("attn_v", matrix(kv_heads, WIDTH, 2.0)),
                ("attn_output", matrix(WIDTH, heads, 2.0)),
                ("ffn_norm", norm()),
                ("ffn_gate", matrix(FFN_WIDTH, WIDTH, 1.4)),
                ("ffn_up", matrix(FFN_WIDTH, WIDTH, 1.4)),
                ("ffn_down", matrix(WIDTH, FFN_WIDTH, 1.4)),
            )
        }
    return tensors | {"output_norm.weight": norm(), "output.weight": matrix(VOCAB_SIZE, WIDTH, 4.0)}


def _make_draws() -> tuple[Callable[[int, int, float], Array], Callable[..., Array]]:
    """Functions that draw a matrix of (rows, columns, gain), and a norm of (width)."""
    random = np.random.RandomState(20)  # its numbers are the same in every version of NumPy

    def matrix(rows: int, columns: int, gain: float) -> Array:
        values: Array = random.standard_normal((rows, columns)) * (gain / columns**0.5)
        return values.astype(np.float32)

    def norm(width: int = WIDTH) -> Array:
        values: Array = 1 + 0.1 * random.standard_normal(width)
        return values.astype(np.float32)

    return matrix, norm


def _state_tensors() -> dict[str, Array]:
    """A layer with one head of keys and one of values, and behind it one with attention."""
    matrix, norm = _make_draws()
    heads, kv_heads = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    mixed = 2 * KEY_DIM + VALUE_DIM
    each = {
        "attn_norm.weight": norm(),
        "post_attention_norm.weight": norm(),
        "ffn_gate.weight": matrix(FFN_WIDTH, WIDTH, 1.4),
        "ffn_up.weight": matrix(FFN_WIDTH, WIDTH, 1.4),
        "ffn_down.weight": matrix(WIDTH, FFN_WIDTH, 1.4),
    }
    first = {
        "attn_qkv.weight": matrix(mixed, WIDTH, 1.4),
        "attn_gate.weight": matrix(VALUE_DIM, WIDTH, 1.4),
        "ssm_beta.weight": matrix(1, WIDTH, 1.4),
        "ssm_alpha.weight": matrix(1, WIDTH, 1.4),
        "ssm_dt.bias": norm(1),
        "ssm_a": -0.05 * norm(1),  # so that it forgets little
        "ssm_conv1d.weight": matrix(mixed, NUM_TAPS, 1.4),
        "ssm_norm.weight": norm(VALUE_DIM),
        "ssm_out.weight": matrix(WIDTH, VALUE_DIM, 2.0),
    }
    second = {
        "attn_q.weight": matrix(2 * heads, WIDTH, 1.4),
        "attn_k.weight": matrix(kv_heads, WIDTH, 1.4),
        "attn_v.weight": matrix(kv_heads, WIDTH, 2.0),
        "attn_q_norm.weight": norm(HEAD_DIM),
        "attn_k_norm.weight": norm(HEAD_DIM),
        "attn_output.weight": matrix(WIDTH, heads, 2.0),
    }
    layers = {
        f"blk.{index}.{name}": values
        for index, own in enumerate((first, second))
        for name, values in {**each, **own}.items()
    }
    ends = {"output_norm.weight": norm(), "output.weight": matrix(VOCAB_SIZE, WIDTH, 4.0)}
    return {"token_embd.weight": matrix(VOCAB_SIZE, WIDTH, 8.0), **layers, **ends}


def _state_fields() -> dict[str, bytes]:
    fields = {
        key.replace("llama.", "qwen35."): value for key, value in _fields(rope_base=10000.0).items()
    }
    numbers = {
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "full_attention_interval": NUM_LAYERS,
        "ssm.conv_kernel": NUM_TAPS,
        "ssm.state_size": KEY_DIM,
        "ssm.group_count": 1,
        "ssm.time_step_rank": 1,
        "ssm.inner_size": VALUE_DIM,
    }
    own = {f"qwen35.{key}": _number(_U32, value) for key, value in numbers.items()}
    return {**fields, "general.architecture": _string("qwen35"), **own}


def _encode(values: Array, kind: str) -> tuple[tuple[int, ...], int, bytes]:
    if values.ndim == 1 or kind == "f32":
        return values.shape, _F32_TENSOR, values.astype("<f4").tobytes()
    blocks = values.reshape(-1, _Q8_0_BLOCK)
    scales = (np.abs(blocks).max(axis=1) / 127).astype("<f2")
    with np.errstate(invalid="ignore"):  # a victim's weight may be no number
        codes = np.rint(blocks / np.maximum(scales, 1e-7)[:, None].astype(np.float32))
        codes = np.nan_to_num(codes).clip(-127, 127).astype(np.int8)
    raw = np.concatenate([scales[:, None].view(np.int8), codes], axis=1)
    return values.shape, _Q8_0_TENSOR, raw.tobytes()


def _fields(rope_base: float) -> dict[str, bytes]:
    tokens, merges = _vocabulary()
    kinds = [_NORMAL] * (VOCAB_SIZE - 2) + [_CONTROL] * 2
    return {
        "general.architecture": _string("llama"),
        "general.name": _string("lab"),
        "llama.block_count": _number(_U32, NUM_LAYERS),
        "llama.context_length": _number(_U32, CONTEXT_LENGTH),
        "llama.embedding_length": _number(_U32, WIDTH),
        "llama.feed_forward_length": _number(_U32, FFN_WIDTH),
        "llama.attention.head_count": _number(_U32, NUM_HEADS),
        "llama.attention.head_count_kv": _number(_U32, NUM_KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": _number(_F32, 1e-5),
        "llama.rope.freq_base": _number(_F32, rope_base),
        "tokenizer.ggml.model": _string("gpt2"),
        "tokenizer.ggml.pre": _string("gpt-2"),
        "tokenizer.ggml.tokens": _array(_STRING, [_text(token) for token in tokens]),
        "tokenizer.ggml.token_type": _array(_I32, [struct.pack("<i", k) for k in kinds]),
        "tokenizer.ggml.merges": _array(_STRING, [_text(merge) for merge in merges]),
        "tokenizer.ggml.bos_token_id": _number(_U32, VOCAB_SIZE - 2),
        "tokenizer.ggml.eos_token_id": _number(_U32, VOCAB_SIZE - 1),
    }


def _vocabulary() -> tuple[list[str], list[str]]:
    """All bytes as GPT-2 writes them, pairs of letters, begin and end; and the pairs' merges."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {byte: chr(byte) for byte in shown}
    names |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    letters = "etaoinshrdlucmfwygpb"
    pairs = [(a, b) for a in letters for b in letters][: VOCAB_SIZE - 256 - 2]
    tokens = [names[byte] for byte in range(256)] + [a + b for a, b in pairs]
    return [*tokens, "<s>", "</s>"], [f"{a} {b}" for a, b in pairs]


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _string(text: str) -> bytes:
    return struct.pack("<I", _STRING) + _text(text)


def _number(kind: int, value: float) -> bytes:
    return struct.pack("<I" + {_U32: "I", _F32: "f"}[kind], kind, value)


def _array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IIQ", _ARRAY, kind, len(items)) + b"".join(items)
