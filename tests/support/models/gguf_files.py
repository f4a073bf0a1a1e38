"""Writes tiny GGUF files, whole or broken on purpose, for tests; knows nothing of the reader."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "B",
    U64: "Q",
    I64: "q",
    F64: "d",
}

#: ggml type number to (elements, bytes) of a block, for the types that tests write.
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 12: (256, 144), 30: (1, 2)}


@dataclass(frozen=True)
class Mark:
    """A number in the file that a hostile test may overwrite: what it counts, where, how wide."""

    what: str
    offset: int
    width: int


@dataclass(frozen=True)
class Item:
    """A typed metadata value: `values` is a number, text, bytes, or a list of these or of Items."""

    type: int
    values: object
    item_type: int | None = None


@dataclass(frozen=True)
class FileTensor:
    """A tensor to write. `dims` is in the file's order: dims[0] is the row length."""

    name: str
    dims: tuple[int, ...]
    type: int = 0
    data: bytes | None = None
    offset: int | None = None

    def payload(self) -> bytes:
        if self.data is not None:
            return self.data
        elements, num_bytes = BLOCKS[self.type]
        total = 1
        for dim in self.dims:
            total *= dim
        return bytes(total // elements * num_bytes)


@dataclass
class GGUFWriter:
    """Lays a file out and remembers where each count, length, type and offset stands."""

    version: int = 3
    big_endian: bool = False
    alignment: int = 32
    magic: bytes = b"GGUF"
    num_tensors: int | None = None
    num_fields: int | None = None
    marks: list[Mark] = field(default_factory=list)
    out: bytearray = field(default_factory=bytearray)
    header_bytes: int = 0

    def build(
        self, fields: Sequence[tuple[str | bytes, Item]], tensors: Sequence[FileTensor] = ()
    ) -> bytes:
        """The whole file. Tensors are laid one after the other unless they give an offset."""
        self.out = bytearray(self.magic)
        self.marks = []
        self.put("version", U32, self.version)
        count = len(tensors) if self.num_tensors is None else self.num_tensors
        self.put("number of tensors", U64, count)
        count = len(fields) if self.num_fields is None else self.num_fields
        self.put("number of fields", U64, count)
        for key, item in fields:
            self.text("key", key)
            self.put("value type", U32, item.type)
            self.item(item)
        offset = 0
        for tensor in tensors:
            self.text("tensor name", tensor.name)
            self.put("number of dimensions", U32, len(tensor.dims))
            for dim in tensor.dims:
                self.put("dimension", U64, dim)
            self.put("tensor type", U32, tensor.type)
            self.put("offset", U64, offset if tensor.offset is None else tensor.offset)
            offset += self.padded(len(tensor.payload()))
        self.header_bytes = len(self.out)
        for tensor in tensors:
            self.out += bytes(self.padded(len(self.out)) - len(self.out))
            self.out += tensor.payload()
        return bytes(self.out)

    def padded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.alignment) * self.alignment

    def put(self, what: str, kind: int, value: object) -> None:
        packed = struct.pack((">" if self.big_endian else "<") + FORMATS[kind], value)
        self.marks.append(Mark(what, len(self.out), len(packed)))
        self.out += packed

    def text(self, what: str, text: object) -> None:
        assert isinstance(text, str | bytes), text
        raw = text.encode() if isinstance(text, str) else text
        self.put(f"length of {what}", U64, len(raw))
        self.out += raw

    def item(self, item: Item) -> None:
        if item.type == STRING:
            self.text("string", item.values)
        elif item.type == ARRAY:
            assert isinstance(item.values, list | tuple), item
            assert item.item_type is not None, item
            self.put("item type", U32, item.item_type)
            self.put("length of array", U64, len(item.values))
            for value in item.values:
                self.item(value if isinstance(value, Item) else Item(item.item_type, value))
        else:
            self.put("value", item.type, item.values)


def array_of(item_type: int, values: Sequence[object]) -> Item:
    """An array; for nested ones give `item_type` ARRAY and Items."""
    return Item(ARRAY, list(values), item_type)


def every_value() -> list[tuple[str | bytes, Item]]:
    """One key of each value type, and arrays of each, with values at the ends of their ranges."""
    return [
        ("general.architecture", Item(STRING, "llama")),
        ("u8", Item(U8, 255)),
        ("i8", Item(I8, -128)),
        ("u16", Item(U16, 65535)),
        ("i16", Item(I16, -32768)),
        ("u32", Item(U32, 2**32 - 1)),
        ("i32", Item(I32, -(2**31))),
        ("f32", Item(F32, 0.5)),
        ("yes", Item(BOOL, 1)),
        ("no", Item(BOOL, 0)),
        ("u64", Item(U64, 2**64 - 1)),
        ("i64", Item(I64, -(2**63))),
        ("f64", Item(F64, 0.1)),
        ("text", Item(STRING, "Grüße")),
        ("tokens", array_of(STRING, ["a", "", "Ġb", b"\xff\xfe", "d" * 40])),
        ("scores", array_of(F32, [0.0, -1.5, 3.0])),
        ("ids", array_of(I32, [1, -2, 3])),
        ("flags", array_of(BOOL, [1, 0, 1])),
        ("bytes", array_of(U8, list(range(9)))),
        ("nothing", array_of(U32, [])),
        ("nested", array_of(ARRAY, [array_of(U16, [1, 2]), array_of(STRING, ["x", "yz"])])),
    ]


def every_tensor() -> list[FileTensor]:
    """A few small tensors of several types and dimensions, with distinct bytes."""
    return [
        FileTensor("token_embd.weight", (8, 3), 0, bytes(range(96))),
        FileTensor("half", (5,), 1, bytes(range(100, 110))),
        FileTensor("blk.0.q", (64, 2), 8, bytes(i % 251 for i in range(136))),
        FileTensor("blk.0.k", (256, 1), 12, bytes(i % 241 for i in range(144))),
        FileTensor("four", (2, 2, 2, 2), 30, bytes(range(32))),
    ]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def write_split(
    folder: Path,
    stem: str,
    tensors: Sequence[FileTensor],
    num_shards: int,
    *,
    number: Sequence[int] | None = None,
    count: int | None = None,
    total: int | None = None,
) -> list[Path]:
    """A split model of `num_shards` files, tensors dealt round; the keywords plant false values."""
    paths = []
    for shard in range(num_shards):
        own = tensors[shard::num_shards]
        fields: list[tuple[str | bytes, Item]] = [
            ("split.no", Item(U16, shard if number is None else number[shard])),
            ("split.count", Item(U16, num_shards if count is None else count)),
            ("split.tensors.count", Item(I32, len(tensors) if total is None else total)),
        ]
        if shard == 0:
            fields.insert(0, ("general.architecture", Item(STRING, "llama")))
        path = folder / f"{stem}-{shard + 1:05d}-of-{num_shards:05d}.gguf"
        paths.append(write(path, GGUFWriter().build(fields, own)))
    return paths
