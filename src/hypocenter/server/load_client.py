"""The clients of a load: streams of completions, all in one thread, so that they wait for nobody.

With a thread for each stream, Python's lock would be what is measured. A stream has a connection of
its own; what comes is timed as it comes, and its JSON is read behind that.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

#: Of what a server says that does not stream: so much of it is kept.
_MAX_ERROR_BYTES = 300
#: Of a head, and of a chunk, which is a piece of an answer.
_MAX_HEAD_BYTES, _MAX_CHUNK_BYTES = 64 << 10, 16 << 20


@dataclass(slots=True)
class Asked:
    """One request: what it was, when it began (a clock's seconds), and what became of it.

    Its prompt is a text or the ids of tokens.
    """

    prompt: str | list[int]
    output_length: int
    start: float = 0.0
    end: float = 0.0
    times: list[float] = field(default_factory=list)  # of each piece
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    text: str = ""
    error: str = ""


class Address(NamedTuple):
    """Of a server: `uds` is a Unix socket to connect to, whatever host and port the URL names."""

    url: str
    uds: str | None = None

    @property
    def path(self) -> str:
        """What stands before the paths of routes."""
        return urlsplit(self.url).path.rstrip("/")


async def ask(
    address: Address, headers: Mapping[str, str], body: bytes, asked: Asked, timeout: float
) -> None:
    """Have one request answered; `asked` is told all, errors as well.

    A stream that says nothing for `timeout` seconds has failed.
    """
    loop = asyncio.get_running_loop()
    parts = urlsplit(address.url)
    host = parts.hostname or ""
    context = ssl.create_default_context() if parts.scheme == "https" else None
    lines = [f"POST {address.path}/v1/completions HTTP/1.1", f"Host: {parts.netloc}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    stream = _Stream("\r\n".join(lines).encode("latin-1") + body, asked)
    asked.start = time.perf_counter()
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(timeout):
            if address.uds is not None:
                transport, _ = await loop.create_unix_connection(
                    lambda: stream,
                    address.uds,
                    ssl=context,
                    server_hostname=host if context else None,
                )
            else:
                port = parts.port or (443 if context else 80)
                transport, _ = await loop.create_connection(lambda: stream, host, port, ssl=context)
        await stream.wait(timeout)
    except (OSError, TimeoutError) as error:
        asked.error = f"{type(error).__name__}: {error}"
    finally:
        asked.end = time.perf_counter()
        if transport is not None:
            transport.close()


class _Stream(asyncio.Protocol):
    """One connection: what it sends, and `asked`, which it tells what comes."""

    def __init__(self, sent: bytes, asked: Asked) -> None:
        self._sent, self._asked = sent, asked
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox, self._body = bytearray(), bytearray()
        self._status = 0
        self._is_chunked = False
        self._heard = time.perf_counter()

    async def wait(self, timeout: float) -> None:
        """Until the answer is whole or has failed. Raises TimeoutError after so long a silence."""
        while not self._done.done():
            left = self._heard + timeout - time.perf_counter()
            if left <= 0:
                raise TimeoutError(f"nothing came for {timeout:g} s")
            await asyncio.wait([self._done], timeout=left)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._sent)

    def data_received(self, data: bytes) -> None:
        if self._done.done():
            return
        self._heard = time.perf_counter()
        self._inbox += data
        try:
            if not self._status and not self._read_head():
                return
            self._read_body()
        except (ValueError, LookupError, TypeError, msgspec.DecodeError) as error:
            self._end(f"{type(error).__name__}: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._status not in (0, 200):
            self._refuse()
        self._end(f"{type(exc).__name__}: {exc}" if exc else "the stream ended without its end")

    def _end(self, error: str = "") -> None:
        if not self._done.done():
            self._asked.error = error
            self._done.set_result(None)

    def _read_head(self) -> bool:
        end = self._inbox.find(b"\r\n\r\n")
        if end < 0:
            if len(self._inbox) > _MAX_HEAD_BYTES:
                raise ValueError(f"a head of more than {_MAX_HEAD_BYTES} bytes")
            return False
        head = bytes(self._inbox[:end]).lower()
        del self._inbox[: end + 4]
        self._status = int(head.split(b" ", 2)[1])
        self._is_chunked = b"\r\ntransfer-encoding: chunked" in head
        return True

    def _read_body(self) -> None:
        if self._is_chunked:
            self._take_chunks()
        else:
            self._body += self._inbox
            self._inbox.clear()
        if self._status != 200:
            if len(self._body) >= _MAX_ERROR_BYTES:
                self._refuse()
            return
        *lines, rest = self._body.split(b"\n")
        self._body = rest
        for line in lines:
            if line.startswith(b"data: ") and not self._done.done():
                self._hear(bytes(line[6:]).strip())

    def _take_chunks(self) -> None:
        """Put the data of all chunks that are whole into the body."""
        while (end := self._inbox.find(b"\r\n")) >= 0:
            size = int(bytes(self._inbox[:end]).split(b";")[0], 16)
            if size > _MAX_CHUNK_BYTES:
                raise ValueError(f"a chunk of {size} bytes, but at most {_MAX_CHUNK_BYTES} may be")
            if len(self._inbox) < end + size + 4:
                return
            self._body += self._inbox[end + 2 : end + 2 + size]
            del self._inbox[: end + size + 4]
            if not size:
                return

    def _refuse(self) -> None:
        text = bytes(self._body[:_MAX_ERROR_BYTES]).decode("utf-8", "replace")
        self._end(f"status {self._status}: {text}")

    def _hear(self, data: bytes) -> None:
        """One event of the stream."""
        if data == b"[DONE]":
            self._end()
            return
        event: dict[str, Any] = msgspec.json.decode(data)
        asked = self._asked
        if "error" in event:
            self._end(str(event["error"])[:_MAX_ERROR_BYTES])
            return
        if (choices := event.get("choices")) and (text := choices[0].get("text")):
            asked.times.append(self._heard)
            asked.text += text
        if usage := event.get("usage"):
            asked.num_prompt_tokens = usage["prompt_tokens"]
            asked.num_output_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            asked.num_cached_tokens = details.get("cached_tokens") or 0
