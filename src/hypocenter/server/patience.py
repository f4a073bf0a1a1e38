"""How long a worker may say nothing."""

from __future__ import annotations

import msgspec

from hypocenter.watch.child import Deadlines
from hypocenter.wire.messages import (
    Dropped,
    Failed,
    News,
    Ready,
    StandingBy,
    Submit,
    ToServer,
    WeightsWhole,
)

#: What a step that ends just before its deadline may still take to be told of.
GRACE_SECONDS = 2.0


class Patience:
    """How long a worker may say nothing: while it loads, and while it has requests.

    One that is cancelled is owed an end as well.

    A step has a deadline of its own (`watch/child.py`), which comes first. This one also sees who
    is stuck between two steps. Times are the event loop's.
    """

    def __init__(self, deadlines: Deadlines, load_seconds: float) -> None:
        self._deadlines, self._load_seconds = deadlines, load_seconds
        self._is_loading = False
        self._owed: set[int] = set()
        self._num_steps = 0
        self._heard = 0.0

    def begin(self, now: float) -> None:
        """It is told to load its model."""
        self._is_loading, self._heard = True, now

    def say(self, message: msgspec.Struct, now: float) -> None:
        """It is told something."""
        if not self._owed and not self._is_loading:
            self._heard = now  # until then it had nothing to say
        match message:
            case Submit():
                self._owed.add(message.id)

    def hear(self, message: ToServer, now: float) -> None:
        """It has said something."""
        self._heard = now
        match message:
            case Ready() | StandingBy() | WeightsWhole():
                self._is_loading = False
            case News():
                self._num_steps = message.state.num_steps
                self._owed -= {piece.id for piece in message.pieces if piece.ending is not None}
            case Failed() | Dropped():
                self._owed.discard(message.id)

    def seconds_late(self, now: float) -> float | None:
        """How long it has said nothing, if that is too long."""
        silent, deadlines = now - self._heard, self._deadlines
        if self._is_loading:
            limit = self._load_seconds
        elif self._owed:
            is_first = self._num_steps <= 1  # which compiles
            limit = (deadlines.first_step if is_first else deadlines.step) + GRACE_SECONDS
        else:
            return None
        return silent if silent > limit else None
