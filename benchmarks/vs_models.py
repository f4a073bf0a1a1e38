"""Synthetic models of named shapes as GGUF files in a cache folder; runs no model itself.

Random weights cost the same time as trained ones. They are scaled so that the rest looks real too:
logits with a standard deviation near LOGIT_STD, attention that is not flat, and a few channels
whose norm weights are OUTLIER times the others', which is what makes activations hard to round.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

PEER_WORKER = Path(__file__).with_name("vs_peer_worker.py")
#: Counts up when the weights of a shape change, so that old files are not taken for new ones.
RECIPE = 1
SEED = 5
LOGIT_STD = 3.0
BRANCH_SHARE = 0.1  # of the embedding's standard deviation, what one branch adds to the residual
OUTLIER, OUTLIER_SHARE = 10.0, 0.002
QUANTISE_SECONDS = 1800
GPT_OSS_WINDOW = 128
#: The file type of which experts alone are MXFP4, and other matrices Q8_0.
OF_EXPERTS = "MXFP4_MOE"
_PRETOKENIZERS = {"qwen2": "qwen2", "qwen3moe": "qwen2", "gpt-oss": "gpt-4o"}

Array = np.ndarray[Any, Any]


class BenchmarkError(Exception):
    """What stops the benchmark, in one line for whoever started it."""


@dataclass(frozen=True, slots=True)
class Experts:
    """What takes the place of each layer's feed-forward: a token takes `num_used` of `num`."""

    num: int
    num_used: int
    width: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a published model (its config.json); `context_length` is long enough to measure."""

    name: str
    arch: str
    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    is_tied: bool
    rope_base: float
    norm_eps: float
    context_length: int
    has_qkv_bias: bool = False
    #: Llama 3.1's stretching of low frequencies, or yarn's: factor and original context.
    rope_stretch: tuple[float, int] | None = None
    #: Where they are not as wide together as the model.
    head_width: int | None = None
    #: Too large to be made as F32 first, and so of random blocks.
    experts: Experts | None = None
    #: What is measured where nothing else is asked for; None: all types that have targets.
    usual_type: str | None = None

    @property
    def head_dim(self) -> int:
        return self.head_width or self.width // self.num_heads

    @property
    def num_weights(self) -> int:
        return sum(int(np.prod(shape)) for _, shape, _ in tensors_of(self))

    @property
    def num_weights_used(self) -> int:
        """Of those that a token of a prompt is multiplied with: all but embedding and head."""
        num = -self.vocab_size * self.width * (1 if self.is_tied else 2)
        for name, shape, _ in tensors_of(self):
            of_tensor = int(np.prod(shape))
            if self.experts and "_exps." in name:
                of_tensor = of_tensor // self.experts.num * self.experts.num_used
            num += of_tensor
        return num

    def cut(self, num_layers: int | None) -> Shape:
        """The first layers of it; None: all."""
        if num_layers is None or num_layers >= self.num_layers:
            return self
        return replace(self, name=f"{self.name}-{num_layers}-layers", num_layers=num_layers)

    def kv_bytes(self, num_positions: int) -> int:
        """Of a cache in f16."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim * num_positions


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tinyllama-1.1b", "llama", 22, 2048, 5632, 32, 4, 32000, False, 1e4, 1e-5, 4096),
        Shape(
            "llama-3.2-1b", "llama", 16, 2048, 8192, 32, 8, 128256, True, 5e5, 1e-5, 8192,
            rope_stretch=(32.0, 8192),
        ),
        Shape(
            "qwen2.5-0.5b", "qwen2", 24, 896, 4864, 14, 2, 151936, True, 1e6, 1e-6, 8192,
            has_qkv_bias=True,
        ),
        Shape(
            "llama-3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128256, False, 5e5, 1e-5, 131072,
            rope_stretch=(8.0, 8192),
        ),
        Shape(
            "qwen3-30b-a3b", "qwen3moe", 48, 2048, 6144, 32, 4, 151936, False, 1e6, 1e-6, 32768,
            head_width=128, experts=Experts(128, 8, 768), usual_type="Q4_K_M",
        ),
        Shape(
            "gpt-oss-20b", "gpt-oss", 24, 2880, 2880, 64, 8, 201088, False, 1.5e5, 1e-5, 32768,
            rope_stretch=(32.0, 4096), head_width=64, experts=Experts(32, 4, 2880),
            usual_type=OF_EXPERTS,
        ),
        # Seconds instead of minutes, to try the benchmark itself.
        Shape("toy", "llama", 2, 256, 512, 4, 2, 1024, False, 1e4, 1e-5, 4096),
        Shape(
            "toy-qwen3moe", "qwen3moe", 2, 256, 512, 4, 2, 1024, False, 1e4, 1e-6, 4096,
            head_width=128, experts=Experts(8, 2, 256), usual_type="Q4_K_M",
        ),
        Shape(
            "toy-gpt-oss", "gpt-oss", 2, 256, 256, 4, 2, 1024, False, 1e4, 1e-5, 4096,
            rope_stretch=(32.0, 1024), head_width=64, experts=Experts(8, 2, 256),
            usual_type=OF_EXPERTS,
        ),
    )
}  # fmt: skip


def may_have(shape: Shape, kind: str) -> bool:
    """Whether there are files of that type."""
    return kind != OF_EXPERTS or shape.experts is not None


def original(shape: Shape, folder: Path) -> Path:
    """The F32 file of `shape` in `folder`, made if it is not there yet."""
    path = folder / f"{shape.name}-{digest(shape)}-F32.gguf"
    if not path.exists():
        require_disk(folder, 4 * shape.num_weights)
        with written_whole(path) as partial:
            _write(shape, partial)
    return path


def quantised(source: Path, kind: str, peer: Path, num_threads: int) -> Path:
    """`source` as file type `kind`, made by llama.cpp's own quantiser if it is not there yet."""
    path = source.with_name(source.name.replace("-F32", f"-{kind}"))
    if not path.exists():
        require_disk(source.parent, source.stat().st_size)
        with written_whole(path) as partial:
            run_peer(peer, "quantise", str(source), str(partial), kind, str(num_threads))
    return path


def run_peer(peer: Path, *arguments: str) -> str:
    """What the peer's worker prints. Raises BenchmarkError with the last line of its complaint."""
    try:
        done = subprocess.run(
            [str(peer), str(PEER_WORKER), *arguments],
            capture_output=True, text=True, timeout=QUANTISE_SECONDS,
        )  # fmt: skip
    except OSError as error:
        raise BenchmarkError(f"{peer} does not start: {error.strerror}") from error
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise BenchmarkError(f"{peer}: {PEER_WORKER.name} {arguments[0]}: {last}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the file itself says, read by the `gguf` package and by neither engine."""

    file_type: str
    #: The tensor type that most bytes are in.
    main_dtype: str
    num_bytes: int
    #: What every token reads: all but an embedding that is not the output head as well, and of
    #: experts those that it takes.
    bytes_per_token: int


def file_facts(path: Path) -> FileFacts:
    reader = gguf.GGUFReader(path)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    by_dtype: dict[str, int] = {}
    for tensor in reader.tensors:
        name = tensor.tensor_type.name
        by_dtype[name] = by_dtype.get(name, 0) + int(tensor.n_bytes)
    field = reader.get_field("general.file_type")
    assert field is not None
    file_type = gguf.LlamaFileType(int(field.contents())).name
    unread = sizes["token_embd.weight"] if "output.weight" in sizes else 0
    experts = sum(size for name, size in sizes.items() if "_exps." in name)
    if experts:
        arch = reader.get_field("general.architecture").contents()
        num, num_used = (
            int(reader.get_field(f"{arch}.expert_{key}").contents())
            for key in ("count", "used_count")
        )
        unread += experts - experts * num_used // num
    return FileFacts(
        file_type=file_type.removeprefix("MOSTLY_").removeprefix("ALL_"),
        main_dtype=max(by_dtype, key=lambda name: by_dtype[name]),
        num_bytes=path.stat().st_size,
        bytes_per_token=sum(sizes.values()) - unread,
    )


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A name beside `path` that becomes `path` when the block ends well, and goes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays: numpy would add its own to another one.
    partial = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def require_disk(folder: Path, num_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    num_free = shutil.disk_usage(folder).free
    if num_free < num_bytes + (1 << 30):
        raise BenchmarkError(
            f"{folder} has {num_free / 1e9:.1f} GB free, but a model of {num_bytes / 1e9:.1f} GB "
            "and 1 GB to spare must fit; name another folder with --models"
        )


def digest(shape: Shape) -> str:
    recipe = [RECIPE, SEED, LOGIT_STD, BRANCH_SHARE, OUTLIER, OUTLIER_SHARE, asdict(shape)]
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:10]


def opened(shape: Shape, path: Path, file_type: Any) -> Any:
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_file_type(file_type)
    _add_metadata(writer, shape)
    (_add_sentencepiece if shape.name == "tinyllama-1.1b" else _add_bytes)(writer, shape)
    return writer


def write_head(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _write(shape: Shape, path: Path) -> None:
    writer = opened(shape, path, gguf.LlamaFileType.ALL_F32)
    tensors = list(tensors_of(shape))
    for name, sizes, _ in tensors:
        writer.add_tensor_info(name, sizes, np.dtype(np.float32), 4 * int(np.prod(sizes)))
    write_head(writer)
    for name, sizes, scale in tensors:
        writer.write_tensor_data(values_of(shape, name, sizes, scale))
    writer.close()


def tensors_of(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Name, shape and standard deviation (norms: scale) of each tensor, in file order."""
    width, heads = shape.width, shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    embedding = LOGIT_STD / width**0.5
    branch = BRANCH_SHARE * embedding
    is_gpt_oss = shape.arch == "gpt-oss"
    yield "token_embd.weight", (shape.vocab_size, width), embedding
    if shape.rope_stretch and not is_gpt_oss:
        yield "rope_freqs.weight", (shape.head_dim // 2,), 1.0
    for index in range(shape.num_layers):
        matrices: dict[str, tuple[int, int, float]] = {
            # Scores are then about as spread as their heads are wide: attention has favourites.
            "attn_q": (heads, width, 1.3), "attn_k": (kv, width, 1.3), "attn_v": (kv, width, 1.0),
            "attn_output": (width, heads, 2 * branch),  # averaging values makes them smaller
        }  # fmt: skip
        if shape.experts is None:
            matrices |= _feed_forward(shape.ffn_width, width, branch)
        for name in ("attn_norm", "post_attention_norm" if is_gpt_oss else "ffn_norm"):
            yield f"blk.{index}.{name}.weight", (width,), 1.0
        if shape.arch == "qwen3moe":
            for name in ("attn_q_norm", "attn_k_norm"):
                yield f"blk.{index}.{name}.weight", (shape.head_dim,), 1.0
        for name, (num_rows, num_columns, gain) in matrices.items():
            scale = gain / num_columns**0.5
            yield f"blk.{index}.{name}.weight", (num_rows, num_columns), scale
            if is_gpt_oss or (shape.has_qkv_bias and name in ("attn_q", "attn_k", "attn_v")):
                yield f"blk.{index}.{name}.bias", (num_rows,), branch if is_gpt_oss else 0.3
        if is_gpt_oss:
            yield f"blk.{index}.attn_sinks.weight", (shape.num_heads,), 1.0
        if shape.experts:
            yield from _experts(shape.experts, f"blk.{index}.", width, branch, is_gpt_oss)
    yield "output_norm.weight", (width,), 1.0
    if not shape.is_tied:
        yield "output.weight", (shape.vocab_size, width), embedding


def _feed_forward(ffn: int, width: int, branch: float) -> dict[str, tuple[int, int, float]]:
    return {
        "ffn_gate": (ffn, width, 1.0), "ffn_up": (ffn, width, 1.0),
        "ffn_down": (width, ffn, 1.7 * branch),  # silu(gate) * up has a deviation near 0.6
    }  # fmt: skip


def _experts(
    experts: Experts, prefix: str, width: int, branch: float, has_biases: bool
) -> Iterator[tuple[str, tuple[int, ...], float]]:
    yield f"{prefix}ffn_gate_inp.weight", (experts.num, width), width**-0.5
    if has_biases:
        yield f"{prefix}ffn_gate_inp.bias", (experts.num,), 0.3
    for name, (num_rows, num_columns, gain) in _feed_forward(experts.width, width, branch).items():
        scale = gain / num_columns**0.5
        yield f"{prefix}{name}_exps.weight", (experts.num, num_rows, num_columns), scale
        if has_biases:
            yield f"{prefix}{name}_exps.bias", (experts.num, num_rows), branch


def values_of(shape: Shape, name: str, sizes: tuple[int, ...], scale: float) -> Array:
    generator = np.random.default_rng([SEED, *name.encode()])
    if name == "rope_freqs.weight":
        return _rope_divisors(shape)
    if "norm" in name:
        return _norm(generator, sizes[0], name)
    values = generator.standard_normal(sizes, np.float32)
    values *= np.float32(scale)
    return values


def _norm(generator: np.random.Generator, width: int, name: str) -> Array:
    """Positive weights of mean square 1, some of them outliers."""
    weights = generator.uniform(0.5, 1.5, width)
    if name == "output_norm.weight":
        # Otherwise a tied head would find the very token that was read last.
        weights *= generator.choice([-1.0, 1.0], width)
    else:
        weights[generator.permutation(width)[: round(width * OUTLIER_SHARE)]] *= OUTLIER
    weights /= np.sqrt(np.mean(weights**2))
    return np.asarray(weights, np.float32)


def _rope_divisors(shape: Shape) -> Array:
    """Frequency divisors of Llama 3.1 (transformers `_compute_llama3_parameters`)."""
    assert shape.rope_stretch is not None
    (factor, old_context), low, high = shape.rope_stretch, 1.0, 4.0
    wavelengths = 2 * np.pi * shape.rope_base ** (np.arange(0, shape.head_dim, 2) / shape.head_dim)
    smooth = np.clip((old_context / wavelengths - low) / (high - low), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float32)


def _add_metadata(writer: Any, shape: Shape) -> None:
    writer.add_name(f"{shape.name} with random weights")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn_width)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab_size)
    if shape.head_width:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    if shape.experts:
        writer.add_expert_count(shape.experts.num)
        writer.add_expert_used_count(shape.experts.num_used)
        writer.add_expert_feed_forward_length(shape.experts.width)
    if shape.arch == "gpt-oss":
        assert shape.rope_stretch is not None
        writer.add_sliding_window(GPT_OSS_WINDOW)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(shape.rope_stretch[0])
        writer.add_rope_scaling_orig_ctx_len(shape.rope_stretch[1])


def _add_bytes(writer: Any, shape: Shape) -> None:
    """Byte-pair encoding with the 256 bytes and one merge; the other tokens are unused."""
    # GPT-2's printable stand-in for each byte value (openai/gpt-2 `bytes_to_unicode`).
    own = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    alphabet = [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]
    tokens = ["<|unk|>", "<|bos|>", "<|eos|>", *alphabet, "th"]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 257
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRETOKENIZERS.get(shape.arch, "llama-bpe"))
    _add_tokens(writer, shape, tokens, types)
    writer.add_token_merges(["t h"])


def _add_sentencepiece(writer: Any, shape: Shape) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "e", "t"]
    types = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2
    types += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * 3
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    _add_tokens(writer, shape, tokens, types)
    writer.add_token_scores([-float(id) for id in range(shape.vocab_size)])
    writer.add_unk_token_id(0)


def _add_tokens(writer: Any, shape: Shape, tokens: list[str], types: list[Any]) -> None:
    unused = [f"[PAD{id}]" for id in range(len(tokens), shape.vocab_size)]
    writer.add_token_list(tokens + unused)
    writer.add_token_types(types + [gguf.TokenType.UNUSED] * len(unused))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
