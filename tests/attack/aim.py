"""What an attack is given: the server's port, who it is, when to end, and sockets to send by."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

#: Between two tries of a client that was refused or cut: it begs, but it is no busy loop.
PAUSE_SECONDS = 0.01
_TIMEOUT = 20.0
#: Counted when a client of ours ended by a mistake of its own.
DEFECT = "defect of the attack"
#: An answer is read no further than this.
_MAX_ANSWER_BYTES = 64 << 20


@dataclass
class Aim:
    """One attack's view of the server. `seen` counts what became of its requests, by status."""

    port: int
    source: str
    keys: tuple[str, ...]
    stop: float
    num: int
    seen: Counter[str] = field(default_factory=Counter)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.stop

    def rest(self, seconds: float) -> None:
        """Sleep, but not beyond the end."""
        time.sleep(max(0.0, min(seconds, self.stop - time.monotonic())))

    def next(self) -> int:
        """A number that no other client of this attack has."""
        return next(self._numbers)

    def name(self) -> str:
        """A word that nobody has said before, so that nothing is remembered."""
        return secrets.token_hex(6)

    # -- requests ----------------------------------------------------------------------------------

    def head(self, method: str, path: str, *lines: str, index: int = 0) -> bytes:
        """The line and headers of a request, with the key that client `index` has, if any."""
        key = [f"Authorization: Bearer {self.keys[index % len(self.keys)]}"] if self.keys else []
        first = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", *key, *lines]
        return ("\r\n".join(first) + "\r\n\r\n").encode()

    def request(self, path: str, body: Any, index: int = 0) -> bytes:
        """A POST as it goes over the wire; a body that is no bytes is written as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        told = (f"Content-Length: {len(data)}", "Content-Type: application/json")
        return self.head("POST", path, *told, index=index) + data

    # -- sockets -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def connect(self) -> Iterator[socket.socket]:
        """A connection that is closed at the end. Raises OSError."""
        made = socket.create_connection(
            ("127.0.0.1", self.port), timeout=_TIMEOUT, source_address=(self.source, 0)
        )
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield made
        finally:
            made.close()

    def status(self, connection: socket.socket) -> str:
        """The status of the next answer, whose rest is left unread."""
        data = b""
        while b"\r\n" not in data:
            part = connection.recv(1 << 16)
            if not part:
                break
            data += part
        found = data[9:12].decode("latin-1") if data.startswith(b"HTTP/1.1 ") else "cut"
        self.seen[found] += 1
        return found

    def answer(self, connection: socket.socket, data: bytes) -> bytes:
        """Send a request and read the whole answer, up to the end of the connection or its length.

        Its status is counted.
        """
        connection.sendall(data)
        parts: list[bytes] = []
        num_bytes, want = 0, 1
        while num_bytes < want:
            part = connection.recv(1 << 20)
            if not part:
                break
            if not parts:
                want = _whole_bytes(part)
            parts.append(part)
            num_bytes += len(part)
        whole = b"".join(parts)
        self.seen[whole[9:12].decode("latin-1") or "cut"] += 1
        return whole

    # -- clients -----------------------------------------------------------------------------------

    def together(self, client: Callable[[Aim, int], None]) -> None:
        """`num` clients at once, each of which begins anew until the attack is over."""
        threads = [
            threading.Thread(target=self._again, args=(client, n), daemon=True)
            for n in range(self.num)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.stop - time.monotonic()) + 1.0)

    def _again(self, client: Callable[[Aim, int], None], index: int) -> None:
        while not self.is_over:
            try:
                client(self, index)
                self.seen["rounds"] += 1
            except OSError as error:
                self.seen[type(error).__name__] += 1
                self.rest(PAUSE_SECONDS)
            except Exception:
                self.seen[DEFECT] += 1
                raise


def reset(connection: socket.socket) -> None:
    """Close with RST, as a client that crashed does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _whole_bytes(first: bytes) -> int:
    """Bytes of an answer whose first part this is; without a length it ends with its connection."""
    head, found, _ = first.partition(b"\r\n\r\n")
    for line in head.lower().splitlines():
        if found and line.startswith(b"content-length:"):
            return len(head) + 4 + int(line.partition(b":")[2])
    return _MAX_ANSWER_BYTES
