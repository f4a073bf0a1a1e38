"""All breaches of a contract by recorded facts and index values, each with the fact that mends it.

The contract itself says what is broken; `Contract.check` has the last word, as the proof of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.refusals import (
    AnyRefusal,
    BrokenRule,
    EntryOutOfRange,
    EntryRefusal,
    EntryRepeated,
    FreedTensor,
    Misaligned,
    Null,
    OnOtherDevice,
    TooShort,
    WrongAxes,
    WrongScalar,
    WrongSize,
    WrongStrides,
    WrongType,
)
from hypocenter.base.tensor import Allocation, DType, Tensor, contiguous_strides, span_of
from hypocenter.contracts.contract import Contract, repeated_entries
from hypocenter.contracts.demands import Arg, evaluate, holds, names_in
from hypocenter.doctor.causes import Cause, index_cause

Arguments = Mapping[str, Any]


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


def fact_breaches(contract: Contract, facts: Arguments, device: str) -> list[Breach]:
    """What the host-side facts break, argument by argument; `device` is the launch's."""
    refusals, symbols = _all_refusals(contract, facts, device)
    found: list[Breach] = []
    for arg in contract.args:
        own = [refusal for refusal in refusals if refusal.argument == arg.name]
        if facts[arg.name] is not None:
            found += _of_tensor(arg, facts[arg.name], device, own)
        elif own:
            found.append(_null(arg, symbols, device))
    for refusal in refusals:
        if isinstance(refusal, WrongScalar):
            found.append(_of_scalar(contract, refusal, symbols))
        elif isinstance(refusal, BrokenRule):
            found.append(_of_rule(contract, refusal, symbols))
    return found


def _all_refusals(
    contract: Contract, facts: Arguments, device: str
) -> tuple[list[AnyRefusal], dict[str, Any]]:
    """What the contract says of the facts, and the symbols that are known."""
    found: list[AnyRefusal] = []
    told = contract.refusals(device, **facts)
    while True:
        try:
            found.append(next(told))
        except StopIteration as end:
            return found, {name: value for name, value in end.value.items() if value is not None}


def index_breaches(
    contract: Contract, symbols: Mapping[str, Any], values: Mapping[str, Array]
) -> list[Breach]:
    """Index entries that lie outside what they index; tensors without known values are left out."""
    scope: dict[str, Any] = {**symbols, **values}
    return [_of_index(contract, refusal, scope) for refusal in contract.index_refusals(scope)]


# -- tensors --------------------------------------------------------------------------------------


def _of_tensor(
    arg: Arg, tensor: Tensor, device: str, refusals: Sequence[AnyRefusal]
) -> Iterator[Breach]:
    who, memory = _who(arg, tensor), tensor.allocation
    kinds = {type(refusal) for refusal in refusals}
    if FreedTensor in kinds:
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
    if OnOtherDevice in kinds:
        is_host = memory.device == "cpu"
        there = Allocation(memory.id, device, memory.num_bytes, memory.site, memory.address)
        yield Breach(
            Cause.HOST_POINTER if is_host else Cause.WRONG_DEVICE,
            arg.name,
            f"{who} lies in {'host memory' if is_host else memory.device}, the kernel runs on "
            f"{device}",
            {arg.name: with_allocation(tensor, there)},
            f"the tensor on {device}",
            f"copy {tensor.name} to {device} and pass the copy",
        )
    # Of a wrong type, no memory and too little of it one explains the others.
    if WrongType in kinds:
        yield _width(arg, tensor)
    elif Null in kinds:
        yield _no_memory(arg, tensor)
    elif TooShort in kinds:
        yield _short(arg, tensor)
    if Misaligned in kinds:
        yield _misalignment(arg, tensor)
    yield from _of_shape(arg, tensor, refusals)


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
        f"make {tensor.name} with dtype {wanted.name.lower()}",
    )


def _short(arg: Arg, tensor: Tensor) -> Breach:
    needed, has = tensor.end_bytes, tensor.allocation.num_bytes
    whole = Allocation(
        tensor.allocation.id,
        tensor.device,
        needed,
        tensor.allocation.site,
        tensor.allocation.address,
    )
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


def _misalignment(arg: Arg, tensor: Tensor) -> Breach:
    memory = tensor.allocation
    down = tensor.address - tensor.address % arg.alignment_bytes
    moved = Allocation(
        memory.id, memory.device, memory.num_bytes + arg.alignment_bytes, memory.site, down
    )
    return Breach(
        Cause.MISALIGNMENT,
        arg.name,
        f"{_who(arg, tensor)} lies at {tensor.address:#x}, which is no multiple of "
        f"{arg.alignment_bytes} bytes",
        {arg.name: _remade(with_allocation(tensor, moved), offset=0)},
        f"the tensor at a multiple of {arg.alignment_bytes} bytes",
        f"begin {tensor.name} at a multiple of {arg.alignment_bytes} bytes",
    )


def _of_shape(arg: Arg, tensor: Tensor, refusals: Sequence[AnyRefusal]) -> Iterator[Breach]:
    """A wrong number of axes, or else wrong sizes, or else wrong strides."""
    who, made_at = _who(arg, tensor), tensor.allocation.site
    sizes = [refusal for refusal in refusals if isinstance(refusal, WrongSize)]
    for refusal in refusals:
        if isinstance(refusal, WrongAxes):
            yield Breach(
                Cause.WRONG_STRIDE,
                arg.name,
                f"{who} has shape {tensor.shape}, not [{arg.shape}]",
                {},
                "",
                f"pass {tensor.name} with the axes [{arg.shape}]",
            )
        elif isinstance(refusal, WrongStrides) and not sizes:
            wanted = contiguous_strides(tensor.shape)
            yield Breach(
                Cause.WRONG_STRIDE,
                arg.name,
                f"{who} has strides {tensor.strides}, but the kernel takes it as {refusal.layout}",
                {arg.name: _remade(tensor, shape=tensor.shape)},
                f"strides {wanted}",
                f"pass {tensor.name} with strides {wanted}",
            )
    if sizes:
        changes = {refusal.axis: refusal.wanted for refusal in sizes}
        shape = tuple(changes.get(axis, size) for axis, size in enumerate(tensor.shape))
        first = sizes[0]
        yield Breach(
            Cause.BUFFER_TOO_SMALL if first.size < first.wanted else Cause.WRONG_STRIDE,
            arg.name,
            f"{who} has {first.size} along axis {first.axis}, but the kernel takes "
            f"{'at least ' if first.at_least else ''}{first.wanted} ({first.expression})",
            {arg.name: _remade(tensor, shape=shape)},
            f"shape {shape}",
            f"make {tensor.name} with shape {shape} instead of {tensor.shape} (at {made_at})",
        )


def _null(arg: Arg, symbols: Mapping[str, Any], device: str) -> Breach:
    sizes = [evaluate(axis.removeprefix(">="), symbols) for axis in arg.axes]
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


def _of_scalar(contract: Contract, refusal: WrongScalar, symbols: Mapping[str, Any]) -> Breach:
    name = refusal.argument
    scalar = next(scalar for scalar in contract.scalars if scalar.name == name)
    mended = _mended_scalar(scalar.condition, [name], symbols)
    return Breach(
        Cause.BAD_SCALAR,
        name,
        str(refusal),
        mended,
        f"{name} = {mended.get(name)}",
        f"pass {name} so that it holds: {refusal.limit} (it was {refusal.value})",
    )


def _of_rule(contract: Contract, refusal: BrokenRule, symbols: Mapping[str, Any]) -> Breach:
    condition = refusal.condition
    scalars = [scalar.name for scalar in contract.scalars if scalar.name in names_in(condition)]
    return Breach(
        Cause.BAD_SCALAR if scalars else Cause.WRONG_STRIDE,
        scalars[0] if scalars else _owner_of(contract, condition),
        str(refusal),
        _mended_scalar(condition, scalars, symbols),
        f"{condition} made to hold",
        f"pass values with which {condition} holds: {refusal.limit}",
    )


def _mended_scalar(condition: str, names: list[str], symbols: Mapping[str, Any]) -> dict[str, Any]:
    """The nearest number with which a condition holds; nothing when none is found."""
    for name in names:
        value = symbols[name]
        if not isinstance(value, int | float):
            continue
        near = [value + step for far in range(1, 65) for step in (far, -far)]
        for tried in (*near, 1.0, 10000.0):
            if holds(condition, {**symbols, name: tried}):
                return {name: tried}
    return {}


# -- index values ---------------------------------------------------------------------------------


def _of_index(contract: Contract, refusal: EntryRefusal, scope: dict[str, Any]) -> Breach:
    name = refusal.argument
    entries: Array = scope[name]
    live = contract.live_entries(name, scope)
    at = f"{name}[{', '.join(map(str, refusal.entry))}]"
    if isinstance(refusal, EntryOutOfRange):
        cause = index_cause(refusal.value, name)
        mended = _inside(contract, refusal, entries, live)
        found = (
            f"{refusal} (0 to {refusal.bound - 1}); {refusal.num_wrong} of {refusal.num_live} live "
            "entries are outside"
        )
        fix = _index_fix(name, refusal)
    elif isinstance(refusal, EntryRepeated):
        cause, mended = Cause.STALE_SLOT, _spread_repeated(contract, name, entries, live, scope)
        found = f"{at} = {refusal.value}, which an entry before it has too"
        fix = f"give every token a slot of its own in {name}"
    else:
        cause, mended = Cause.INDEX_RANGE, np.maximum.accumulate(entries, axis=-1)
        found, fix = str(refusal), f"sort {name}: its entries must not fall"
    return Breach(
        cause,
        name,
        found,
        {name: mended},
        f"{at} = {int(mended[refusal.entry])}",
        fix,
        is_value=True,
        entry=refusal.entry,
        value=refusal.value,
    )


def _inside(contract: Contract, refusal: EntryOutOfRange, entries: Array, live: Array) -> Array:
    """The entries with those that are outside put inside; of unique ones each somewhere else."""
    index = next(arg.index for arg in contract.args if arg.name == refusal.argument)
    wrong = ((entries < 0) | (entries >= refusal.bound)) & live
    if index is not None and index.sentinel is not None:
        wrong &= entries != index.sentinel
    mended = np.where(wrong, np.clip(entries, 0, max(refusal.bound - 1, 0)), entries)
    if index is not None and index.unique:
        free = _free(refusal.bound, entries[live & ~wrong], int(wrong.sum()))
        mended[wrong] = np.resize(free, int(wrong.sum())) if free.size else 0
    return mended


def _free(bound: int, taken: Array, count: int) -> Array:
    """The lowest `count` numbers below `bound` that are not `taken`, as far as there are so many.

    The bound comes from the bundle: no memory is taken for it.
    """
    return np.setdiff1d(np.arange(min(bound, taken.size + count)), taken)[:count]


def _spread_repeated(
    contract: Contract, name: str, entries: Array, live: Array, scope: Mapping[str, Any]
) -> Array:
    """The entries with repeated ones put where nobody else is, as far as there is room."""
    index = next(arg.index for arg in contract.args if arg.name == name)
    bound = evaluate(index.bound, scope) if index is not None else 0
    places = np.argwhere(repeated_entries(entries, live))
    free = _free(bound or 0, entries[live], len(places))
    mended = np.array(entries)
    for number, place in zip(free, places, strict=False):
        mended[tuple(place)] = number
    return mended


def _index_fix(name: str, refusal: EntryOutOfRange) -> str:
    value, of, bound = refusal.value, refusal.of, refusal.bound
    if value == -1:
        return f"mask entries of {name} that are -1 (unused) before {of} is indexed with them"
    return (
        f"keep {name} inside 0 to {bound - 1}, the {bound} entries of {of}: refuse or mend "
        f"the {value} where {name} is made"
    )


# -- tensors put right ----------------------------------------------------------------------------


def with_allocation(tensor: Tensor, allocation: Allocation) -> Tensor:
    """The same view of another allocation."""
    return Tensor(
        tensor.name,
        tensor.owner,
        tensor.dtype,
        tensor.shape,
        tensor.strides,
        tensor.offset,
        allocation,
        None,
    )


def _remade(
    tensor: Tensor,
    *,
    dtype: DType | None = None,
    shape: tuple[int, ...] | None = None,
    offset: int | None = None,
) -> Tensor:
    """The tensor with something corrected, in memory that has room for it."""
    dtype = dtype or tensor.dtype
    strides = tensor.strides if shape is None else contiguous_strides(shape)
    shape = shape or tensor.shape
    offset = tensor.offset if offset is None else offset
    span = offset + span_of(shape, strides)
    memory = tensor.allocation
    num_bytes = max(memory.num_bytes, span * (1 if dtype.is_quantised else dtype.block_bytes))
    room = Allocation(
        memory.id, memory.device, num_bytes, memory.site, memory.address, memory.freed_at
    )
    return Tensor(tensor.name, tensor.owner, dtype, shape, strides, offset, room, None)


def _owner_of(contract: Contract, condition: str) -> str:
    """The argument whose shape has the condition's first symbol."""
    first = names_in(condition)[:1]
    for arg in contract.args:
        if first and first[0] in arg.axes:
            return arg.name
    return contract.args[0].name


def _who(arg: Arg, tensor: Tensor) -> str:
    return arg.name if tensor.name == arg.name else f"{arg.name} ({tensor.name})"
