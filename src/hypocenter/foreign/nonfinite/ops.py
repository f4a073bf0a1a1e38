"""What an operation of torch's is by its schema: what it writes, what it gives, how it spreads.

Knows torch's operators by what they answer.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Floats of these types are looked at; those of others (complex ones) are not.
FLOATS = frozenset(
    {"float64", "float32", "float16", "bfloat16"}
    | {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
)
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
#: They ask of each element whether it is a number.
_TESTS = frozenset({"isnan", "isinf", "isfinite", "isposinf", "isneginf"})
COMPARES = frozenset({"eq", "ne"})


class Role(enum.Enum):
    """What is to be done about an operation."""

    #: Gives a view or nothing of interest.
    PASS = enum.auto()
    EMPTY = enum.auto()
    ITEM = enum.auto()
    TEST = enum.auto()
    PLAIN = enum.auto()


@dataclass(frozen=True, slots=True)
class OpFacts:
    """`written` are the places of arguments that it writes, or their names; `name` is bare."""

    name: str
    role: Role
    written: tuple[tuple[int, str], ...] = ()
    is_pointwise: bool = False
    is_random: bool = False
    names: tuple[str, ...] = ()
    #: Whether each of its returns is new memory.
    new: tuple[bool, ...] = ()


def facts_of(torch: Any, func: Any) -> OpFacts:
    """Read the schema of an operator, once."""
    schema = func._schema
    name = str(schema.name).partition("::")[2].rstrip("_")
    arguments = list(schema.arguments)
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    new = tuple(value.alias_info is None for value in schema.returns)
    role = Role.PLAIN
    if name == "_unsafe_view":  # a view, whatever its schema says
        role = Role.PASS
    elif name in _EMPTY:
        role = Role.EMPTY
    elif name == "_local_scalar_dense":
        role = Role.ITEM
    elif name in _TESTS or name in COMPARES:
        role = Role.TEST
    elif name != "lift_fresh" and not written and not any(new):
        role = Role.PASS
    tags = torch.Tag
    return OpFacts(
        name,
        role,
        written,
        is_pointwise=tags.pointwise in func.tags or name in ("copy", "_to_copy", "clone"),
        is_random=tags.nondeterministic_seeded in func.tags,
        names=tuple(argument.name for argument in arguments),
        new=new,
    )


def given_by_name(
    facts: OpFacts, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, those that were left out aside."""
    return {**dict(zip(facts.names, args, strict=False)), **kwargs}


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors that an argument or a result is, or lists."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            if hasattr(part, "untyped_storage"):
                yield part


@dataclass(slots=True)
class SeenOp:
    """An operation that has run: what it was given, and what it left (`results`).

    `before` has copies of what it wrote, as that was, by `place_of`. A launch of Triton's has no
    `func`, and `kwargs` are all its arguments.
    """

    number: int
    facts: OpFacts
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: list[Any]
    before: dict[tuple[Any, ...], Any]
    site: str = ""
    node: str = ""
    forward_site: str = ""
    #: Of a launch: its event, once it has been made.
    made: Any = None
    is_launch: bool = False

    @property
    def inputs(self) -> dict[str, Any]:
        return (
            dict(self.kwargs)
            if self.is_launch
            else given_by_name(self.facts, self.args, self.kwargs)
        )


def place_of(tensor: Any) -> tuple[Any, ...]:
    """Where a tensor lies and how: equal for two that are the same elements."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def is_within(part: tuple[Any, ...], whole: tuple[Any, ...]) -> bool:
    """Whether one place lies on a part of another, which has no gaps; both by `place_of`."""
    start, end = _ends_of(part)
    first, last = _ends_of(whole)
    is_dense = math.prod(whole[1]) * whole[3].itemsize == last - first
    return first <= start and end <= last and part[3] == whole[3] and is_dense


def is_overlapping(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two places may share bytes."""
    start, end = _ends_of(one)
    first, last = _ends_of(other)
    return start < last and first < end


def _ends_of(place: tuple[Any, ...]) -> tuple[int, int]:
    """The addresses of the first byte and behind the last one."""
    address, shape, strides, dtype = place
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return address, address + (last + 1) * dtype.itemsize


def is_hidden(torch: Any, tensor: Any) -> bool:
    """Whether it holds floats that nobody looks at: sparse, complex, or of the program's class."""
    if not isinstance(tensor, torch.Tensor):
        return False
    if tensor.is_complex():
        return True
    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    is_plain = is_plain and tensor.layout is torch.strided and not tensor.is_nested
    return bool(tensor.is_floating_point() and not is_plain)


def is_there(tensor: Any) -> bool:
    """Whether its memory is there: a program may give back that of a storage that it keeps."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(num_bytes <= tensor.untyped_storage().nbytes())


@functools.cache
def _floats(torch: Any) -> frozenset[Any]:
    return frozenset(getattr(torch, name) for name in FLOATS if hasattr(torch, name))


def is_looked_at(torch: Any, tensor: Any) -> bool:
    """Whether it is a plain tensor of floats in memory of the CPU or of a GPU."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in _floats(torch)
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.numel() > 0
        and not tensor._is_zerotensor()
    )
