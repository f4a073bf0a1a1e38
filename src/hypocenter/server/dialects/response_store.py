"""Responses that are kept for who asks after them, or goes on with them.

All together have a bound in bytes. Where it is passed, the client that holds most loses its oldest
first, so nobody's are lost to another that keeps more. Each is forgotten after some hours.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

#: Of all that is kept, and how long.
MAX_BYTES = 64 << 20
KEPT_SECONDS = 6 * 3600.0
#: What an entry takes beside its texts, as Python has it.
_ENTRY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response as JSON; the conversation up to its end, for another one to go on, of which the
    first `num_asked` messages were there before; its items by their ids."""

    client: str
    response: bytes
    messages: bytes
    items: dict[str, bytes]
    until: float
    num_asked: int = 0

    @property
    def num_bytes(self) -> int:
        num_items = sum(map(len, self.items.values()))
        return len(self.response) + len(self.messages) + num_items + _ENTRY_BYTES


class ResponseStore:
    """By the ids of responses; `clock` is in seconds."""

    def __init__(
        self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        #: By client, the oldest first.
        self._kept: dict[str, OrderedDict[str, KeptResponse]] = {}
        self._num_bytes: dict[str, int] = {}
        #: Who has a response, and which response an item is of.
        self._owners: dict[str, str] = {}
        self._items: dict[str, str] = {}

    @property
    def num_bytes(self) -> int:
        """Of all that is kept."""
        return sum(self._num_bytes.values())

    def put(
        self,
        client: str,
        name: str,
        response: bytes,
        messages: Sequence[dict[str, Any]],
        items: dict[str, bytes],
        num_asked: int = 0,
    ) -> None:
        """Keep a response, unless it is larger than half of what all may take."""
        self._expire()
        until = self._clock() + KEPT_SECONDS
        told = msgspec.json.encode(messages)
        kept = KeptResponse(client, response, told, items, until, num_asked)
        if kept.num_bytes > self._max_bytes // 2:
            return
        self._kept.setdefault(client, OrderedDict())[name] = kept
        self._owners[name] = client
        self._items.update(dict.fromkeys(items, name))
        self._num_bytes[client] = self._num_bytes.get(client, 0) + kept.num_bytes
        while self.num_bytes > self._max_bytes:
            largest = max(self._num_bytes, key=lambda one: self._num_bytes[one])
            self.delete(next(iter(self._kept[largest])))

    def get(self, client: str, name: str, *, sees_all: bool) -> KeptResponse | None:
        """That of this client, or of any where it may see all; None: there is none."""
        self._expire()
        owner = self._owners.get(name)
        if owner is None or not (owner == client or sees_all):
            return None
        return self._kept[owner][name]

    def find_item(self, client: str, item_id: str, *, sees_all: bool) -> bytes | None:
        """The item with that id, as JSON, of a response that `get` would find."""
        kept = self.get(client, self._items.get(item_id, ""), sees_all=sees_all)
        return None if kept is None else kept.items[item_id]

    def delete(self, name: str) -> None:
        """Forget one that is kept."""
        client = self._owners.pop(name)
        kept = self._kept[client].pop(name)
        for item_id in kept.items:
            del self._items[item_id]
        self._num_bytes[client] -= kept.num_bytes
        if not self._kept[client]:
            del self._kept[client], self._num_bytes[client]

    def _expire(self) -> None:
        """Each client's oldest stand first, and all are kept equally long."""
        now = self._clock()
        for client in list(self._kept):
            while (kept := self._kept.get(client)) and next(iter(kept.values())).until <= now:
                self.delete(next(iter(kept)))
