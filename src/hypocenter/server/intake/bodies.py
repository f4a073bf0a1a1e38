"""How much memory all bodies and their answers may take together, and each client of it.

A body counts from its first byte until the worker has taken the request, or it is refused. While it
comes that are its bytes, then what its texts and numbers take. What is kept of its answer counts
until that is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from hypocenter.server.api_error import ApiError
from hypocenter.server.intake.json_bounds import SLICE_BYTES

#: Of all bodies' memory, what those of one client may take.
_SHARE = 2


class Bodies:
    """Bodies and answers of all requests; `num_bytes` are held now, at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._is_decoding = asyncio.Lock()
        self._by_client: Counter[str] = Counter()

    @property
    def most_of_client(self) -> int:
        """What the bodies of one client may take."""
        return self.max_bytes // _SHARE

    def of(self, client: str) -> HeldBody:
        """What a request of that client will hold; nothing yet."""
        return HeldBody(self, client)

    @contextlib.asynccontextmanager
    async def decoding(self, num_bytes: int) -> AsyncIterator[None]:
        """To decode a body of so many bytes within, or encode an answer: it is there twice then.

        Long ones come one after the other, so that no more than one is.
        """
        async with self._is_decoding if num_bytes > SLICE_BYTES else contextlib.nullcontext():
            yield

    def take(self, client: str, num_bytes: int) -> None:
        """Count so many bytes more. Raises ApiError, status 429, when that is too much."""
        held, most = self._by_client[client] + num_bytes, self.most_of_client
        if held > most:
            raise _full(f"your requests and their answers hold {held} bytes, but at most {most}")
        held = self.num_bytes + num_bytes
        if held > self.max_bytes:
            raise _full(f"all requests and their answers hold {held} of {self.max_bytes} bytes")
        self.num_bytes = held
        self._by_client[client] += num_bytes

    def give_back(self, client: str, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._by_client[client] -= num_bytes
        if not self._by_client[client]:
            del self._by_client[client]


class HeldBody:
    """What one request holds, until `release`; that may be said more than once."""

    def __init__(self, bodies: Bodies, client: str) -> None:
        self._bodies, self._client = bodies, client
        self._num_bytes = 0

    @property
    def max_bytes(self) -> int:
        """What it may hold where its client asks for nothing else."""
        return self._bodies.most_of_client

    def take(self, num_bytes: int) -> None:
        """Count so many bytes more. Raises ApiError, status 429, when that is too much."""
        self._bodies.take(self._client, num_bytes)
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """So many of its bytes are in no memory of ours any more."""
        num_bytes = min(num_bytes, self._num_bytes)
        self._bodies.give_back(self._client, num_bytes)
        self._num_bytes -= num_bytes

    def settle(self, num_bytes: int) -> None:
        """It is whole, and takes so many bytes from now on; nobody is refused who is alone.

        Raises ApiError, status 429, when that is too much.
        """
        wanted = min(num_bytes, self._bodies.most_of_client)
        self.take(max(wanted - self._num_bytes, 0))

    def release(self) -> None:
        """It is in no memory of ours any more."""
        self.give_back(self._num_bytes)


def _full(message: str) -> ApiError:
    return ApiError(
        429,
        f"{message} (--body-memory); try again in a moment",
        kind="rate_limit_error",
        code="bodies_full",
        retry=True,
    )
