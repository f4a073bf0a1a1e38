"""Clang's offload bundles: code objects of several targets in one file.

Source: "Clang Offload Bundler", bundled binary file layout. A compressed bundle is refused.
"""

from __future__ import annotations

import struct

from hypocenter.base.errors import BadCodeObject

MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
COMPRESSED_MAGIC = b"CCOB"
_MAX_ENTRIES, _MAX_NAME_BYTES = 256, 512
_ENTRY = struct.Struct("<QQQ")


def code_of_bundle(data: bytes, name: str, arch: str | None) -> bytes:
    """The code object for `arch`, or the only one that a bundle holds.

    Raises BadCodeObject for a bundle that is damaged or compressed, or has none for `arch`.
    """
    held = _entries(data, name)
    targets = [triple for triple, code in held.items() if code and "amdgcn" in triple]
    wanted = [triple for triple in targets if arch is None or _arch_of(triple) == arch]
    if len(wanted) == 1:
        return held[wanted[0]]
    found = ", ".join(sorted(_arch_of(triple) for triple in targets)) or "no AMD target"
    if arch is None:
        raise BadCodeObject(name, f"is a bundle of code for {found}; say which with --on")
    several = "several times" if wanted else "not"
    raise BadCodeObject(name, f"is a bundle of code for {found}; {arch} is {several} among them")


def _arch_of(triple: str) -> str:
    """`gfx942` of `hipv4-amdgcn-amd-amdhsa--gfx942:xnack-`."""
    return triple.partition(":")[0].rpartition("-")[2]


def _entries(data: bytes, name: str) -> dict[str, bytes]:
    if data.startswith(COMPRESSED_MAGIC):
        way_out = "compile with --no-offload-compress, or unbundle it with clang-offload-bundler"
        raise BadCodeObject(name, f"is a compressed bundle, which is not read here; {way_out}")
    at = len(MAGIC) + 8
    number = int.from_bytes(data[len(MAGIC) : at], "little")
    if len(data) < at or number > _MAX_ENTRIES:
        raise BadCodeObject(name, f"is a bundle of {number} entries, limit {_MAX_ENTRIES}")
    held: dict[str, bytes] = {}
    for _ in range(number):
        if at + _ENTRY.size > len(data):
            raise BadCodeObject(name, "is a bundle that is cut off")
        first, size, name_bytes = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        if name_bytes > _MAX_NAME_BYTES or max(at + name_bytes, first + size) > len(data):
            raise BadCodeObject(name, "is a bundle that is cut off or damaged")
        held[data[at : at + name_bytes].decode(errors="replace")] = data[first : first + size]
        at += name_bytes
    return held
