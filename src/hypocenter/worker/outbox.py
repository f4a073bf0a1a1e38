"""Sends what a worker has to say, in a thread of its own: no step waits for the server to read."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from hypocenter.base.errors import BadSetting, GrammarError, HypoError, TooMuchText
from hypocenter.wire.frames import as_frame
from hypocenter.wire.messages import EngineState, Failed, News, Piece

#: Between two looks at an engine that was busy when it was last told of.
_STATE_SECONDS = 0.2


class Outbox:
    """Takes messages and notes of requests with news; whatever has gathered goes out together.

    `pieces_of` gives a request's pieces that were not taken yet, `state` is asked for with them.
    `on_error` is called in the sending thread with what either of them raises.
    """

    def __init__(
        self,
        connection: socket.socket,
        pieces_of: Callable[[int], list[Piece | msgspec.Struct]],
        state: Callable[[], EngineState],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._connection = connection
        self._pieces_of, self._state, self._on_error = pieces_of, state, on_error
        self._changed = threading.Condition()
        self._messages: list[msgspec.Struct] = []
        self._with_news: dict[int, None] = {}  # in order
        self._is_closed = False
        self._told = EngineState()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: msgspec.Struct) -> None:
        """Send a message soon; returns at once."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def note(self, request_id: int) -> None:
        """A request has news; returns at once."""
        with self._changed:
            self._with_news[request_id] = None
            self._changed.notify()

    def close(self) -> None:
        """Send what there is still, and end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._send_next():
                pass
        except OSError:
            pass  # the server is gone; whoever reads from it ends the process
        except BaseException as error:
            self._on_error(error)

    def _send_next(self) -> bool:
        with self._changed:
            # What the engine does behind the last piece, such as giving blocks back, is told too.
            self._changed.wait_for(
                lambda: self._messages or self._with_news or self._is_closed,
                _STATE_SECONDS if self._told.num_running or self._told.num_waiting else None,
            )
            messages, self._messages = self._messages, []
            ids, self._with_news = list(self._with_news), {}
            if self._is_closed and not messages and not ids:
                return False
        found = [piece for number in ids for piece in self._pieces_of(number)]
        pieces = tuple(piece for piece in found if isinstance(piece, Piece))
        messages += [other for other in found if not isinstance(other, Piece)]
        state = self._state()
        if pieces or state != self._told:
            self._told = state
            messages.append(News(pieces, state))
        self._connection.sendall(b"".join(map(as_frame, messages)))
        return True


def failure_of(number: int, error: Exception) -> Failed:
    """What the server is told of an error: that of the request or question with that number."""
    field = error.field if isinstance(error, BadSetting | TooMuchText | GrammarError) else ""
    settings = error.settings if isinstance(error, HypoError) else ()
    if isinstance(error, BadSetting):
        settings = (error.field,)
    return Failed(number, type(error).__name__, str(error), field, settings)


def failure_for_client(number: int, error: Exception, model: Path) -> Failed:
    """The same without the folder of the model's file, which is nobody's business."""
    failed = failure_of(number, error)
    shown = failed.message.replace(f"{model.parent}{os.sep}", "")
    return msgspec.structs.replace(failed, message=shown)
