"""The memory of a program's tensors: a number for each storage of torch's, as long as it lives.

A storage is known by a weak reference to torch's object for it. Never keeps one alive.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypocenter.foreign.caller import caller_of_now
from hypocenter.order.extents import Extent, bytes_at

#: So many more than live may be remembered before those that died are left out.
_SPARE = 1024


@dataclass(slots=True, eq=False)
class KnownStorage:
    """`stream` is the one that it was made in, "" if that was not seen."""

    number: int
    reference: Any
    address: int
    extent: Extent
    stream: str


class KnownStorages:
    """Those of one process. Two that lie at one address share a number, as DLPack makes them."""

    def __init__(self) -> None:
        self._known: dict[int, KnownStorage] = {}
        self._at: dict[int, KnownStorage] = {}
        #: By number, how many storages live.
        self._alive: dict[int, int] = {}
        self._shared: set[int] = set()
        self._gone: deque[tuple[int, str]] = deque()
        self._numbers = itertools.count(1)
        #: Called when a memory goes away; by a finaliser, so it must do next to nothing.
        self.note_gone: Callable[[], None] = lambda: None
        #: Numbers of memory of the host that a stream copies from or to.
        self.of_host: set[int] = set()

    def find(self, storage: Any) -> KnownStorage | None:
        """None for one that is new."""
        known = self._known.get(id(storage))
        return known if known is not None and known.reference() is storage else None

    def has_moved(self, known: KnownStorage, storage: Any) -> bool:
        """Whether it was resized, which gave its memory back: that has ended then."""
        if known.address == storage.data_ptr():
            return False
        self._gone.append((known.number, ""))
        return True

    def add(self, storage: Any, stream: str) -> tuple[KnownStorage, bool]:
        """Know a storage from now on; and whether its memory was not known before."""
        address = storage.data_ptr()
        before = self._at.get(address)
        is_alias = before is not None and before.reference() is not None and bool(address)
        number = before.number if before is not None and is_alias else next(self._numbers)
        known = KnownStorage(
            number,
            weakref.ref(storage, lambda _: self._note_end(number)),
            address,
            bytes_at(address, storage.nbytes()),
            stream,
        )
        self._known[id(storage)] = self._at[address] = known
        self._alive[number] = self._alive.get(number, 0) + 1
        return known, not is_alias

    def share(self, number: int) -> None:
        """Another stream than its own uses this memory: the line that frees it is of use."""
        self._shared.add(number)

    def _note_end(self, number: int) -> None:
        """Called by a finaliser: no lock is taken here."""
        site = ""
        if number in self._shared:
            with contextlib.suppress(Exception):  # the interpreter may be shutting down
                site = caller_of_now()[1]
        self._gone.append((number, site))
        self.note_gone()

    def take_ended(self) -> Iterator[tuple[int, str]]:
        """Number and line of all memory that went away since this was asked last."""
        while self._gone:
            number, site = self._gone.popleft()
            left = self._alive.get(number, 0) - 1
            if left > 0:
                self._alive[number] = left
                continue
            self._alive.pop(number, None)
            self.of_host.discard(number)
            self._shared.discard(number)
            yield number, site
        if len(self._known) > 2 * len(self._alive) + _SPARE:
            self._known, self._at = _living(self._known), _living(self._at)


def _living(known: dict[int, KnownStorage]) -> dict[int, KnownStorage]:
    return {key: found for key, found in known.items() if found.reference() is not None}
