"""Vector clocks: how far each stream is, and how far of the others it knows to be behind it.

Work in one stream is in order; an event carries the order to the streams that wait for it; what the
host asks for comes behind all that it has waited for (Lamport, 1978; Mattern, 1989). Only what is
asked for after two accesses began can order them. So a record that is cut off at its beginning
gives no order that is not there, and takes none away between accesses that it still has.
"""

from __future__ import annotations

#: The host, which is ordered like a stream. No stream has this name.
HOST = "the host"

Clock = dict[str, int]


def _join(known: Clock, other: Clock) -> None:
    for stream, at in other.items():
        if at > known.get(stream, 0):
            known[stream] = at


class Clocks:
    """`now` counts the work of each stream; the host's own accesses count as the host's work."""

    def __init__(self) -> None:
        self.now: Clock = {}
        self._seen: dict[str, Clock] = {HOST: {}}
        self._events: dict[int, Clock] = {}
        #: Streams that wait for a default stream, and it for them, with the name of that.
        self._blocking: dict[str, str] = {}

    def add_blocking(self, stream: str, default: str) -> None:
        """`stream` is not a non-blocking one: it and the legacy default stream order themselves."""
        self._blocking[stream] = default

    def tick(self, stream: str) -> int:
        """The host asks for work in a stream, or does some itself; returns the work's number."""
        number = self.now[stream] = self.now.get(stream, 0) + 1
        known = self._knowledge(stream)
        _join(known, self._seen[HOST])
        if self._blocking:
            for other, default in self._blocking.items():
                if stream == default:
                    _join(known, self.behind(other))
                elif stream == other:
                    _join(known, self.behind(default))
        known[stream] = number
        return number

    @property
    def has_blocking(self) -> bool:
        """Whether a stream and a default one order themselves."""
        return bool(self._blocking)

    def catch_up(self, stream: str, number: int) -> None:
        """Somebody else has counted work of a stream, and this is the last one's number."""
        if number > self.now.get(stream, 0):
            self.now[stream] = number - 1
            self.tick(stream)

    def record(self, event: int, stream: str) -> None:
        """From now on `event` stands for all that was asked for in the stream so far."""
        self.tick(stream)
        self._events[event] = dict(self._knowledge(stream))

    def wait(self, event: int, stream: str) -> bool:
        """Whether the event was recorded before; else nothing is waited for."""
        made = self._events.get(event)
        _join(self._knowledge(stream), made or {})
        return made is not None

    def host_waits(self, stream: str | None) -> None:
        """The host waits for a stream, or for all of them."""
        for waited in [stream] if stream is not None else list(self.now):
            self.host_waited(self.behind(waited))

    def host_waits_for(self, event: int) -> None:
        """The host waits for an event; for one that was never recorded it does not wait."""
        self.host_waited(self._events.get(event, {}))

    def behind(self, stream: str) -> Clock:
        """What lies before whatever is asked for in a stream now."""
        return {**self._seen.get(stream, {}), stream: self.now.get(stream, 0)}

    def host_waited(self, behind: Clock) -> None:
        """The host knows that all of this has ended."""
        _join(self._seen[HOST], behind)

    def is_before(self, stream: str, number: int, other: str) -> bool:
        """Whether work `number` of `stream` lies before what `other` does last, or does next."""
        return self._seen.get(other, {}).get(stream, 0) >= number

    def _knowledge(self, stream: str) -> Clock:
        known = self._seen.get(stream)
        if known is None:
            known = self._seen[stream] = {}
        return known
