"""Records as JSON that a person can read and that may come from anyone; holds no files.

Array data and texts of sources stay outside; a damaged record costs only itself.
"""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from hypocenter.record.contents import LaunchOutcome
from hypocenter.record.events import (
    Allocated,
    AllocationRecord,
    SourceRecord,
    Stepped,
    TensorRecord,
    Values,
)
from hypocenter.record.gap import Gap
from hypocenter.record.gpu_stop import GpuStop
from hypocenter.record.module_texts import ModuleText

#: Key that says where a float stands that JSON has no word for, and which one it is.
NONFINITE = "nonfinite"
MAX_NONFINITE = 4096
MAX_AXES = 16
#: Tokens of one request in one step.
_MAX_TOKENS = 1 << 20
MAX_REASON_CHARS = 300

#: What damaged or hostile JSON makes a decoder raise.
DAMAGE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)

T = TypeVar("T")
_LEAVES = (str, bool, int, bytes, type(None))
encode = msgspec.json.Encoder().encode


def as_json(record: msgspec.Struct) -> bytes:
    """One object; fields that are tuples have a line for each of their elements."""
    nonfinite: dict[str, str] = {}
    shown = hide(record, "", nonfinite)
    lines = []
    for name in record.__struct_fields__:
        value = getattr(shown, name)
        if isinstance(value, tuple) and value:
            rows = b",\n  ".join(map(encode, value))
            lines.append(b'"%s": [\n  %s\n]' % (name.encode(), rows))
        else:
            lines.append(b'"%s": %s' % (name.encode(), encode(value)))
    lines.append(b'"%s": %s' % (NONFINITE.encode(), encode(nonfinite)))
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


def hide(value: Any, path: str, nonfinite: dict[str, str]) -> Any:
    """`value` without array data, texts of sources and modules, and floats that JSON does not know.

    Those are noted in `nonfinite` by their path.
    """
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[path] = str(value)
        return 0.0
    if isinstance(value, Values):
        return msgspec.structs.replace(value, data=b"")
    if isinstance(value, SourceRecord | ModuleText):
        return msgspec.structs.replace(value, text="")
    if isinstance(value, msgspec.Struct):
        changed = {}
        for name in value.__struct_fields__:
            old = getattr(value, name)
            if not isinstance(old, _LEAVES):
                new = hide(old, f"{path}/{name}", nonfinite)
                if new is not old:
                    changed[name] = new
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple):
        rows = tuple(hide(old, f"{path}/{i}", nonfinite) for i, old in enumerate(value))
        return rows if any(a is not b for a, b in zip(rows, value, strict=True)) else value
    if isinstance(value, dict):
        return {key: hide(old, f"{path}/{key}", nonfinite) for key, old in value.items()}
    return value


def split(data: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, not decoded yet; raises one of DAMAGE."""
    return msgspec.json.decode(data, type=dict[str, msgspec.Raw])


def fields_of(
    cls: type[msgspec.Struct],
    raw: Mapping[str, msgspec.Raw],
    limits: Mapping[str, int],
    missing: list[Gap],
) -> dict[str, Any]:
    """The fields of `cls` that are whole; the others are told in `missing`.

    Of a field that is a tuple the elements are read one by one, at most `limits` of its name (or
    of ""), and damaged ones are left out.
    """
    fields = {}
    for name, hint in typing.get_type_hints(cls).items():
        if name not in cls.__struct_fields__ or name not in raw or name == "others":
            continue
        try:
            if typing.get_origin(hint) is tuple:
                limit = limits.get(name, limits[""])
                fields[name] = _rows(raw[name], name, typing.get_args(hint)[0], limit, missing)
            else:
                fields[name] = msgspec.json.decode(raw[name], type=hint)
        except DAMAGE as error:
            missing.append(Gap.damage(name, damage_text(error)))
    return fields


def with_nonfinite(record: T, raw: msgspec.Raw | None, missing: list[Gap]) -> T:
    """The record with the floats put back that `as_json` noted."""
    if raw is None:
        return record
    try:
        places = msgspec.json.decode(raw, type=dict[str, typing.Literal["nan", "inf", "-inf"]])
        for path, word in itertools.islice(places.items(), MAX_NONFINITE):
            record = _put(record, path.split("/")[1:], float(word))
    except (*DAMAGE, LookupError, AttributeError, TypeError) as error:
        missing.append(Gap.damage(NONFINITE, damage_text(error)))
    return record


def damage_text(error: BaseException) -> str:
    """What is said of a part that made a decoder raise."""
    return f"damaged ({reason(error)})"


def reason(error: BaseException) -> str:
    """What an exception says, in one bounded line."""
    return " ".join(str(error).split())[:MAX_REASON_CHARS]


def _rows(
    raw: msgspec.Raw, name: str, element: Any, limit: int, missing: list[Gap]
) -> tuple[Any, ...]:
    rows = msgspec.json.decode(raw, type=list[msgspec.Raw])
    if len(rows) > limit:
        missing.append(Gap.left_out(name, f"of {len(rows)} records the first {limit} were read"))
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(element)
    kept, problems = [], []
    for number, row in enumerate(rows[:limit]):
        try:
            kept.append(_sensible(decoder.decode(row)))
        except DAMAGE as error:
            problems.append(Gap.damage(f"{name}[{number}]", damage_text(error)))
    if problems:
        more = f" (and {len(problems) - 1} more of {name})" if len(problems) > 1 else ""
        missing.append(Gap.damage(problems[0].what, problems[0].reason + more))
    return tuple(kept)


def _sensible(record: Any) -> Any:
    """The record; raises ValueError for a size that no run can have had."""
    if isinstance(record, Allocated):
        _sensible(record.allocation)
    elif isinstance(record, Stepped):
        for request in record.requests:
            if not 0 <= request.num_tokens <= _MAX_TOKENS:
                raise ValueError(f"num_tokens is {request.num_tokens}, limit {_MAX_TOKENS}")
            numbers = (request.id, request.row, request.first_position, *request.blocks)
            if not all(abs(number) < 1 << 48 for number in numbers):
                raise ValueError(f"a number of request {request.id} is 2^48 or more")
    elif isinstance(record, GpuStop | LaunchOutcome):
        if problem := record.problem():
            raise ValueError(problem)
    elif isinstance(record, AllocationRecord):
        _within(record, "address", "num_bytes")
    elif isinstance(record, TensorRecord):
        _within(record, "address", "extent_bytes")
        if not len(record.shape) == len(record.strides) <= MAX_AXES:
            raise ValueError(f"{len(record.shape)} axes, but {len(record.strides)} strides")
        if not all(0 <= size < 1 << 48 for size in record.shape):
            raise ValueError(f"shape is {record.shape}")
        if not all(abs(stride) < 1 << 48 for stride in (*record.strides, record.offset)):
            raise ValueError(f"strides are {record.strides}, offset is {record.offset}")
    return record


def _within(record: Any, *names: str) -> None:
    for name in names:
        if not 0 <= (value := getattr(record, name)) < 1 << 64:
            raise ValueError(f"{name} is {value}, but must be from 0 to 2^64 - 1")


def _put(value: Any, path: list[str], number: float) -> Any:
    """`value` with the float at `path` replaced."""
    if not path:
        if not isinstance(value, float):
            raise TypeError("what it names is no float")
        return number
    if isinstance(value, msgspec.Struct):
        inner = _put(getattr(value, path[0]), path[1:], number)
        return msgspec.structs.replace(value, **{path[0]: inner})
    if isinstance(value, tuple):
        at = int(path[0])
        return (*value[:at], _put(value[at], path[1:], number), *value[at + 1 :])
    if isinstance(value, dict):
        return {**value, path[0]: _put(value[path[0]], path[1:], number)}
    raise TypeError("what it names is not there")
