"""Addresses that a program asked tensors for, and whether their memory is still there.

A program that keeps addresses in a table has to keep the tensors too. Keeps none alive itself.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.foreign.caller import caller_of_now
from hypocenter.record.events import Values

#: Addresses that are remembered; past it no other is.
MAX_ASKED = 1 << 14


@dataclass(slots=True, eq=False)
class AskedAddress:
    """`address` lies in memory of `num_bytes` from `start` on; `asked_at` and `freed_at` are lines
    of the program, `freed_at` empty as long as the memory is there."""

    address: int
    start: int
    num_bytes: int
    asked_at: str
    storage: Any
    freed_at: str = ""

    @property
    def is_alive(self) -> bool:
        return self.storage() is not None


class AskedAddresses:
    """Those of one process, the last answer for each address."""

    def __init__(self) -> None:
        self._asked: dict[int, AskedAddress] = {}

    def note(self, tensor: Any, address: int) -> None:
        """A tensor was asked where it lies.

        Memory that torch has not allocated itself may live on without a storage: of NumPy's
        arrays, and of other libraries. Their storages cannot be resized.
        """
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # of a kind that has none
            return
        known = self._asked.get(address)
        if known is not None and known.storage() is storage:
            return
        if not address or not storage.resizable() or len(self._asked) >= MAX_ASKED:
            return
        asked = AskedAddress(
            address, storage.data_ptr(), storage.nbytes(), caller_of_now()[1], None
        )
        asked.storage = weakref.ref(storage, functools.partial(_note_freed, asked))
        self._asked[address] = asked

    def first_stale(self, values: Values) -> tuple[tuple[int, ...], AskedAddress] | None:
        """The first element that is an address whose memory has gone, by its index."""
        if values.dtype != "I64" or not self._asked:
            return None
        for number, address in enumerate(np.frombuffer(values.data, np.int64).tolist()):
            asked = self._asked.get(address)
            if asked is not None and not asked.is_alive and not self._is_held(address):
                return tuple(map(int, np.unravel_index(number, values.shape))), asked
        return None

    def _is_held(self, address: int) -> bool:
        """Whether memory that is there, and was asked for, has the address now."""
        return any(
            asked.is_alive and asked.start <= address < asked.start + asked.num_bytes
            for asked in self._asked.values()
        )


def _note_freed(asked: AskedAddress, _: object) -> None:
    """Called by a finaliser: no lock is taken here."""
    with contextlib.suppress(Exception):  # the interpreter may be shutting down
        asked.freed_at = caller_of_now()[1]


#: Those of this process: a program asks before it makes its first launch.
ASKED = AskedAddresses()
