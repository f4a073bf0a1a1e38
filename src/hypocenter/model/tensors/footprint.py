"""How much host memory a model will take, and how much there is; allocates nothing itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hypocenter.base.errors import BadSetting, ModelTooLarge
from hypocenter.base.tensor import DType
from hypocenter.base.wording import bytes_text
from hypocenter.device.backend import Room
from hypocenter.kernels.attention.attention_layout import num_part_floats
from hypocenter.kernels.collective.collectives import gathered_rows
from hypocenter.kernels.experts.experts_table import ExpertsShape
from hypocenter.kernels.linear.linear_gate import may_join
from hypocenter.kernels.linear.operands import operand_bytes
from hypocenter.kernels.weights.cpu_layout import held_as
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.experts import Experts
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.gguf.values import without_leading_ones
from hypocenter.model.tensors.table import TensorTable, is_of_experts, tensor_table
from hypocenter.model.tensors.tensor_spec import TensorKind, TensorSpec
from hypocenter.settings.config import KV_DTYPES, EngineConfig

_F32_BYTES = 4


def num_kv_blocks(config: EngineConfig, context_length: int) -> int:
    """Blocks of the KV cache, for a context of `context_length` tokens."""
    return -(-(config.kv_tokens or context_length) // config.block_size)


def num_state_slots(config: EngineConfig, arch: Architecture) -> tuple[int, int]:
    """Slots of states: for requests that run, and for checkpoints; 0 where no layer has any."""
    if arch.recurrence is None:
        return 0, 0
    # With drafts a request has a second one, for the state before them.
    num_running = config.max_batch_requests * (2 if config.tries_tokens else 1)
    return num_running, config.state_checkpoints if config.prefix_cache else 0


def kv_dtypes_for(arch: Architecture) -> dict[str, DType]:
    """The members of `KV_DTYPES` of which all heads of a model are whole blocks."""
    shapes = [arch.layers[layer] for layer in arch.attention_layers]
    return {
        name: dtype
        for name, dtype in KV_DTYPES.items()
        if all(shape.is_whole_blocks_of(dtype) for shape in shapes)
    }


def require_kv_dtype(arch: Architecture, name: str) -> None:
    """Raises BadSetting where heads of a model are no whole blocks of a type of `KV_DTYPES`."""
    if name in (known := kv_dtypes_for(arch)):
        return
    num_columns = KV_DTYPES[name].block_elements
    shapes = [arch.layers[layer] for layer in arch.attention_layers]
    sizes = {size for shape in shapes for size in (shape.head_dim, shape.value_dim)}
    odd = min(size for size in sizes if size % num_columns)
    limit = f"heads of {odd} columns are no whole blocks of {num_columns}; use {' or '.join(known)}"
    raise BadSetting("kv_dtype", name, limit)


def needed_bytes(
    file: GGUFFile, arch: Architecture, config: EngineConfig, context_length: int
) -> dict[str, int]:
    """Bytes by purpose that a model takes for a context of `context_length` tokens, on the CPU.

    What packing a tensor holds for a moment, a slab of its rows, is not counted.
    """
    table, num_blocks = tensor_table(arch, file.tensors), num_kv_blocks(config, context_length)
    num_running, num_checkpoints = num_state_slots(config, arch)
    per_token = arch.kv_bytes_per_token(KV_DTYPES[config.kv_dtype])
    of_attention = arch.widest_q, arch.widest_attended, arch.widest_kv, arch.widest_kv
    widths = (*(arch.width, *arch.dense_widths) * 2, *of_attention)
    per_logit_row = padded_rows(arch.vocab_size)
    if arch.vocab_size % padded_rows(1):
        per_logit_row += arch.vocab_size
    numbers_per_token = sum(padded_rows(width) for width in widths)
    if arch.input_width:
        numbers_per_token += (arch.num_layers + 2) * padded_rows(arch.input_width)
    if arch.family.gates_attention:
        numbers_per_token += padded_rows(arch.widest_q)
    if (latent := arch.latent) is not None:
        numbers_per_token += padded_rows(arch.num_heads * latent.widest)
        numbers_per_token += padded_rows(latent.query_rank)
    if (recurrence := arch.recurrence) is not None:
        numbers_per_token += sum(padded_rows(width) for width in recurrence.buffer_widths)
    numbers_per_token += gathered_rows(arch.part.num_parts, 1) * padded_rows(arch.width)
    activations = config.step_tokens * numbers_per_token
    logits = config.drawn_rows * per_logit_row
    max_context = min(num_blocks * config.block_size, context_length)
    parts = sum(
        num_part_floats(config.step_tokens, arch.num_heads, *of_pages, max_context)
        for of_pages in {(shape.num_kv_heads, shape.value_pitch) for shape in arch.layers}
    )
    in_bf16, max_rows = config.float_products == "bf16", config.step_tokens
    held = held_dtypes(file, arch, in_bf16=in_bf16)
    # What all products read, and codes of what gates let through.
    widest = max(arch.width, arch.mixer_width, arch.dense_width)
    operands = operand_bytes(held, max_rows, widest, in_bf16=in_bf16)
    operands += operand_bytes(held, max_rows, arch.dense_width, in_bf16=False)
    mixture = 0
    if arch.experts is not None:
        mixture = _mixture_bytes(file, arch, table, arch.experts, max_rows, in_bf16=in_bf16)
    of_weights = _weight_bytes(file, table)
    if config.device != "cpu":
        of_weights -= host_weight_bytes(file, arch, config)
    return {
        "weights": of_weights,
        "KV cache": num_blocks * config.block_size * per_token,
        **({"states": num_running * arch.state_bytes} if recurrence else {}),
        **({"checkpoints": num_checkpoints * arch.state_bytes} if recurrence else {}),
        "rope tables": _rope_bytes(arch, context_length),
        "activations": (activations + logits + parts) * _F32_BYTES + operands + mixture,
    }


def _weight_bytes(file: GGUFFile, table: TensorTable) -> int:
    """What tensors take as they are held; one that is missing or has other axes is refused when it
    is loaded."""
    num_bytes, constants = 0, {}
    for spec in table:
        if spec.kind is TensorKind.CONSTANT:  # one for all that need it
            constants[spec.value, spec.shape] = spec.num_bytes(DType.F32)
        elif (dtype := _dtype_of(file, spec)) is not None:
            num_bytes += spec.num_bytes(dtype)
    return num_bytes + sum(constants.values())


def host_tensors(
    file: GGUFFile, arch: Architecture, config: EngineConfig
) -> tuple[TensorSpec, ...]:
    """What goes to the host's memory where a GPU has the rest: experts of the first layers."""
    layers = tensor_table(arch, file.tensors).layers[: config.num_host_layers]
    return tuple(spec for layer in layers for spec in layer if is_of_experts(spec, layer))


def host_weight_bytes(file: GGUFFile, arch: Architecture, config: EngineConfig) -> int:
    """What these take as the host has them."""
    num_bytes = 0
    for spec in host_tensors(file, arch, config):
        if (dtype := _dtype_of(file, spec)) is not None:
            num_bytes += spec.num_bytes(dtype)
    return num_bytes


def _dtype_of(file: GGUFFile, spec: TensorSpec) -> DType | None:
    """The type of a tensor of the file; None: there is none, or one of other axes."""
    info = file.tensors.get(spec.name)
    if info is None or without_leading_ones(info.shape) != without_leading_ones(spec.shape):
        return None
    return info.dtype


def _mixture_bytes(
    file: GGUFFile,
    arch: Architecture,
    table: TensorTable,
    experts: Experts,
    max_rows: int,
    *,
    in_bf16: bool,
) -> int:
    """What `MixtureBuffers` holds for steps of `max_rows` tokens."""
    choice, pitch, inner = experts.choice, padded_rows(arch.width), padded_rows(experts.width)
    shape = ExpertsShape(max_rows, choice.num_experts, choice.num_used, "cpu")
    numbers = max_rows * (3 * choice.num_used + 1) + 3 * shape.most_groups + shape.num_rows
    numbers += 3 + choice.num_experts
    numbers += max_rows * padded_rows(choice.num_experts + choice.has_gate)
    has_shared = experts.shared_width > 0 or arch.is_dense(arch.num_layers - 1)
    numbers += shape.num_rows * pitch + (max_rows * pitch if has_shared else 0)
    read: set[DType] = set()
    given: set[DType] = set()
    is_split = False
    for layer in table.layers[experts.num_dense :]:
        dtypes = {
            part.place: dtype
            for spec in layer
            if (dtype := _dtype_of(file, spec)) is not None
            for part in spec.loaded
        }
        parts = [dtypes.get(f"mixture.experts.{part}") for part in ("gate", "up", "down")]
        known = [dtype for dtype in parts if dtype is not None]
        if len(known) < len(parts):
            continue  # told of when they are loaded
        is_split |= "mixture.experts.up_bias" in dtypes or not may_join(known)
        read |= {held_as(dtype, arch.width, in_bf16=in_bf16) for dtype in known[:2]}
        given.add(held_as(known[2], experts.width, in_bf16=in_bf16))
    if is_split:
        numbers += 2 * shape.num_rows * inner
    operands = operand_bytes(read, shape.num_rows, arch.width, in_bf16=in_bf16)
    operands += operand_bytes(given, shape.num_rows, experts.width, in_bf16=in_bf16)
    return numbers * _F32_BYTES + operands


def require_room(
    file: GGUFFile,
    arch: Architecture,
    config: EngineConfig,
    context_length: int,
    adapter_bytes: int = 0,
) -> None:
    """Raise ModelTooLarge when `needed_bytes` and adapters exceed the memory that is available.

    Where the system tells nothing of its memory, nothing is checked.
    """
    room = host_room()
    needed = needed_bytes(file, arch, config, context_length)
    needed |= {"adapters": adapter_bytes} if adapter_bytes else {}
    num_bytes = sum(needed.values())
    if room is None or num_bytes <= room.available_bytes:
        return
    settings: tuple[str, ...] = ("context_length",)
    if config.kv_tokens is not None:
        settings = ("kv_tokens", *settings)
    raise _too_large(room, needed, settings)


def require_host_room(file: GGUFFile, arch: Architecture, config: EngineConfig) -> None:
    """Raise ModelTooLarge where the host has no room for what a GPU is not to hold."""
    room, num_bytes = host_room(), host_weight_bytes(file, arch, config)
    if room is not None and num_bytes > room.available_bytes:
        raise _too_large(room, {"experts": num_bytes}, ("n_cpu_moe",))


def _too_large(room: Room, needed: dict[str, int], settings: tuple[str, ...]) -> ModelTooLarge:
    parts = ", ".join(f"{name} {bytes_text(part)}" for name, part in needed.items())
    num_used = max(room.limit_bytes - room.available_bytes, 0)
    num_bytes = sum(needed.values())
    return ModelTooLarge("cpu", num_bytes, num_used, room.limit_bytes, parts, settings)


def host_room(root: Path = Path("/")) -> Room | None:
    """The tightest of what the machine and this process's control groups have left, if known."""
    rooms = list(_group_rooms(root))
    machine = _fields(root / "proc/meminfo")
    if "MemAvailable:" in machine and "MemTotal:" in machine:
        rooms.append(Room(machine["MemAvailable:"] << 10, machine["MemTotal:"] << 10))
    return min(rooms, key=lambda room: room.available_bytes, default=None)


def held_dtypes(file: GGUFFile, arch: Architecture, *, in_bf16: bool) -> set[DType]:
    """The types that the CPU holds the matrices as that activations are multiplied with."""
    return {
        held_as(dtype, spec.shape[-1], in_bf16=in_bf16)
        for spec in tensor_table(arch, file.tensors)
        if spec.kind is TensorKind.MATRIX and (dtype := _dtype_of(file, spec)) is not None
    }


def _rope_bytes(arch: Architecture, context_length: int) -> int:
    """Tables of cosines and sines in f32, and the f64 angles, cosines and sines of one."""
    pairs = [arch.rope.dim // 2] * (1 + arch.scales_queries(context_length))
    if arch.local_rope != arch.rope:
        pairs.append(arch.local_rope.dim // 2)
    if arch.rope.scaling == "longrope" and context_length > arch.rope.original_context:
        pairs.append(arch.rope.dim // 2)
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
