"""JSON from strangers, read so that no body keeps others waiting: bounds first, then in slices.

While a body is decoded nothing else runs, in a thread neither, for msgspec holds the interpreter.
So what a body will become is counted while it comes (`BodyShape`), and long fields are decoded an
item after another.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Struct

from hypocenter.server.api_error import ApiError

MAX_FIELDS = 1000
#: Of a field as it is written, and of tools; what a model reads may be as long as the body.
MAX_FIELD_BYTES = 384 << 10
MAX_TOOLS_FIELD_BYTES = 1 << 20
LONG_FIELDS = frozenset({"prompt", "messages", "content", "tokens", "input"})
#: Of a body: lists and objects; names in objects; numbers, texts and all other values.
MAX_CONTAINERS = 1 << 16
MAX_KEYS = 1 << 16
MAX_VALUES = 1 << 19
#: Of one text as it is written.
MAX_TEXT_BYTES = 8 << 20
#: Of a number as it is written: looking at 30 million takes a third of a second.
_MAX_DIGITS = 1024
_LONG_NUMBER = re.compile(rb"[0-9.eE+-]{%d}" % (_MAX_DIGITS + 1))
#: What is decoded in one go.
SLICE_BYTES = 256 << 10

_BodyType = TypeVar("_BodyType", bound=msgspec.Struct)


class BodyShape:
    """Counts what decoding a body will make, as far as the body came."""

    def __init__(self) -> None:
        self._is_in_text = False
        self._num_text_bytes = 0
        self._begun_escape = b""
        self._is_wide = False
        self._counts = {"lists and objects": 0, "names": 0, "values": 0}

    def memory_bytes(self, num_bytes: int) -> int:
        """About what the body of so many bytes takes once it is decoded.

        Python holds a text with a character beyond U+FFFF in four bytes for each of its characters,
        a number in 32 and a dictionary in some 200, each with a reference of 8.
        """
        containers, _, values = self._counts.values()
        return num_bytes * (4 if self._is_wide else 1) + 200 * containers + 40 * values

    def add(self, part: bytes) -> None:
        """The next bytes of the body. Raises ApiError, status 400, when it becomes too much.

        What is no JSON is counted somehow, and refused when it is decoded.
        """
        part = self._begun_escape + part
        num_backslashes = len(part) - len(part.rstrip(b"\\"))
        self._begun_escape = part[len(part) - num_backslashes % 2 :]
        # Backslashes come in pairs from the left, so no quote is taken for another one.
        whole = part[: len(part) - num_backslashes % 2]
        self._is_wide = self._is_wide or not part.isascii() or rb"\u" in part
        plain = whole.replace(rb"\\", b"").replace(rb"\"", b"")
        pieces = plain.split(b'"')
        self._count(b"".join(pieces[self._is_in_text :: 2]))
        if len(pieces) == 1:
            self._num_text_bytes += len(part) if self._is_in_text else 0
        else:
            self._num_text_bytes = len(pieces[-1])
        self._is_in_text ^= len(pieces) % 2 == 0
        if self._num_text_bytes > MAX_TEXT_BYTES:
            raise _too_much(f"a text of more than {MAX_TEXT_BYTES} bytes")

    def _count(self, plain: bytes) -> None:
        """Add up what stands in `plain`, which is outside of texts."""
        if _LONG_NUMBER.search(plain):
            raise _too_much(f"a number of more than {_MAX_DIGITS} digits")
        num_containers = plain.count(b"[") + plain.count(b"{")
        for name, num_more, most in (
            ("lists and objects", num_containers, MAX_CONTAINERS),
            ("names", plain.count(b":"), MAX_KEYS),
            ("values", num_containers + plain.count(b","), MAX_VALUES),
        ):
            self._counts[name] += num_more
            if self._counts[name] > most:
                raise _too_much(f"more than {most} {name}")


def _too_much(what: str) -> ApiError:
    return ApiError(400, f"the body holds {what}; ask for less at once", code="body_too_complex")


def decode(data: bytes | bytearray | msgspec.Raw, kind: Any) -> Any:
    """What JSON says, as `kind`. Raises ApiError, status 400, that names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _as_api_error(error, kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is no JSON that can be read: {why}") from error


def fields_of(data: bytes | bytearray, kind: type[msgspec.Struct]) -> dict[str, msgspec.Raw]:
    """The fields of a body, undecoded. Raises ApiError for too many, or one that is too long."""
    raw: dict[str, msgspec.Raw] = decode(data, dict[str, msgspec.Raw])
    if len(raw) > MAX_FIELDS:
        raise ApiError(400, f"the body has {len(raw)} fields, but at most {MAX_FIELDS} are allowed")
    may_be_long = LONG_FIELDS & set(kind.__struct_fields__)
    for name, value in raw.items():
        num_bytes = memoryview(value).nbytes
        most = MAX_TOOLS_FIELD_BYTES if name == "tools" else MAX_FIELD_BYTES
        if name not in may_be_long and num_bytes > most:
            raise ApiError(
                400,
                f"{name[:100]} has {num_bytes} bytes, but at most {most} are allowed",
                param=name[:100],
            )
    return raw


async def decode_body(
    data: bytes | bytearray, raw: Mapping[str, msgspec.Raw], kind: type[_BodyType]
) -> _BodyType:
    """The body that has the fields `raw`, as `kind`. Others run between slices of long fields.

    Raises ApiError, status 400, that names the field.
    """
    if len(data) <= SLICE_BYTES:
        whole: _BodyType = decode(data, kind)
        return whole
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    rest = {name: value for name, value in raw.items() if name in types}
    long = {}
    for name in LONG_FIELDS & rest.keys():
        first = bytes(memoryview(rest[name])[:1])
        if memoryview(rest[name]).nbytes > SLICE_BYTES and first in (b"[", b'"'):
            await asyncio.sleep(0)
            long[name] = await _decode_field(name, rest[name], types[name])
            rest[name] = msgspec.Raw(b"[]" if first == b"[" else b'""')
    await asyncio.sleep(0)
    body: _BodyType = decode(msgspec.json.encode(rest), kind)
    for name, value in long.items():
        setattr(body, name, value)
    return body


async def _decode_field(name: str, raw: msgspec.Raw, kind: Any) -> Any:
    """A long text, or the items of a long list."""
    try:
        if bytes(memoryview(raw)[:1]) == b'"':
            return decode(raw, kind)
        found: list[Any] = []
        for items in _slices(decode(raw, list[msgspec.Raw])):
            await asyncio.sleep(0)
            found += decode(b"[" + b",".join(items) + b"]", kind)
    except ApiError as error:
        raise ApiError(400, f"{name}: {error.message}", param=name) from error
    return found


def _slices(items: list[msgspec.Raw]) -> Iterator[list[msgspec.Raw]]:
    """Runs of items that are short together; a long one is alone."""
    slice_: list[msgspec.Raw] = []
    num_bytes = 0
    for item in items:
        num_more = memoryview(item).nbytes
        if slice_ and num_bytes + num_more > SLICE_BYTES:
            yield slice_
            slice_, num_bytes = [], 0
        slice_.append(item)
        num_bytes += num_more
    if slice_:
        yield slice_


def _inner_fields(kind: Any, name: str) -> tuple[str, ...]:
    """The fields that the field `name` of a struct may have; none where it is no struct."""
    hints = get_type_hints(kind) if isinstance(kind, type) and issubclass(kind, Struct) else {}
    for hint in get_args(hints.get(name)):
        if isinstance(hint, type) and issubclass(hint, Struct):
            return hint.__struct_fields__
    return ()


def _as_api_error(error: msgspec.ValidationError, kind: Any) -> ApiError:
    # The sentence is msgspec's: "Expected `int`, got `str` - at `$.n`".
    text = str(error)
    found = re.search(r" - at `\$\.?([A-Za-z_]\w*)?", text)
    param = found[1] if found else None
    if missing := re.search(r"missing required field `(\w+)`", text):
        param = missing[1]
    if param is not None and "unknown field" in text and (known := _inner_fields(kind, param)):
        text = f"{text}; it may have {', '.join(known)}"
    return ApiError(400, text.replace("`$.", "`").replace("`$", "`the body"), param=param)
