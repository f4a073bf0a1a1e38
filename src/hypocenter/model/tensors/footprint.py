"""How much host memory a model will take, and how much there is; allocates nothing itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from hypocenter.base.errors import BadSetting, ModelTooLarge
from hypocenter.base.tensor import DType
from hypocenter.base.wording import bytes_text
from hypocenter.device.backend import Room
from hypocenter.kernels.attention.attention_cpu import num_part_floats
from hypocenter.kernels.experts.experts_table import ExpertsShape
from hypocenter.kernels.linear.linear_gate import may_join
from hypocenter.kernels.linear.operands import operand_bytes
from hypocenter.kernels.weights.cpu_layout import held_as, packed_bytes
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.experts import Experts
from hypocenter.model.facts.latent import Latent
from hypocenter.model.facts.state_space import StateSpace
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.gguf.values import TensorInfo
from hypocenter.model.tensors.tensor_reader import norms_heads
from hypocenter.settings.config import KV_DTYPES, EngineConfig

_F32_BYTES = 4
#: What a convolution multiplies with, which is no matrix.
_TAPS = (".ssm_conv1d.weight", ".shortconv.conv.weight")
#: What begins the name of a layer's tensor. Names are the file's word: it may have more layers than
#: its metadata say, or none that is a number.
_OF_LAYER = re.compile(r"blk\.([0-9]{1,6})\.")
#: Tensors that are vectors, whatever their shape.
_FLAT = (".ssm_a", ".ssm_d", ".ssm_norm.weight", ".attn_q_norm.weight", ".attn_k_norm.weight")
#: What is held by head, whatever type the file has.
_BY_HEAD = (".attn_k_b.weight", ".attn_v_b.weight", ".attn_kv_b.weight")


def num_kv_blocks(config: EngineConfig, context_length: int) -> int:
    """Blocks of the KV cache, for a context of `context_length` tokens."""
    return -(-(config.kv_tokens or context_length) // config.block_size)


def num_state_slots(config: EngineConfig, facts: Architecture) -> tuple[int, int]:
    """Slots of states: for requests that run, and for checkpoints; 0 where no layer has any."""
    if facts.recurrence is None:
        return 0, 0
    return config.max_batch_requests, config.state_checkpoints if config.prefix_cache else 0


def kv_dtypes_for(facts: Architecture) -> dict[str, DType]:
    """Of `KV_DTYPES` those of which all heads of a model are whole blocks."""
    shapes = [facts.layers[layer] for layer in facts.attention_layers]
    return {
        name: dtype
        for name, dtype in KV_DTYPES.items()
        if all(shape.is_whole_blocks_of(dtype) for shape in shapes)
    }


def require_kv_dtype(facts: Architecture, name: str) -> None:
    """Raises BadSetting where heads of a model are no whole blocks of a type of `KV_DTYPES`."""
    if name in (known := kv_dtypes_for(facts)):
        return
    num_columns = KV_DTYPES[name].block_elements
    shapes = [facts.layers[layer] for layer in facts.attention_layers]
    sizes = {size for shape in shapes for size in (shape.head_dim, shape.value_dim)}
    odd = min(size for size in sizes if size % num_columns)
    limit = f"heads of {odd} columns are no whole blocks of {num_columns}; use {' or '.join(known)}"
    raise BadSetting("kv_dtype", name, limit)


def needed_bytes(
    file: GGUFFile, facts: Architecture, config: EngineConfig, context_length: int
) -> dict[str, int]:
    """Bytes by purpose that a model takes for a context of `context_length` tokens, on the CPU.

    What packing a tensor holds for a moment, a slab of its rows, is not counted.
    """
    num_blocks = num_kv_blocks(config, context_length)
    num_running, num_checkpoints = num_state_slots(config, facts)
    per_token = facts.kv_bytes_per_token(KV_DTYPES[config.kv_dtype])
    of_attention = facts.widest_q, facts.widest_attended, facts.widest_kv, facts.widest_kv
    widths = (*(facts.width, *facts.dense_widths) * 2, *of_attention)
    per_logit_row = padded_rows(facts.vocab_size)
    if facts.vocab_size % padded_rows(1):
        per_logit_row += facts.vocab_size
    numbers_per_token = sum(padded_rows(width) for width in widths)
    if facts.input_width:
        numbers_per_token += (facts.num_layers + 2) * padded_rows(facts.input_width)
    if facts.family.gates_attention:
        numbers_per_token += padded_rows(facts.widest_q)
    if (latent := facts.latent) is not None:
        numbers_per_token += padded_rows(facts.num_heads * latent.widest)
        numbers_per_token += padded_rows(latent.query_rank)
    if (recurrence := facts.recurrence) is not None:
        numbers_per_token += sum(padded_rows(width) for width in recurrence.buffer_widths)
    activations = config.step_tokens * numbers_per_token
    logits = config.max_batch_requests * per_logit_row
    max_context = min(num_blocks * config.block_size, context_length)
    parts = sum(
        num_part_floats(config.step_tokens, facts.num_heads, *of_pages, max_context)
        for of_pages in {(shape.num_kv_heads, shape.value_pitch) for shape in facts.layers}
    )
    in_bf16, max_rows = config.float_products == "bf16", config.step_tokens
    held = held_dtypes(file, facts, in_bf16=in_bf16)
    # What all products read, and codes of what gates let through.
    widest = max(facts.width, facts.mixer_width, facts.dense_width)
    operands = operand_bytes(held, max_rows, widest, in_bf16=in_bf16)
    operands += operand_bytes(held, max_rows, facts.dense_width, in_bf16=False)
    mixture = 0
    if facts.experts is not None:
        mixture = _mixture_bytes(file, facts, facts.experts, max_rows, in_bf16=in_bf16)
    return {
        "weights": sum(
            _weight_bytes(info, facts)
            for info in file.tensors.values()
            if not (facts.passes_over(info.name) or _is_folded(file, info.name))
        )
        + _made_up_bytes(file, facts),
        "KV cache": num_blocks * config.block_size * per_token,
        **({"states": num_running * facts.state_bytes} if recurrence else {}),
        **({"checkpoints": num_checkpoints * facts.state_bytes} if recurrence else {}),
        "rope tables": _rope_bytes(facts, context_length),
        "activations": (activations + logits + parts) * _F32_BYTES + operands + mixture,
    }


def _is_folded(file: GGUFFile, name: str) -> bool:
    """Whether a tensor becomes part of the weight of NVFP4 that it stands beside."""
    whose, _, kind = name.rpartition(".")
    weight = file.tensors.get(f"{whose}.weight")
    return kind in ("scale", "input_scale") and weight is not None and weight.dtype is DType.NVFP4


def _made_up_bytes(file: GGUFFile, facts: Architecture) -> int:
    """The zeros that layer norms add whose file has no biases; the ones that norm values."""
    is_missing = facts.family.layer_norms and "output_norm.bias" not in file.tensors
    lengths = {facts.width} if is_missing else set()
    if norms_heads(file, facts):
        lengths.add(facts.q_width(0))
    num_floats = sum(map(padded_rows, lengths))
    if facts.family.norms_values:
        num_floats += sum(padded_rows(size) for size in {shape.head_dim for shape in facts.layers})
    return num_floats * _F32_BYTES


def _mixture_bytes(
    file: GGUFFile, facts: Architecture, experts: Experts, max_rows: int, *, in_bf16: bool
) -> int:
    """What `MixtureBuffers` holds for steps of `max_rows` tokens."""
    choice, pitch, inner = experts.choice, padded_rows(facts.width), padded_rows(experts.width)
    shape = ExpertsShape(max_rows, choice.num_experts, choice.num_used, "cpu")
    numbers = max_rows * (3 * choice.num_used + 1) + 3 * shape.most_groups + shape.num_rows
    numbers += 3 + choice.num_experts
    numbers += max_rows * padded_rows(choice.num_experts + choice.has_gate)
    has_shared = experts.shared_width > 0 or facts.is_dense(facts.num_layers - 1)
    numbers += shape.num_rows * pitch + (max_rows * pitch if has_shared else 0)
    read: set[DType] = set()
    given: set[DType] = set()
    is_split = False
    for layer in range(experts.num_dense, facts.num_layers):
        joint = f"blk.{layer}.ffn_gate_up_exps.weight"
        kinds = ("gate_up", "gate_up", "down") if joint in file.tensors else ("gate", "up", "down")
        names = [f"blk.{layer}.ffn_{kind}_exps.weight" for kind in kinds]
        dtypes = [file.tensors[name].dtype for name in names if name in file.tensors]
        if len(dtypes) < len(names):
            continue  # told of when they are loaded
        family = facts.family.experts
        is_split |= not may_join(dtypes) or (family is not None and family.is_biased)
        widths = (facts.width, facts.width, experts.width)
        held = [
            held_as(dtype, width, in_bf16=in_bf16)
            for dtype, width in zip(dtypes, widths, strict=True)
        ]
        read |= {*held[:2]}
        given.add(held[2])
    if is_split:
        numbers += 2 * shape.num_rows * inner
    operands = operand_bytes(read, shape.num_rows, facts.width, in_bf16=in_bf16)
    operands += operand_bytes(given, shape.num_rows, experts.width, in_bf16=in_bf16)
    return numbers * _F32_BYTES + operands


def require_room(
    file: GGUFFile, facts: Architecture, config: EngineConfig, context_length: int
) -> None:
    """Raise ModelTooLarge when `needed_bytes` exceed the memory that is available.

    Where the system tells nothing of its memory, nothing is checked.
    """
    room = host_room()
    needed = needed_bytes(file, facts, config, context_length)
    num_bytes = sum(needed.values())
    if room is None or num_bytes <= room.available_bytes:
        return
    parts = ", ".join(f"{name} {bytes_text(part)}" for name, part in needed.items())
    num_used = max(room.limit_bytes - room.available_bytes, 0)
    settings: tuple[str, ...] = ("context_length",)
    if config.kv_tokens is not None:
        settings = ("kv_tokens", *settings)
    raise ModelTooLarge("cpu", num_bytes, num_used, room.limit_bytes, parts, settings)


def host_room(root: Path = Path("/")) -> Room | None:
    """The tightest of what the machine and this process's control groups have left, if known."""
    rooms = list(_group_rooms(root))
    machine = _fields(root / "proc/meminfo")
    if "MemAvailable:" in machine and "MemTotal:" in machine:
        rooms.append(Room(machine["MemAvailable:"] << 10, machine["MemTotal:"] << 10))
    return min(rooms, key=lambda room: room.available_bytes, default=None)


def _weight_bytes(info: TensorInfo, facts: Architecture) -> int:
    """A matrix as packed; one that is split first has each part's rows padded.

    One of a layer that the model has not, or with other axes, is refused when it is loaded.
    """
    if not info.shape:
        return padded_rows(1) * _F32_BYTES
    num_rows = info.in_axes(2)[0]
    if info.name.endswith(".ffn_gate_inp_shexp.weight"):
        return 0  # a row of the router
    if info.name.endswith(".layer_output_scale.weight"):
        return 0  # a number of the launch
    if info.name.startswith("rope_"):
        return 0  # the tables are made of it
    if info.name.endswith(".ffn_gate_inp.weight"):
        num_gates = facts.experts.choice.has_gate if facts.experts else 0
        return packed_bytes(DType.F32, num_rows + num_gates, info.shape[-1])
    if facts.latent is not None and (num_bytes := _latent_bytes(info, facts, facts.latent)):
        return num_bytes
    if info.name.endswith(".ffn_gate_up_exps.weight") and len(info.shape) <= 3:
        num_experts, both, num_columns = info.in_axes(3)
        return 2 * packed_bytes(info.dtype, num_experts, both // 2, num_columns)
    if len(info.shape) == 3:
        return packed_bytes(info.dtype, *info.shape)
    if info.name.endswith("_exps.bias"):
        return num_rows * padded_rows(info.shape[-1]) * _F32_BYTES
    if len(info.shape) != 2 or info.name.endswith(_FLAT):
        return padded_rows(math.prod(info.shape)) * _F32_BYTES
    if info.name.endswith(_TAPS):
        return info.shape[1] * padded_rows(num_rows) * _F32_BYTES
    if info.name == "per_layer_token_embd.weight":
        return facts.num_layers * packed_bytes(info.dtype, num_rows, facts.input_width)
    return sum(
        packed_bytes(info.dtype, count, info.shape[1]) for count in _parts(info, facts, num_rows)
    )


def _parts(info: TensorInfo, facts: Architecture, num_rows: int) -> tuple[int, ...]:
    """Numbers of rows of the matrices into which this one is split."""
    if info.name == "per_layer_model_proj.weight":
        return (facts.input_width,) * facts.num_layers
    is_halved = info.name.endswith(".attn_q.weight") and facts.family.gates_attention
    if is_halved or info.name.endswith(".ssm_ba.weight"):
        return num_rows // 2, num_rows // 2
    if info.name.endswith(".shortconv.in_proj.weight"):
        return (num_rows // 3,) * 3
    if info.name.endswith(".ssm_in.weight") and isinstance(facts.recurrence, StateSpace):
        return facts.recurrence.part_rows
    found = _OF_LAYER.match(info.name)
    layer = int(found[1]) if found else facts.num_layers
    if layer < facts.num_layers and info.name.endswith((".attn_qkv.weight", ".ffn_up.weight")):
        shape = facts.layers[layer]
        if info.name.endswith(".attn_qkv.weight"):
            if facts.recurrence is None:
                return facts.num_heads * shape.head_dim, shape.kv_width, shape.kv_width
        elif facts.family.fused_gate_up:
            return shape.ffn_width, shape.ffn_width
    return (num_rows,)


def _latent_bytes(info: TensorInfo, facts: Architecture, latent: Latent) -> int:
    """What makes latents, as packed; what makes keys or values of them, or both, as numbers of f16
    or f32; 0: any other tensor."""
    if info.name.endswith(".attn_kv_a_mqa.weight") and len(info.shape) == 2:
        parts = latent.rank, latent.turned_dim
        return sum(packed_bytes(info.dtype, count, info.shape[1]) for count in parts)
    if not info.name.endswith(_BY_HEAD):
        return 0
    number = 4 if info.dtype in (DType.F32, DType.BF16) else 2
    of_keys = latent.plain_dim * padded_rows(latent.rank)
    of_values = latent.rank * padded_rows(latent.value_dim)
    sizes = {"attn_k_b": of_keys, "attn_v_b": of_values, "attn_kv_b": of_keys + of_values}
    return number * facts.num_heads * sizes[info.name.split(".")[-2]]


def held_dtypes(file: GGUFFile, facts: Architecture, *, in_bf16: bool) -> set[DType]:
    """The types that the CPU holds the matrices as that activations are multiplied with."""
    tables = {"token_embd.weight"} if "output.weight" in file.tensors else set()
    tables.add("per_layer_token_embd.weight")
    matrices = (
        info
        for info in file.tensors.values()
        if len(info.shape) > 1
        and info.name not in tables
        and not info.name.endswith((".bias", *_TAPS, *_BY_HEAD, *_FLAT))
        and not facts.passes_over(info.name)
    )
    return {
        held_as(info.dtype, info.shape[-1], in_bf16=in_bf16)
        for info in matrices
        if not info.name.endswith(
            ".ffn_gate_inp.weight"
        )  # F32, which takes activations as they are
    }


def _rope_bytes(facts: Architecture, context_length: int) -> int:
    """Tables of cosines and sines in f32, and the f64 angles, cosines and sines of one."""
    pairs = [facts.rope.dim // 2] * (1 + facts.scales_queries(context_length))
    if facts.local_rope != facts.rope:
        pairs.append(facts.local_rope.dim // 2)
    if facts.rope.scaling == "longrope" and context_length > facts.rope.original_context:
        pairs.append(facts.rope.dim // 2)
    return context_length * (sum(pairs) * 2 * _F32_BYTES + max(pairs) * 3 * 8)


def _group_rooms(root: Path) -> Iterator[Room]:
    """What each limited control group around this process has left.

    File names and meanings are those of the kernel's cgroup-v2.rst and cgroup-v1/memory.rst. Pages
    of files count as free, as in MemAvailable: the kernel drops them when memory runs short.
    """
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, prefix = mount, ""
            names = ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, prefix = mount / "memory", "total_"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        # In a container the path may be that of the host: then only the mount itself is there.
        for group in (folder, *folder.parents):
            if not group.is_relative_to(base):
                break
            limit, usage = (_text(group / name).strip() for name in names)
            if limit.isdecimal() and usage.isdecimal():
                stat = _fields(group / "memory.stat")
                cached = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                yield Room(max(int(limit) - int(usage) + cached, 0), int(limit))


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number, as the kernel writes them."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _text(path: Path) -> str:
    """The contents of a file of the kernel; empty where there is none."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
