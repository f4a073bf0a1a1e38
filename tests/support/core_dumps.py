"""ELF files of sections: core dumps taken apart, changed and put together again.

`python tests/support/core_dumps.py DUMP OUT.xz` makes a fixture of a real dump: without the code
of modules of which no kernel ran.
"""

from __future__ import annotations

import lzma
import struct
import sys
from dataclasses import dataclass, replace
from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "fixtures" / "coredump"
HEADER_BYTES = ROW_BYTES = 64
GRIDS, MODULES, IMAGES = 0x8000000C, 0x80000010, 0x80000007


@dataclass(frozen=True)
class Part:
    """A section: `name` is its offset in the table of names."""

    name: int
    type: int
    flags: int
    address: int
    link: int
    info: int
    align: int
    entry_bytes: int
    data: bytes


def take_apart(dump: bytes) -> tuple[bytes, list[Part]]:
    """The header of an ELF file, and its sections."""
    table, number = struct.unpack_from("<Q", dump, 40)[0], struct.unpack_from("<H", dump, 60)[0]
    number = number or struct.unpack_from("<Q", dump, table + 32)[0]
    parts = []
    for at in range(number):
        name, kind, flags, address, start, size, link, info, align, entry = struct.unpack_from(
            "<IIQQQQIIQQ", dump, table + at * ROW_BYTES
        )
        data = dump[start : start + size] if kind else b""
        parts.append(Part(name, kind, flags, address, link, info, align, entry, data))
    return dump[:HEADER_BYTES], parts


def put_together(header: bytes, parts: list[Part]) -> bytes:
    body, rows = bytearray(header), bytearray()
    is_long = len(parts) >= 0xFF00
    for at, part in enumerate(parts):
        size = len(parts) if is_long and not at else len(part.data)
        rows += struct.pack(
            "<IIQQQQIIQQ", part.name, part.type, part.flags, part.address, len(body),
            size, part.link, part.info, part.align, part.entry_bytes,
        )  # fmt: skip
        body += part.data
        body += bytes(-len(body) % 8)
    struct.pack_into("<Q", body, 40, len(body))
    struct.pack_into("<H", body, 60, 0 if is_long else len(parts))
    return bytes(body + rows)


def cut(dump: bytes) -> bytes:
    """The dump without the code of modules of which no kernel ran."""
    header, parts = take_apart(dump)
    ran = {
        part.data[at + 32 : at + 40]
        for part in parts
        if part.type == GRIDS
        for at in range(0, len(part.data), part.entry_bytes)
    }
    kept = {
        (number, at // 8)
        for number, part in enumerate(parts)
        if part.type == MODULES
        for at in range(0, len(part.data), 8)
        if part.data[at : at + 8] in ran
    }
    if kept:
        parts = [
            replace(part, data=b"")
            if part.type == IMAGES and (part.link, part.info) not in kept
            else part
            for part in parts
        ]
    return put_together(header, parts)


def fixture(name: str) -> bytes:
    """A real dump of an H100: `gather`, `pointers` or `spin`."""
    return lzma.decompress((FIXTURES / f"{name}.nvcudmp.xz").read_bytes())


if __name__ == "__main__":
    whole = Path(sys.argv[1]).read_bytes()
    Path(sys.argv[2]).write_bytes(lzma.compress(cut(whole), preset=9))
