"""ELF files of sections: core dumps taken apart, changed and put together again.

`python tests/support/recorded/core_dumps.py DUMP OUT.xz` makes a fixture of a real dump: without
the code of modules of which no kernel ran.
"""

from __future__ import annotations

import lzma
import struct
import sys
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "fixtures" / "coredump"
HEADER_BYTES = ROW_BYTES = 64
GRIDS, MODULES, IMAGES = 0x8000000C, 0x80000010, 0x80000007

#: What the ROCm debug agent prints, in the form of ROCm 6 and of ROCm 7; the values are made up.
AGENT_TEXT = """\
Memory access fault by GPU node-1 (Agent handle: 0x55d0c3a61f80) on address 0x7f3e5a400000. \
Reason: Page not present or supervisor privilege.
--------------------------------------------------------
wave_3: pc=0x7f3e61004128 (stopped, reason: MEMORY_VIOLATION)

system registers:
            m0: 00000000        status: 00012461
          exec: ffffffffffffffff           vcc: 0000000000000000

vector registers:
            v0: [0] 5a400000 [1] 5a400004 [2] 5a400008
            v1: [0] 00007f3e [1] 00007f3e [2] 00007f3e

Disassembly for function scatter(long const*, float*, int):
    code object: file:///home/user/scatter#offset=4096&size=9000
    loaded at: [0x7f3e61004000-0x7f3e61006070]

/home/user/scatter.hip:
17        out[ids[i]] = 1.0f;
    0x7f3e61004120 <+32>:    global_store_dword v[0:1], v2, off
 => 0x7f3e61004128 <+40>:    s_waitcnt vmcnt(0)

End of disassembly.
wave_4: pc=0x7f3e61004140 (kernel_code_entry=0x7f3e61004000 <scatter>, kernargs=0x7f3e60000000) \
(stopped, reason: MEMORY_VIOLATION)
"""


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


def bundle_folder(name: str, folder: Path) -> Path:
    """A bundle that `benchmarks/gpu_coredump.py` made on an H100 of the program of that name."""
    with tarfile.open(FIXTURES / "bundles.tar.xz") as tar:
        tar.extractall(folder, [m for m in tar if Path(m.name).parts[:1] == (name,)], filter="data")
    return folder / name


def fixture(name: str) -> bytes:
    """A real dump of an H100: `gather`, `pointers` or `spin`."""
    return lzma.decompress((FIXTURES / f"{name}.nvcudmp.xz").read_bytes())


if __name__ == "__main__":
    whole = Path(sys.argv[1]).read_bytes()
    Path(sys.argv[2]).write_bytes(lzma.compress(cut(whole), preset=9))
