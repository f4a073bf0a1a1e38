"""Settled KV blocks on disk, which outlive the server: a file for each, found by its digest.

    put       a block is kept; it is written once the steps after it have ended well
    prefetch  reads ahead what a request will ask for, in whichever thread makes it ready
    take      gives a block that was read ahead
    fill      copies such blocks into the cache

A file `DIGEST.PID.kv` lies in a folder of its fingerprint, which stands for everything that a
block's contents depend on besides its tokens and their salt: the model's file, types, settings with
the chat template, and our code. It has a header and the block's bytes, page after page. The header
has a digest of itself and of a checksum of the bytes, so that a file which was cut or changed is a
miss. What was computed in the last steps of a process that died was not written yet
(`block_archive.NUM_DOUBTED_STEPS`).

Reading must pay: what reading a block takes and what computing it takes are measured as they
happen, and where reading is slower, nothing is read. All files together take at most `max_bytes`
(`disk_room.py`). Nothing that goes wrong on disk is more than a miss.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import queue
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import UsageError
from hypocenter.engine.block_archive import DIGEST_BYTES, NUM_DOUBTED_STEPS
from hypocenter.engine.disk_room import SUFFIX, DiskRoom
from hypocenter.engine.page_bytes import PageBytes, write_private
from hypocenter.record.prefixes import SETTINGS
from hypocenter.settings.cache_folder import changeable_by_others, make_private

_T = TypeVar("_T")
_log = logging.getLogger("hypocenter.engine")
_MAGIC = b"hypoDB02"
#: Magic number, digest of the tokens, settings as the record has them, number of bytes, check.
_HEADER = struct.Struct(f"<8s{DIGEST_BYTES}s16sQ32s")
#: What may wait to be written, and what may have been read ahead.
_MAX_WAITING_BYTES = _MAX_AHEAD_BYTES = 512 << 20
#: After the disk was full, or could not be written, nothing is for so long.
_PAUSE_SECONDS = 60.0
#: Each waits for the disk, then makes a checksum of what came: several keep the disk busy. Of 4, 8
#: and 16 on 16 cores, 8 read most: 1.0 GB/s, where 4 read 0.91 and 16 read 0.99.
NUM_READERS = min(8, len(os.sched_getaffinity(0)))
#: Blocks that are worth a thread of their own when they are copied.
_BLOCKS_OF_THREAD = 4
#: How much a new measurement counts.
_WEIGHT = 0.2
#: Where reading did not pay, one request in so many reads a block, to see whether it does now.
_TRIES = 32


class DiskBlocks:
    """Blocks of `pages` in `folder`.

    `fingerprint`, 32 bytes, and `settings` are as in `BlockArchive`. Only `prefetch` may be called
    from several threads. Raises UsageError where others could change what lies in the folder.
    """

    def __init__(
        self,
        folder: Path,
        pages: PageBytes,
        block_size: int,
        fingerprint: bytes,
        max_bytes: int,
        settings: str = "",
    ) -> None:
        self._folder = folder / fingerprint.hex()[:32]
        _require_private(folder, self._folder)
        self.settings, self._pages, self._block_size = settings, pages, block_size
        self._block_bytes = pages.num_bytes
        self._root, self._room = folder, DiskRoom(folder, max_bytes)
        if _HEADER.size + self._block_bytes > max_bytes:
            text = "%s may take %d bytes, and a block is one of %d: none is written"
            _log.warning(text, folder, max_bytes, _HEADER.size + self._block_bytes)
        self._lock = threading.Lock()
        #: Names of files by the digest of their tokens.
        self._names = dict(_names_in(self._folder))
        #: Blocks that were kept lately, and the step in which; by digest.
        self._settling: dict[bytes, tuple[int, int]] = {}
        self._ahead: OrderedDict[bytes, Array] = OrderedDict()
        self._made_with: dict[bytes, str] = {}
        self._step = 0
        self._paused_until = 0.0
        self._read_seconds: float | None = None
        self._token_seconds: float | None = None
        self._does_pay, self._num_passed = True, 0
        self.num_read = self.num_written = 0
        most = max(_MAX_WAITING_BYTES // max(self._block_bytes, 1), 1)
        self._waiting: queue.Queue[tuple[bytes, Array] | None] = queue.Queue(most)
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="disk cache")
        #: Apart from those, which may all be waiting for the disk.
        self._copiers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="disk cache copy")
        self._writer = threading.Thread(target=self._write_all, name="disk cache", daemon=True)
        _checksum_of(np.zeros(0, np.uint8))  # compiled before reading is measured
        self._writer.start()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, digest: bytes) -> bool:
        """Whether `take` will find it, if no other thread reads ahead meanwhile."""
        return digest in self._ahead

    # -- what is kept ------------------------------------------------------------------------------

    def put(self, digest: bytes, block_id: int) -> None:
        """A block is full and is not written again while it is kept under that digest."""
        if digest not in self._names:
            self._settling[digest] = block_id, self._step

    def withdraw(self, digest: bytes) -> None:
        """The cache keeps it no longer."""
        self._settling.pop(digest, None)

    def forget(self, digest: bytes) -> None:
        """What was put under `digest`, if anything, is in doubt."""
        self.withdraw(digest)
        self._remove(digest)

    def note_step(self) -> None:
        """A step has ended well."""
        self._step += 1
        self._write_until(self._step - NUM_DOUBTED_STEPS)

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """A step that read so many tokens of prompts took so long."""
        self._token_seconds = _mean(self._token_seconds, seconds / num_tokens)

    def close(self, seconds: float = 3.0) -> None:
        """Write what waits, for at most so long: the process ends well."""
        self._write_until(self._step)
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=seconds)
            self._writer.join(seconds)
        for threads in (self._readers, self._copiers):
            threads.shutdown(wait=False, cancel_futures=True)

    def _write_until(self, step: int) -> None:
        """Hand what was kept up to that step to the thread that writes."""
        while self._settling:
            digest = next(iter(self._settling))
            block_id, kept_at = self._settling[digest]
            if kept_at > step:
                return
            del self._settling[digest]
            if not self._waiting.full():  # else the disk is behind: it is not worth waiting for
                self._waiting.put_nowait((digest, self._pages.copy_of(block_id)))

    def _write_all(self) -> None:
        while (found := self._waiting.get()) is not None:
            if time.monotonic() >= self._paused_until:
                try:
                    self._write(*found)
                except OSError as error:
                    self._paused_until = time.monotonic() + _PAUSE_SECONDS
                    why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
                    _log.warning("blocks are not written to %s for now: %s", self._root, why)

    def _write(self, digest: bytes, data: Array) -> None:
        settings = self.settings.encode()
        check = _check(digest, settings, data)
        header = _HEADER.pack(_MAGIC, digest, settings, data.nbytes, check)
        name = f"{digest.hex()}.{os.getpid()}{SUFFIX}"
        with self._room.reserve(_HEADER.size + data.nbytes) as has_room:
            if not has_room:
                return
            write_private(self._folder / name, [header, data.data])
        with self._lock:
            self._names[digest] = name
        self.num_written += 1

    # -- what is read ------------------------------------------------------------------------------

    def prefetch(self, digests: Sequence[bytes]) -> None:
        """Read ahead what lies on disk of these blocks, in order, up to the first that does not."""
        wanted = []
        with self._lock:
            for digest in digests:
                if digest not in self._ahead:
                    if digest not in self._names:
                        break
                    wanted.append(digest)
        del wanted[_MAX_AHEAD_BYTES // max(self._block_bytes, 1) :]
        if wanted and not self._is_worth_it():
            del wanted[1 if self._num_passed % _TRIES == 0 else 0 :]
        if not wanted:
            return
        began = time.perf_counter()
        shares = _shares(wanted, 1)
        found = [data for share in self._readers.map(self._read_all, shares) for data in share]
        seconds = (time.perf_counter() - began) / len(wanted)
        self._read_seconds = _mean(self._read_seconds, seconds)
        with self._lock:
            for digest, data in zip(wanted, found, strict=True):
                if data is None:
                    break
                self._ahead[digest] = data
            while len(self._ahead) * self._block_bytes > _MAX_AHEAD_BYTES:
                self._ahead.popitem(last=False)

    def take(self, digest: bytes) -> Array | None:
        """u8 [block_bytes]: what was read ahead of `digest`, which is forgotten here; or None."""
        with self._lock:
            return self._ahead.pop(digest, None)

    def give_back(self, digest: bytes, data: Array) -> None:
        """There was no room for what `take` gave."""
        with self._lock:
            self._ahead[digest] = data

    def fill(self, taken: Sequence[tuple[int, Array]]) -> None:
        """Have blocks hold what `take` gave, several at once."""
        shares = _shares(taken, _BLOCKS_OF_THREAD)
        if len(shares) == 1:
            self._put_all(shares[0])
        else:
            list(self._copiers.map(self._put_all, shares))
        self.num_read += len(taken)

    def _put_all(self, taken: Sequence[tuple[int, Array]]) -> None:
        for block_id, data in taken:
            self._pages.put(block_id, data)

    def made_with(self, digest: bytes) -> dict[str, str]:
        """The settings of the process that wrote it, as the record has them."""
        noted = self._made_with.pop(digest, "")
        return {SETTINGS: noted} if noted else {}

    def _is_worth_it(self) -> bool:
        """Whether reading a block is faster than computing it, as far as both are known."""
        if self._read_seconds is None or self._token_seconds is None:
            return True
        computing = self._token_seconds * self._block_size
        does_pay = self._read_seconds < computing
        if does_pay != self._does_pay:
            self._does_pay = does_pay
            way = "are read from disk" if does_pay else "are computed, and not read from disk"
            took = self._read_seconds * 1e3, computing * 1e3
            _log.info("blocks %s: %.2f ms each to read, %.2f ms to compute", way, *took)
        self._num_passed = 0 if does_pay else self._num_passed + 1
        return does_pay

    def _read_all(self, digests: Sequence[bytes]) -> list[Array | None]:
        return [self._read(digest) for digest in digests]

    def _read(self, digest: bytes) -> Array | None:
        """The bytes of a block; None where they are not there, or not those that were written."""
        with self._lock:
            name = self._names.get(digest)
        if name is None:
            return None
        path = f"{self._folder}{os.sep}{name}"
        header, data = bytearray(_HEADER.size), np.empty(self._block_bytes, np.uint8)
        is_whole = False
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                num_bytes = _HEADER.size + self._block_bytes
                if os.fstat(file).st_size == num_bytes:
                    is_whole = os.preadv(file, [header, data.data], 0) == num_bytes
                os.utime(file)
            finally:
                os.close(file)
        except OSError:  # another process made room
            self._remove(digest)
            return None
        if is_whole and self._is_sound(digest, header, data):
            return data
        _log.warning("%s is damaged; the block is computed again", path)
        self._remove(digest)
        return None

    def _remove(self, digest: bytes) -> None:
        with self._lock:
            self._ahead.pop(digest, None)
            name = self._names.pop(digest, None)
        if name is not None:
            self._unlink(self._folder / name)

    def _is_sound(self, digest: bytes, header: bytes | bytearray, data: Array) -> bool:
        magic, of, settings, num_bytes, check = _HEADER.unpack(header)
        if magic != _MAGIC or of != digest or num_bytes != data.nbytes:
            return False
        if check != _check(digest, settings, data):
            return False
        self._made_with[digest] = settings.rstrip(b"\0").decode(errors="replace")
        return True

    def _unlink(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()


def _require_private(folder: Path, inner: Path) -> None:
    try:
        if problem := changeable_by_others(folder):
            raise UsageError(f"the disk cache must be the user's own: {problem}")
        make_private(inner)
        if problem := changeable_by_others(inner):
            raise UsageError(f"the disk cache must be the user's own: {problem}")
    except OSError as error:
        raise UsageError(f"the disk cache {folder}: {error.strerror}") from error


def _check(digest: bytes, settings: bytes, data: Array) -> bytes:
    return hashlib.sha256(digest + settings.ljust(16, b"\0") + _checksum_of(data)).digest()


def _shares(items: Sequence[_T], least: int) -> list[Sequence[_T]]:
    """A share for each thread, of `least` or more: handing one over takes its time, too."""
    size = max(-(-len(items) // NUM_READERS), least)
    return [items[first : first + size] for first in range(0, len(items), size)]


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + _WEIGHT * (new - before)


def _names_in(folder: Path) -> list[tuple[bytes, str]]:
    """The files of blocks, each with the digest that its name has; the rest is passed over."""
    found = []
    for name in os.listdir(folder):
        if name.endswith(SUFFIX):
            with contextlib.suppress(ValueError):
                digest = bytes.fromhex(name.partition(".")[0])
                if len(digest) == DIGEST_BYTES:
                    found.append((digest, name))
    return found


def _checksum_of(data: Array) -> bytes:
    from hypocenter.device.cpu.checksum import checksum_of  # numba, which no other run needs

    return checksum_of(data)
