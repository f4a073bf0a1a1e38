"""How much host memory a model will take, and how much there is; allocates nothing itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hypocenter.config import KV_DTYPES, EngineConfig, num_kv_blocks
from hypocenter.errors import OutOfMemory
from hypocenter.kernels.attention.attention_cpu import num_part_floats
from hypocenter.kernels.linear.operands import operand_bytes
from hypocenter.kernels.weights.cpu_layout import held_as, packed_bytes
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.architecture import Architecture
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.gguf.values import TensorInfo
from hypocenter.model.weights import is_draft
from hypocenter.tensor import DType

_F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that may still be taken, of how many in all."""

    available_bytes: int
    limit_bytes: int


def needed_bytes(
    file: GGUFFile, facts: Architecture, config: EngineConfig, context_length: int
) -> dict[str, int]:
    """Bytes by purpose that a model takes for a context of `context_length` tokens, on the CPU.

    What packing a tensor holds for a moment, a slab of its rows, is not counted.
    """
    num_blocks = num_kv_blocks(config, context_length)
    per_token = facts.kv_bytes_per_token(KV_DTYPES[config.kv_dtype].block_bytes)
    widths = (
        facts.width,
        facts.num_heads * facts.head_dim,
        facts.num_kv_heads * facts.head_dim,
        facts.ffn_width,
    )
    per_logit_row = padded_rows(facts.vocab_size)
    if facts.vocab_size % padded_rows(1):
        per_logit_row += facts.vocab_size
    activations = 2 * config.max_batch_tokens * sum(padded_rows(width) for width in widths)
    logits = config.max_batch_requests * per_logit_row
    parts = num_part_floats(
        config.max_batch_tokens,
        facts.num_heads,
        facts.num_kv_heads,
        -(-facts.head_dim // 16) * 16,
        min(num_blocks * config.block_size, context_length),
    )
    in_bf16, max_rows = config.float_products == "bf16", config.max_batch_tokens
    held = held_dtypes(file, facts, in_bf16=in_bf16)
    # What all products read, and codes of what gates let through.
    operands = operand_bytes(held, max_rows, max(widths), in_bf16=in_bf16)
    operands += operand_bytes(held, max_rows, facts.ffn_width, in_bf16=False)
    return {
        "weights": sum(
            _weight_bytes(info, facts)
            for info in file.tensors.values()
            if not is_draft(info.name, facts)
        ),
        "KV cache": num_blocks * config.block_size * per_token,
        "rope tables": _rope_bytes(facts, context_length),
        "activations": (activations + logits + parts) * _F32_BYTES + operands,
    }


def require_room(
    file: GGUFFile, facts: Architecture, config: EngineConfig, context_length: int
) -> None:
    """Raise OutOfMemory when `needed_bytes` exceed the memory that is available.

    Where the system tells nothing of its memory, nothing is checked.
    """
    room = host_room()
    needed = needed_bytes(file, facts, config, context_length)
    num_bytes = sum(needed.values())
    if room is None or num_bytes <= room.available_bytes:
        return
    parts = ", ".join(f"{name} {part}" for name, part in needed.items())
    num_used = max(room.limit_bytes - room.available_bytes, 0)
    raise OutOfMemory("cpu", num_bytes, num_used, room.limit_bytes, parts)


def host_room(root: Path = Path("/")) -> Room | None:
    """The tightest of what the machine and this process's control groups have left, if known."""
    rooms = list(_group_rooms(root))
    machine = _fields(root / "proc/meminfo")
    if "MemAvailable:" in machine and "MemTotal:" in machine:
        rooms.append(Room(machine["MemAvailable:"] << 10, machine["MemTotal:"] << 10))
    return min(rooms, key=lambda room: room.available_bytes, default=None)


def _weight_bytes(info: TensorInfo, facts: Architecture) -> int:
    """A matrix as packed; one that is split first has each part's rows padded."""
    num_rows = info.shape[0] if info.shape else 1
    if len(info.shape) != 2:
        return padded_rows(num_rows) * _F32_BYTES
    parts: tuple[int, ...] = (num_rows,)
    if info.name.endswith(".attn_qkv.weight"):
        kv_rows = facts.num_kv_heads * facts.head_dim
        parts = (facts.num_heads * facts.head_dim, kv_rows, kv_rows)
    elif facts.family.fused_gate_up and info.name.endswith(".ffn_up.weight"):
        parts = (facts.ffn_width, facts.ffn_width)
    return sum(packed_bytes(info.dtype, count, info.shape[1]) for count in parts)


def held_dtypes(file: GGUFFile, facts: Architecture, *, in_bf16: bool) -> set[DType]:
    """The types that the CPU holds the matrices as that activations are multiplied with."""
    tables = {"token_embd.weight"} if "output.weight" in file.tensors else set()
    matrices = (
        info
        for info in file.tensors.values()
        if len(info.shape) == 2 and info.name not in tables and not is_draft(info.name, facts)
    )
    return {held_as(info.dtype, info.shape[1], in_bf16=in_bf16) for info in matrices}


def _rope_bytes(facts: Architecture, context_length: int) -> int:
    """Tables of cosines and sines in f32, and the f64 angles, cosines and sines of one."""
    num_angles = context_length * facts.rope.dim // 2
    num_tables = 1 if facts.local_rope == facts.rope else 2
    return num_angles * (num_tables * 2 * _F32_BYTES + 3 * 8)


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
