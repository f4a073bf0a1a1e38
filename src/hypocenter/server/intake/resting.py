"""Whose connection goes when there is no place for another one.

Who asks for nothing holds a place as well as who asks. So the address that has most of such
connections gives one up, and a new client gets in, however many another one opens.
"""

from __future__ import annotations

from typing import Generic, TypeVar

_Connection = TypeVar("_Connection")


class Resting(Generic[_Connection]):
    """Connections without a request, of each address the one first that rested longest.

    Behind a proxy and at a Unix socket all have one address.
    """

    def __init__(self) -> None:
        self._by_address: dict[str, dict[_Connection, None]] = {}

    def add(self, address: str, connection: _Connection) -> None:
        """It begins to rest; nothing changes where it rests already."""
        self._by_address.setdefault(address, {}).setdefault(connection)

    def discard(self, address: str, connection: _Connection) -> None:
        """It has a request, or it is gone; it need not have rested."""
        those = self._by_address.get(address, {})
        those.pop(connection, None)
        if not those:
            self._by_address.pop(address, None)

    def next_to_go(self) -> _Connection | None:
        """Who rested longest of the address with the most; None when nobody rests.

        Of addresses with as many it is the one that began to rest first.
        """
        most = max(self._by_address.values(), key=len, default=None)
        return None if most is None else next(iter(most))
