"""Copies of settled KV blocks in shared memory, which outlive the process that computed them.

The server has the memory and never looks into it. A worker copies each block there that its cache
keeps; after its death the next one reads back what its own requests ask for, instead of computing
it again. Layout of the file, each part from the start of a page:

    header   magic, fingerprint, number of slots, and of the step that runs
    entries  one for each slot: digest of the block's tokens, checksum, step at which it was copied,
             and the settings of the process then, for whoever asks later what went wrong
    data     one slot after the other: the block's keys and values, page after page

A checksum covers an entry and its data, so a slot that was torn or written over is not read. What
was copied in the last steps of a process that died is not read either: the step that went wrong may
have spoiled what it computed, before it was copied.
"""

from __future__ import annotations

import logging
import mmap
import os
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.record.prefixes import SETTINGS

_log = logging.getLogger("hypocenter.engine")

#: A step that goes wrong ends its process at once or soon: what these last ones left is in doubt.
NUM_DOUBTED_STEPS = 4
DIGEST_BYTES = 32
_MAGIC = b"hypoKV02"
_HEADER = np.dtype([("magic", "S8"), ("fingerprint", "V32"), ("num_slots", "<u8"), ("step", "<u8")])
_ENTRY = np.dtype(
    [
        ("digest", f"V{DIGEST_BYTES}"),
        ("step", "<u8"),
        ("checksum", "<u4"),
        ("is_full", "<u4"),
        ("settings", "S16"),
    ]
)


class BlockArchive:
    """Blocks of `pages`, by digest, in the file at `path`. Not thread-safe.

    `pages`: arrays whose first axis is the block. `fingerprint`, 32 bytes, stands for everything
    that their contents depend on besides the tokens: what was left under another one is forgotten.
    `settings` are 16 characters that stand for the same, made apart from it for the record.
    At most `max_bytes` of data are held, the last to be put. Raises OSError when the file cannot
    be had, and when not one block has room.
    """

    def __init__(
        self,
        path: str,
        pages: Sequence[Array],
        fingerprint: bytes,
        max_bytes: int,
        settings: str = "",
    ) -> None:
        assert len(fingerprint) == DIGEST_BYTES, fingerprint
        self.settings = settings
        self._pages = pages
        self._slot_bytes = sum(page[0].nbytes for page in pages)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            num_slots = self._num_slots_left(file, fingerprint)
            is_new = not num_slots
            num_slots = num_slots or max_bytes // self._slot_bytes
            if not num_slots:
                raise OSError(f"{max_bytes} bytes have no room for a block of {self._slot_bytes}")
            data_at, file_bytes = self._layout(num_slots)
            if is_new:
                os.ftruncate(file, 0)
                os.ftruncate(file, file_bytes)
            memory = mmap.mmap(file, file_bytes)
        finally:
            os.close(file)
        self._header = np.frombuffer(memory, _HEADER, 1)
        self._entries = np.frombuffer(memory, _ENTRY, num_slots, mmap.PAGESIZE)
        data = np.frombuffer(memory, np.uint8, num_slots * self._slot_bytes, data_at)
        self._data = data.reshape(num_slots, self._slot_bytes)
        #: Slot of each digest; the one that was put first comes first.
        self._slots: dict[bytes, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        if is_new:
            self._header[0] = (_MAGIC, fingerprint, num_slots, 0)
        else:
            self._take_over()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def note_step(self) -> None:
        """A step has ended; one that died within the last few left nothing to be trusted."""
        self._header["step"] += 1

    def put(self, digest: bytes, block_id: int) -> None:
        """Copy a block that is full and will not be written again."""
        if digest in self._slots:
            return
        slot = self._free.pop() if self._free else self._slots.pop(next(iter(self._slots)))
        entry, data = self._entries[slot : slot + 1], self._data[slot]
        entry["is_full"] = 0
        for block, part in zip(self._blocks(block_id), self._parts(data), strict=True):
            np.copyto(part, block)
        step = self._header["step"]
        entry["digest"], entry["step"] = np.void(digest), step
        entry["settings"] = self.settings.encode()
        entry["checksum"] = _checksum(digest, step, self.settings.encode(), data)
        entry["is_full"] = 1
        self._slots[digest] = slot

    def fetch(self, digest: bytes, block_id: int) -> bool:
        """Copy back what was put under `digest`; False where its bytes are not those any more."""
        slot = self._slots[digest]
        data = self._data[slot]
        for block, part in zip(self._blocks(block_id), self._parts(data), strict=True):
            np.copyto(block, part)
        entry = self._entries[slot]
        noted = bytes(entry["settings"])
        if entry["checksum"] == _checksum(digest, entry["step"], noted, data):
            return True
        _log.warning("a block that another process left is damaged; it is computed again")
        self.forget(digest)
        return False

    def made_with(self, digest: bytes) -> dict[str, str]:
        """The settings of the process that put what is under `digest`, as the record has them."""
        noted = self._entries["settings"][self._slots[digest]].decode(errors="replace")
        return {SETTINGS: noted} if noted else {}

    def forget(self, digest: bytes) -> None:
        """What was put under `digest`, if anything, is in doubt."""
        slot = self._slots.pop(digest, None)
        if slot is not None:
            self._entries["is_full"][slot] = 0
            self._free.append(slot)

    def _layout(self, num_slots: int) -> tuple[int, int]:
        """Where the data begin, and the size of the file."""
        data_at = mmap.PAGESIZE + _whole_pages(num_slots * _ENTRY.itemsize)
        return data_at, data_at + num_slots * self._slot_bytes

    def _num_slots_left(self, file: int, fingerprint: bytes) -> int:
        """The number of slots of a file that was left whole, with this fingerprint; 0 for any
        other."""
        beginning = os.pread(file, _HEADER.itemsize, 0)
        if len(beginning) < _HEADER.itemsize:
            return 0
        header = np.frombuffer(beginning, _HEADER)[0]
        num_slots = int(header["num_slots"])
        is_ours = header["magic"] == _MAGIC and header["fingerprint"].tobytes() == fingerprint
        is_whole = os.fstat(file).st_size == self._layout(num_slots)[1]
        return num_slots if is_ours and is_whole else 0

    def _take_over(self) -> None:
        """Find what the process before left, but for what is in doubt."""
        step = int(self._header["step"][0])
        steps, full = self._entries["step"].astype(np.int64), self._entries["is_full"] == 1
        trusted = full & (steps <= step - NUM_DOUBTED_STEPS)
        self._entries["is_full"][:] = trusted
        order = np.flatnonzero(trusted)
        for slot in order[np.argsort(steps[order], kind="stable")]:
            self._slots[self._entries["digest"][slot].tobytes()] = int(slot)
        taken = set(self._slots.values())
        self._free = [slot for slot in self._free if slot not in taken]

    def _blocks(self, block_id: int) -> list[Array]:
        return [page[block_id] for page in self._pages]

    def _parts(self, data: Array) -> list[Array]:
        """What each page has of a slot's bytes, in the page's own shape."""
        parts, start = [], 0
        for page in self._pages:
            block: Array = page[0]
            parts.append(data[start : start + block.nbytes].view(block.dtype).reshape(block.shape))
            start += block.nbytes
        return parts


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _checksum(digest: bytes, step: Any, settings: bytes, data: Array) -> int:
    return zlib.crc32(data.data, zlib.crc32(digest + step.tobytes() + settings))
