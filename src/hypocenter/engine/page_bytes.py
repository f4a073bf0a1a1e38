"""The bytes of KV blocks in host memory, page after page, and files that hold those of one prompt.

A file of a prompt is written for whoever asks for that, and read back by a later process:

    header   magic, fingerprint, numbers of tokens and blocks, bytes of a block, digest of the rest
    tokens   i32 for each
    blocks   one after the other, each the bytes of every page
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import UsageError
from hypocenter.device.cpu.host_copies import collect, spread

_MAGIC = b"hypoSL01"
_HEADER = struct.Struct("<8s32sQQQ32s")
#: Tokens and bytes of a file that is believed.
_MAX_TOKENS, _MAX_BYTES = 1 << 24, 1 << 40


class PageBytes:
    """`pages`: arrays whose first axis is the block. While one is copied other threads go on."""

    def __init__(self, pages: Sequence[Array]) -> None:
        self._pages = pages  # they are not let go while their addresses are known here
        self._num_blocks = min(len(page) for page in pages)
        firsts: list[int] = []
        steps: list[int] = []
        sizes: list[int] = []
        for page in pages:
            offsets, num_bytes = _parts_of(page[0])
            firsts += [page.ctypes.data + offset for offset in offsets]
            steps += len(offsets) * [page.strides[0]]
            sizes += len(offsets) * [num_bytes]
        self._firsts, self._steps = np.array(firsts, np.uint64), np.array(steps, np.uint64)
        self._sizes = np.array(sizes, np.int64)
        self.num_bytes = int(self._sizes.sum())

    def copy_of(self, block_id: int) -> Array:
        """u8 [num_bytes], which stays as it is."""
        data = np.empty(self.num_bytes, np.uint8)
        collect(data, self._addresses(block_id), self._sizes)
        return data

    def put(self, block_id: int, data: Array) -> None:
        """Have the block hold what `copy_of` gave, of this process or another one."""
        spread(data, self._addresses(block_id), self._sizes)

    def _addresses(self, block_id: int) -> Array:
        if not 0 <= block_id < self._num_blocks:
            raise IndexError(f"block {block_id} of {self._num_blocks}")
        return self._firsts + np.uint64(block_id) * self._steps


def _parts_of(block: Array) -> tuple[list[int], int]:
    """Where the contiguous parts of an array begin, in bytes, and what each of them takes."""
    num_outer = 0
    while not block[(0,) * num_outer].flags.c_contiguous:
        num_outer += 1
    strides = block.strides[:num_outer]
    places = np.ndindex(block.shape[:num_outer])
    offsets = [sum(n * step for n, step in zip(at, strides, strict=True)) for at in places]
    return offsets, block[(0,) * num_outer].nbytes


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    """The tokens of a prompt with its answer, and its leading blocks, as far as they were kept."""

    token_ids: tuple[int, ...]
    blocks: tuple[Array, ...]


def write_private(path: Path, parts: Sequence[bytes | memoryview]) -> int:
    """A file for its owner alone, whole or not at all. Returns its bytes; raises OSError."""
    unfinished = path.with_name(f".{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(unfinished, flags, 0o600)
    try:
        with os.fdopen(file, "wb") as opened:
            num_bytes = sum(opened.write(part) for part in parts)
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return num_bytes


def save_prompt(path: Path, fingerprint: bytes, prompt: SavedPrompt) -> int:
    """Write it; returns the bytes of the file. Raises UsageError where that cannot be."""
    ids = struct.pack(f"<{len(prompt.token_ids)}i", *prompt.token_ids)
    check = hashlib.sha256(ids)
    for block in prompt.blocks:
        check.update(block.data)
    block_bytes = prompt.blocks[0].nbytes if prompt.blocks else 0
    header = _HEADER.pack(
        _MAGIC, fingerprint, len(prompt.token_ids), len(prompt.blocks), block_bytes, check.digest()
    )
    try:
        return write_private(path, [header, ids, *(block.data for block in prompt.blocks)])
    except OSError as error:
        raise UsageError(f"{path.name} cannot be written: {error.strerror}") from error


def load_prompt(path: Path, fingerprint: bytes, block_bytes: int) -> tuple[SavedPrompt, int]:
    """What `save_prompt` wrote, and the bytes of the file.

    Raises UsageError for a file that is not there, is damaged, or is of another model or settings.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as opened:
            header = opened.read(_HEADER.size)
            num_tokens, num_blocks = _numbers_of(path, header, fingerprint, block_bytes)
            rest = opened.read(4 * num_tokens + num_blocks * block_bytes + 1)
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read: {error.strerror}") from error
    whole = len(rest) == 4 * num_tokens + num_blocks * block_bytes
    if not whole or hashlib.sha256(rest).digest() != _HEADER.unpack(header)[-1]:
        raise UsageError(f"{path.name} is damaged; save it anew")
    token_ids = struct.unpack_from(f"<{num_tokens}i", rest)
    data = np.frombuffer(rest, np.uint8, offset=4 * num_tokens)
    blocks = tuple(data.reshape(num_blocks, block_bytes)) if num_blocks else ()
    return SavedPrompt(token_ids, blocks), len(header) + len(rest)


def _numbers_of(path: Path, header: bytes, fingerprint: bytes, own_bytes: int) -> tuple[int, int]:
    """Numbers of tokens and of blocks. Raises UsageError for what is no such file of ours."""
    if len(header) < _HEADER.size:
        raise UsageError(f"{path.name} is damaged; save it anew")
    magic, of, num_tokens, num_blocks, block_bytes, _ = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise UsageError(f"{path.name} is no saved prompt of this version")
    if of != fingerprint or (num_blocks and block_bytes != own_bytes):
        raise UsageError(f"{path.name} was saved with another model, or other settings")
    if num_tokens > _MAX_TOKENS or num_blocks > num_tokens or num_blocks * own_bytes > _MAX_BYTES:
        raise UsageError(f"{path.name} is damaged; save it anew")
    return num_tokens, num_blocks
