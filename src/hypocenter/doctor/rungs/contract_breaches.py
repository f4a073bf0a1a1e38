"""All breaches of a contract by recorded facts and index values, each with the fact that mends it.

`Contract.check` stops at the first; it has the last word all the same, as the proof of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.doctor.diagnosis import Cause
from hypocenter.kernels.contract import Arg, Contract, Index, Scalar
from hypocenter.tensor import Allocation, DType, Tensor, contiguous_strides

Array = np.ndarray[Any, Any]
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Breach:
    """One demand that does not hold. `mended` are facts, or index values, that would meet it."""

    cause: Cause
    argument: str
    found: str
    mended: dict[str, Any]
    correction: str
    fix: str
    is_value: bool = False
    #: Index entries at fault, and what they hold.
    entry: tuple[int, ...] | None = None
    value: int | None = None


def fact_breaches(contract: Contract, facts: Facts, device: str) -> list[Breach]:
    """What the host-side facts break, argument by argument; `device` is the launch's."""
    symbols: dict[str, Any] = {one.name: facts[one.name] for one in contract.scalars}
    found: list[Breach] = []
    for arg in contract.args:
        tensor = facts[arg.name]
        if tensor is not None:
            found += _of_tensor(arg, tensor, device, symbols)
    for arg in contract.args:  # last: what its shape should be is known by then
        if facts[arg.name] is None and not arg.optional:
            found.append(_null(arg, symbols, device))
    found += [one for scalar in contract.scalars for one in _of_scalar(scalar, symbols)]
    for rule in contract.rules:
        if not _holds(rule.condition, symbols):
            shown = ", ".join(f"{name} = {symbols[name]}" for name in _names(rule.condition))
            scalars = [one.name for one in contract.scalars if one.name in _names(rule.condition)]
            found.append(
                Breach(
                    Cause.BAD_SCALAR if scalars else Cause.WRONG_STRIDE,
                    scalars[0] if scalars else _owner_of(contract, rule.condition),
                    f"{shown}, but {rule.limit}",
                    _mended_scalar(rule.condition, scalars, symbols),
                    f"{rule.condition} made to hold",
                    f"pass values with which {rule.condition} holds: {rule.limit}",
                )
            )
    return found


def index_breaches(
    contract: Contract, symbols: Mapping[str, Any], values: Mapping[str, Array]
) -> list[Breach]:
    """Index entries that lie outside what they index; tensors without known values are left out."""
    scope: dict[str, Any] = {**symbols, **values}
    found: list[Breach] = []
    for arg in contract.args:
        if arg.index is not None and arg.name in values:
            try:
                live = _live(arg.index, scope, values[arg.name])
            except KeyError:
                continue  # which entries are live depends on a tensor that nobody recorded
            found += _of_index(arg, arg.index, scope, live)
    return found


# -- tensors --------------------------------------------------------------------------------------


def _of_tensor(arg: Arg, tensor: Tensor, device: str, symbols: dict[str, Any]) -> Iterator[Breach]:
    who, memory = _who(arg, tensor), tensor.allocation
    if memory.freed_at:
        alive = Allocation(memory.id, memory.device, memory.num_bytes, memory.site, memory.address)
        yield Breach(
            Cause.USE_AFTER_FREE,
            arg.name,
            f"{who} lies in memory that was freed at {memory.freed_at}",
            {arg.name: with_allocation(tensor, alive)},
            "the memory not freed",
            f"keep {tensor.name} alive (freed at {memory.freed_at}) until the last launch that "
            "uses it has ended",
        )
    if memory.device != device:
        is_host = memory.device == "cpu"
        there = Allocation(memory.id, device, memory.num_bytes, memory.site, memory.address)
        yield Breach(
            Cause.HOST_POINTER if is_host else Cause.WRONG_DEVICE,
            arg.name,
            f"{who} lies in {'host memory' if is_host else memory.device}, the kernel runs on "
            f"{device}",
            {arg.name: with_allocation(tensor, there)},
            f"the tensor on {device}",
            f"copy {tensor.name} to {device} (made at {memory.site}) and pass the copy",
        )
    if tensor.dtype not in arg.dtypes:
        yield _width(arg, tensor)
    elif not tensor.address and device != "cpu" and tensor.num_elements:
        yield _no_memory(arg, tensor)
    elif tensor.end_bytes > memory.num_bytes:
        yield _short(arg, tensor)
    if tensor.address % arg.alignment_bytes:
        yield _misaligned(arg, tensor)
    yield from _of_shape(arg, tensor, symbols)


def _width(arg: Arg, tensor: Tensor) -> Breach:
    wanted = arg.dtypes[0]
    has, reads = tensor.dtype.block_bytes, wanted.block_bytes
    kinds = " or ".join(dtype.name.lower() for dtype in arg.dtypes)
    return Breach(
        Cause.DTYPE_WIDTH,
        arg.name,
        f"{_who(arg, tensor)} holds {tensor.dtype.name.lower()} ({has} bytes an element), but the "
        f"kernel reads {kinds} ({reads} bytes an element)",
        {arg.name: _remade(tensor, dtype=wanted)},
        f"{tensor.name} as {wanted.name.lower()}",
        f"make {tensor.name} with dtype {wanted.name.lower()} (made at {tensor.allocation.site})",
    )


def _short(arg: Arg, tensor: Tensor) -> Breach:
    needed, has = tensor.end_bytes, tensor.allocation.num_bytes
    whole = Allocation(
        tensor.allocation.id, tensor.device, needed, tensor.allocation.site,
        tensor.allocation.address,
    )  # fmt: skip
    ratio = needed / has if has else 0.0
    width = tensor.dtype.block_bytes
    # Half the rows of a table are more likely forgotten than halves of all its elements.
    row_bytes = tensor.strides[0] * width if len(tensor.shape) > 1 else 0
    holds_rows = bool(row_bytes) and has % row_bytes == 0
    is_width = ratio in (2.0, 4.0, 8.0) and width > 1 and ratio <= width and not holds_rows
    text = (
        f"{_who(arg, tensor)} reaches to byte {needed} of its memory, which has {has} bytes (made "
        f"at {tensor.allocation.site})"
    )
    if is_width:
        text += (
            f"; that is exactly {int(ratio)} times too few: room for elements of "
            f"{int(width / ratio)} bytes, while the kernel reads {width}"
        )
    return Breach(
        Cause.DTYPE_WIDTH if is_width else Cause.BUFFER_TOO_SMALL,
        arg.name,
        text,
        {arg.name: with_allocation(tensor, whole)},
        f"{needed} bytes behind {tensor.name}",
        f"allocate {tensor.name} with {needed} bytes instead of {has} (at "
        f"{tensor.allocation.site}): {tensor.num_elements} elements of {width} bytes",
    )


def _no_memory(arg: Arg, tensor: Tensor) -> Breach:
    memory = tensor.allocation
    whole = Allocation(memory.id, memory.device, tensor.end_bytes, memory.site, 1 << 20)
    return Breach(
        Cause.NULL_POINTER,
        arg.name,
        f"{_who(arg, tensor)} is a null pointer: its memory (made at {memory.site}) has address 0, "
        f"while the kernel takes {tensor.end_bytes} bytes",
        {arg.name: with_allocation(tensor, whole)},
        f"{tensor.end_bytes} bytes behind {tensor.name}",
        f"allocate {tensor.name} with {tensor.end_bytes} bytes at {memory.site} (asked for were "
        f"{memory.num_bytes}), and look at what the allocation returned",
    )


def _misaligned(arg: Arg, tensor: Tensor) -> Breach:
    memory = tensor.allocation
    down = tensor.address - tensor.address % arg.alignment_bytes
    moved = Allocation(memory.id, memory.device, memory.num_bytes + arg.alignment_bytes,
                       memory.site, down)  # fmt: skip
    return Breach(
        Cause.MISALIGNMENT,
        arg.name,
        f"{_who(arg, tensor)} lies at {tensor.address:#x}, which is no multiple of "
        f"{arg.alignment_bytes} bytes",
        {arg.name: _remade(with_allocation(tensor, moved), offset=0)},
        f"the tensor at a multiple of {arg.alignment_bytes} bytes",
        f"begin {tensor.name} at a multiple of {arg.alignment_bytes} bytes",
    )


def _of_shape(arg: Arg, tensor: Tensor, symbols: dict[str, Any]) -> Iterator[Breach]:
    who = _who(arg, tensor)
    wanted: list[int] = list(tensor.shape)
    problems: list[tuple[int, int]] = []
    if len(tensor.shape) != len(arg.axes):
        yield Breach(
            Cause.WRONG_STRIDE, arg.name, f"{who} has shape {tensor.shape}, not [{arg.shape}]",
            {}, "", f"pass {tensor.name} with the axes [{arg.shape}]",
        )  # fmt: skip
        return
    for axis, demand in enumerate(arg.axes):
        if demand.isidentifier() and demand not in symbols:
            symbols[demand] = tensor.shape[axis]
            continue
        least = _value(demand.removeprefix(">="), symbols)
        size = tensor.shape[axis]
        if least is not None and (size < least or (size > least and ">=" not in demand)):
            wanted[axis] = least
            problems.append((axis, least))
    if problems:
        axis, least = problems[0]
        size = tensor.shape[axis]
        verb = "at least " if ">=" in arg.axes[axis] else ""
        yield Breach(
            Cause.BUFFER_TOO_SMALL if size < least else Cause.WRONG_STRIDE,
            arg.name,
            f"{who} has {size} along axis {axis}, but the kernel takes {verb}{least} "
            f"({arg.axes[axis].removeprefix('>=').strip()})",
            {arg.name: _remade(tensor, shape=tuple(wanted))},
            f"shape {tuple(wanted)}",
            f"make {tensor.name} with shape {tuple(wanted)} instead of {tensor.shape} (at "
            f"{tensor.allocation.site})",
        )
    elif (arg.layout == "contiguous" and not tensor.is_contiguous) or (
        arg.layout == "rows" and not tensor.has_dense_rows
    ):
        yield Breach(
            Cause.WRONG_STRIDE,
            arg.name,
            f"{who} has strides {tensor.strides}, but the kernel takes it as {arg.layout}",
            {arg.name: _remade(tensor, shape=tensor.shape)},
            f"strides {contiguous_strides(tensor.shape)}",
            f"pass {tensor.name} with strides {contiguous_strides(tensor.shape)}",
        )


def _null(arg: Arg, symbols: Mapping[str, Any], device: str) -> Breach:
    sizes = [_value(axis.removeprefix(">="), symbols) for axis in arg.axes]
    shape = tuple(1 if size is None else size for size in sizes)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * arg.dtypes[0].block_bytes
    memory = Allocation(0, device, num_bytes, "", 1 << 20)
    there = Tensor(arg.name, "", arg.dtypes[0], shape, contiguous_strides(shape), 0, memory, None)
    return Breach(
        Cause.NULL_POINTER,
        arg.name,
        f"{arg.name} is null",
        {arg.name: there},
        f"a tensor {arg.dtypes[0].name.lower()} {list(shape)} for {arg.name}",
        f"pass a tensor for {arg.name}, or do not launch without it",
    )


# -- scalars --------------------------------------------------------------------------------------


def _of_scalar(scalar: Scalar, symbols: Mapping[str, Any]) -> Iterator[Breach]:
    if _holds(scalar.condition, symbols):
        return
    value = symbols[scalar.name]
    mended = _mended_scalar(scalar.condition, [scalar.name], symbols)
    yield Breach(
        Cause.BAD_SCALAR,
        scalar.name,
        f"{scalar.name} is {value}, but {scalar.limit}",
        mended,
        f"{scalar.name} = {mended.get(scalar.name)}",
        f"pass {scalar.name} so that it holds: {scalar.limit} (it was {value})",
    )


def _mended_scalar(condition: str, names: list[str], symbols: Mapping[str, Any]) -> dict[str, Any]:
    """The nearest number with which a condition holds; nothing when none is found."""
    for name in names:
        value = symbols[name]
        if not isinstance(value, int | float):
            continue
        near = [value + step for far in range(1, 65) for step in (far, -far)]
        for tried in (*near, 1.0, 10000.0):
            if _holds(condition, {**symbols, name: tried}):
                return {name: tried}
    return {}


# -- index values ---------------------------------------------------------------------------------


def _live(index: Index, scope: dict[str, Any], entries: Array) -> Array:
    if index.live is None:
        return np.ones(entries.shape, bool)
    return np.broadcast_to(index.live(scope), entries.shape)


def _of_index(arg: Arg, index: Index, scope: dict[str, Any], live: Array) -> Iterator[Breach]:
    entries: Array = scope[arg.name]
    bound = _value(index.bound, scope)
    if bound is None:
        return
    wrong = ((entries < 0) | (entries >= bound)) & live
    if index.sentinel is not None:
        wrong &= entries != index.sentinel
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        value = int(entries[at])
        mended = np.where(wrong, np.clip(entries, 0, max(bound - 1, 0)), entries)
        if index.unique:
            free = np.setdiff1d(np.arange(bound), entries[live & ~wrong])
            mended[wrong] = np.resize(free, int(wrong.sum())) if free.size else 0
        place = ", ".join(map(str, at))
        yield Breach(
            index_cause(arg.name, index, value),
            arg.name,
            f"{arg.name}[{place}] = {value}, but {index.of} has {bound} entries (0 to "
            f"{bound - 1}); {int(wrong.sum())} of {int(live.sum())} live entries are outside",
            {arg.name: mended},
            f"{arg.name}[{place}] = {int(mended[at])}",
            _index_fix(arg.name, index, value, bound),
            True, at, value,
        )  # fmt: skip
    elif index.unique and live.any():
        numbers = np.asarray(entries)[live]
        first = np.unique(numbers, return_index=True)[1]
        if len(first) < len(numbers):
            again = np.setdiff1d(np.arange(len(numbers)), first)
            at = tuple(int(i) for i in np.argwhere(live)[again[0]])
            free = np.setdiff1d(np.arange(bound), numbers)[: len(again)]
            mended = np.array(entries)
            for number, place_ in zip(free, again, strict=False):
                mended[tuple(np.argwhere(live)[place_])] = number
            yield Breach(
                Cause.STALE_SLOT, arg.name,
                f"{arg.name}[{at[0]}] = {int(entries[at])}, which an entry before it has too",
                {arg.name: mended}, f"{arg.name}[{at[0]}] = {int(mended[at])}",
                f"give every token a slot of its own in {arg.name}", True, at, int(entries[at]),
            )  # fmt: skip


def index_cause(name: str, index: Index, value: int) -> Cause:
    if value == -1:
        return Cause.SENTINEL_CONSUMED
    if index.of == "the vocabulary":
        return Cause.TOKEN_RANGE
    if name == "positions":
        return Cause.POSITION_RANGE
    if name == "block_tables":
        return Cause.BLOCK_TABLE_RANGE
    return Cause.BAD_SCALAR if name == "counts" else Cause.INDEX_RANGE


def _index_fix(name: str, index: Index, value: int, bound: int) -> str:
    if value == -1:
        return f"mask entries of {name} that are -1 (unused) before {index.of} is indexed with them"
    return (
        f"keep {name} inside 0 to {bound - 1}, the {bound} entries of {index.of}: refuse or mend "
        f"the {value} where {name} is made"
    )


# -- expressions ----------------------------------------------------------------------------------


def with_allocation(tensor: Tensor, allocation: Allocation) -> Tensor:
    """The same view of another allocation."""
    return Tensor(
        tensor.name, tensor.owner, tensor.dtype, tensor.shape, tensor.strides, tensor.offset,
        allocation, None,
    )  # fmt: skip


def _remade(
    tensor: Tensor, *, dtype: DType | None = None, shape: tuple[int, ...] | None = None,
    offset: int | None = None,
) -> Tensor:  # fmt: skip
    """The tensor with something corrected, in memory that has room for it."""
    dtype = dtype or tensor.dtype
    strides = tensor.strides if shape is None else contiguous_strides(shape)
    shape = shape or tensor.shape
    offset = tensor.offset if offset is None else offset
    span = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = tensor.allocation
    num_bytes = max(memory.num_bytes, span * (1 if dtype.is_quantised else dtype.block_bytes))
    room = Allocation(
        memory.id, memory.device, num_bytes, memory.site, memory.address, memory.freed_at
    )
    return Tensor(tensor.name, tensor.owner, dtype, shape, strides, offset, room, None)


def _holds(condition: str, symbols: Mapping[str, Any]) -> bool:
    """Whether a contract's own expression holds; one over unknown symbols does."""
    try:
        return bool(eval(condition, {}, dict(symbols)))
    except (NameError, TypeError):
        return True
    except ZeroDivisionError:
        return False


def _value(expression: str, symbols: Mapping[str, Any]) -> int | None:
    try:
        return int(eval(expression.strip(), {}, dict(symbols)))
    except (NameError, TypeError, ZeroDivisionError):
        return None


def _names(expression: str) -> tuple[str, ...]:
    code = compile(expression, "<condition>", "eval")
    return tuple(dict.fromkeys(code.co_names))


def _owner_of(contract: Contract, condition: str) -> str:
    """The argument whose shape has the condition's first symbol."""
    first = _names(condition)[:1]
    for arg in contract.args:
        if first and first[0] in arg.axes:
            return arg.name
    return contract.args[0].name


def _who(arg: Arg, tensor: Tensor) -> str:
    return arg.name if tensor.name == arg.name else f"{arg.name} ({tensor.name})"
