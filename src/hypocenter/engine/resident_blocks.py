"""Which blocks of a GPU's KV cache hold what, told to the worker that has its memory next.

The cache lies in memory of a process that runs none of our kernels (`worker/keeper.py`), so it
outlives who computed it. What is needed to know its blocks again lies in host memory that the
server has: an entry for each block, with the digest of its tokens and the step at which it was
kept. The sum of its contents lies beside the cache (`device/block_sums.py`).

A block is taken over where the sum proves it whole. What was kept in the last steps of a process
that died is not taken over: the step that went wrong may have spoiled what it computed.
"""

from __future__ import annotations

import logging
import mmap
import os

import numpy as np

from hypocenter.device.block_sums import BlockSums
from hypocenter.engine.block_archive import DIGEST_BYTES, NUM_DOUBTED_STEPS
from hypocenter.record.prefixes import SETTINGS

_log = logging.getLogger("hypocenter.engine")
_MAGIC = b"hypoGP01"
_HEADER = np.dtype([("magic", "S8"), ("fingerprint", f"V{DIGEST_BYTES}"), ("step", "<u8")])
_ENTRY = np.dtype([("digest", f"V{DIGEST_BYTES}"), ("step", "<u8"), ("is_full", "<u8")])


class ResidentBlocks:
    """The blocks that `sums` covers, by what the file at `path` says of them. Not thread-safe.

    `fingerprint`, 32 bytes, stands for everything that their contents depend on besides the tokens:
    what was left under another one is forgotten. `settings` are as in `BlockArchive`. `found` are
    the blocks that were taken over, by digest, the one kept first first. Raises OSError when the
    file cannot be had.
    """

    def __init__(
        self, path: str, sums: BlockSums, num_blocks: int, fingerprint: bytes, settings: str
    ) -> None:
        assert len(fingerprint) == DIGEST_BYTES, fingerprint
        self.settings, self._sums = settings, sums
        self._kept_now: list[int] = []
        file_bytes = mmap.PAGESIZE + num_blocks * _ENTRY.itemsize
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            is_whole = os.fstat(file).st_size == file_bytes
            if not is_whole:
                os.ftruncate(file, 0)
                os.ftruncate(file, file_bytes)
            memory = mmap.mmap(file, file_bytes)
        finally:
            os.close(file)
        self._header = np.frombuffer(memory, _HEADER, 1)
        self._entries = np.frombuffer(memory, _ENTRY, num_blocks, mmap.PAGESIZE)
        header = self._header[0]
        is_ours = header["magic"] == _MAGIC and header["fingerprint"].tobytes() == fingerprint
        self.found: dict[bytes, int] = self._take_over() if is_ours else {}
        if not is_ours:
            self._entries["is_full"][:] = 0
            self._header[0] = (_MAGIC, fingerprint, 0)

    @property
    def made_with(self) -> dict[str, str]:
        """The settings by which the blocks that were found were made, as the record has them."""
        return {SETTINGS: self.settings} if self.settings else {}

    def put(self, block_id: int, digest: bytes) -> None:
        """A block is full and will not be written again; its sum is made at the end of the step."""
        entry = self._entries[block_id : block_id + 1]
        entry["is_full"] = 0
        entry["digest"], entry["step"] = np.void(digest), self._header["step"]
        entry["is_full"] = 1
        self._kept_now.append(block_id)

    def forget(self, block_id: int) -> None:
        """It is about to be written again, or what it holds is in doubt."""
        self._entries["is_full"][block_id] = 0
        if block_id in self._kept_now:
            self._kept_now.remove(block_id)

    def note_step(self) -> None:
        """A step has ended; one that died within the last few left nothing to be trusted."""
        if self._kept_now:
            self._sums.note(self._kept_now)
            self._kept_now = []
        self._header["step"] += 1

    def _take_over(self) -> dict[bytes, int]:
        """Find what the process before left, but for what is in doubt."""
        step = int(self._header["step"][0])
        steps, full = self._entries["step"].astype(np.int64), self._entries["is_full"] == 1
        order = np.flatnonzero(full & (steps <= step - NUM_DOUBTED_STEPS))
        ids = [int(block) for block in order[np.argsort(steps[order], kind="stable")]]
        whole = self._sums.holds(ids)
        found = {
            self._entries["digest"][block].tobytes(): block
            for block, is_whole in zip(ids, whole, strict=True)
            if is_whole
        }
        if num_damaged := len(ids) - sum(whole):
            _log.warning("%d blocks of the KV cache are damaged and computed again", num_damaged)
        self._entries["is_full"][:] = 0
        self._entries["is_full"][list(found.values())] = 1
        return found
