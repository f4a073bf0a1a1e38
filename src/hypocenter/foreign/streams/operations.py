"""What one of torch's operations reads and writes, by its schema."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Read of their tensors the shape and the type alone.
_LIKE = re.compile(r"new_\w+|\w+_like")
#: Give memory that nobody has written.
_UNWRITTEN = re.compile(r"(new_)?empty(_\w+)?|resize_|set_")
#: Touch no element, though their schemas do not say so.
_NOTHING = frozenset(
    {"_unsafe_view", "_reshape_alias", "lift", "lift_fresh", "resize_", "set_", "is_pinned"}
    | {"_has_same_storage_numel", "_assert_async", "_local_scalar_dense_meta"}
)


#: What stands where a tensor may, and is none.
_NUMBERS = frozenset({type(None), bool, int, float, complex})


class Sort(enum.Enum):
    """What is special about an operation. NOTHING: it touches no element of any tensor."""

    PLAIN = enum.auto()
    NOTHING = enum.auto()
    COPY = enum.auto()
    NUMBER = enum.auto()
    RECORD_STREAM = enum.auto()


_SORTS = {
    "copy_": Sort.COPY,
    "_to_copy": Sort.COPY,
    "_local_scalar_dense": Sort.NUMBER,
    "record_stream": Sort.RECORD_STREAM,
}


#: Operations that programs know by another name.
_SPELLED = {"_to_copy": "Tensor.to", "_local_scalar_dense": "Tensor.item"}


@dataclass(frozen=True, slots=True)
class Operation:
    """`tensors` are place, name and whether it is written, of each parameter of tensors.

    `makes`: new memory of its results is written by it.
    """

    name: str
    sort: Sort
    tensors: tuple[tuple[int, str, bool], ...]
    makes: bool

    def tensors_of(
        self, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Iterator[tuple[Any, str, bool]]:
        """The tensors that a call uses, by the parameter, and whether it is written."""
        num = len(args)
        for at, name, is_write in self.tensors:
            value = args[at] if at < num else keywords.get(name)
            if value.__class__ in _NUMBERS:
                continue
            if isinstance(value, list | tuple):
                for part in value:
                    if part.__class__ not in _NUMBERS:
                        yield part, name, is_write
            else:
                yield value, name, is_write


def operation_of(overload: Any) -> Operation:
    """What the schema of an overload says of it."""
    schema = overload._schema
    name = str(schema.name).split("::")[-1]
    sort = Sort.NOTHING if name in _NOTHING else _SORTS.get(name, Sort.PLAIN)
    tensors = []
    for at, argument in enumerate(schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        info = argument.alias_info
        if info is not None and info.is_write:
            tensors.append((at, str(argument.name), True))
        elif info is None and not _LIKE.fullmatch(name):
            tensors.append((at, str(argument.name), False))
    returns = [made for made in schema.returns if "Tensor" in str(made.type)]
    is_view = bool(returns) and all(
        made.alias_info is not None and not made.alias_info.is_write for made in returns
    )
    if is_view and sort is Sort.PLAIN and not any(written for _, _, written in tensors):
        sort = Sort.NOTHING
    return Operation(
        f"torch.{_SPELLED.get(name, name)}",
        sort,
        tuple(tensors),
        makes=not _UNWRITTEN.fullmatch(name),
    )


def tensors_in(result: Any) -> Iterator[Any]:
    """Those that an operation gave."""
    if hasattr(result, "untyped_storage"):
        yield result
    elif isinstance(result, list | tuple):
        for part in result:
            yield from tensors_in(part)
