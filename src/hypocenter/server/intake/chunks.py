"""Chunked bodies, unwrapped before h11 sees them: it would make an event of each chunk.

The framing is that of RFC 9112, section 7.1. Extensions and trailers are read over. A line ends
with CR LF, and with nothing else.
"""

from __future__ import annotations

import re

#: A body may have so many chunks, and one more for each so many bytes of data.
NUM_FREE_CHUNKS = 1024
BYTES_A_CHUNK = 512
#: Of the line with a chunk's size and its extensions, and of all trailers together.
MAX_LINE_BYTES = 256
MAX_TRAILER_BYTES = 8 << 10
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")


class BadChunks(Exception):
    """What came is no chunked body, or has too many chunks for its data."""


class Chunks:
    """One body: `num_chunks` have begun so far, and `num_bytes` of their data came."""

    def __init__(self) -> None:
        self.num_chunks = 0
        self.num_bytes = 0
        self.is_over = False
        self._num_left = 0  # bytes of the chunk that runs
        self._is_at_end = False  # of a chunk, where CR LF must stand
        self._is_in_trailers = False
        self._num_trailer_bytes = 0

    def take(self, inbox: bytearray, most: int) -> bytes:
        """The data of what came, up to the beginning of `most` chunks; it leaves `inbox`.

        Raises BadChunks.
        """
        parts: list[bytes] = []
        at = 0
        stop = self.num_chunks + most
        while not self.is_over and self.num_chunks < stop:
            num_read = self._step(inbox, at, parts)
            if not num_read:
                break
            at += num_read
        del inbox[:at]
        return b"".join(parts)

    def _step(self, inbox: bytearray, at: int, parts: list[bytes]) -> int:
        """Read data, the end of a chunk, or a line; returns of how many bytes, 0 for too few."""
        if self._num_left:
            part = bytes(inbox[at : at + self._num_left])
            parts.append(part)
            self.num_bytes += len(part)
            self._num_left -= len(part)
            self._is_at_end = not self._num_left
            return len(part)
        if self._is_at_end:
            end = inbox[at : at + 2]
            if not b"\r\n".startswith(end):
                raise BadChunks("behind a chunk stands no end of a line")
            self._is_at_end = len(end) < 2
            return 0 if self._is_at_end else 2
        most = MAX_TRAILER_BYTES if self._is_in_trailers else MAX_LINE_BYTES
        end_of_line = inbox.find(b"\r\n", at, at + most + 2)
        if end_of_line >= 0:
            self._take_line(bytes(inbox[at:end_of_line]))
            return end_of_line + 2 - at
        if len(inbox) - at > most:
            what = "trailers have" if self._is_in_trailers else "the line of a chunk's size has"
            raise BadChunks(f"{what} more than {most} bytes")
        return 0

    def _take_line(self, line: bytes) -> None:
        if self._is_in_trailers:
            self._num_trailer_bytes += len(line) + 2
            if self._num_trailer_bytes > MAX_TRAILER_BYTES:
                raise BadChunks(f"trailers have more than {MAX_TRAILER_BYTES} bytes")
            if line and not _TRAILER.fullmatch(line):
                raise BadChunks(f"{line[:40]!r} is no trailer")
            self.is_over = not line
            return
        found = _SIZE.fullmatch(line)
        if found is None:
            raise BadChunks(f"{line[:40]!r} is no size of a chunk")
        self._num_left = int(found[1], 16)
        self._is_in_trailers = not self._num_left
        self.num_chunks += 1
        allowed = NUM_FREE_CHUNKS + self.num_bytes // BYTES_A_CHUNK
        if self.num_chunks > allowed:
            raise BadChunks(
                f"{self.num_chunks} chunks hold {self.num_bytes} bytes, but may be at most "
                f"{allowed}; send larger chunks"
            )
