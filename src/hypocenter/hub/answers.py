"""One question to a server, and an answer with an end: bounds on its bytes, hosts and time.

The client is that of `huggingface_hub`, so that proxies and certificates are those of other tools.
Of an answer's head only what is named here is used, and nothing in it ever names a path.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hypocenter.base.errors import HubError
from hypocenter.base.wording import bytes_text

_MAX_REDIRECTS = 10
#: Of an error of the HTTP client, which may quote the server.
_MAX_REASON_CHARS = 200


class LineBroken(HubError):
    """A server does not answer, or its answer breaks off; another try may have better luck."""

    #: How long the server asks to be left alone.
    wait_seconds = 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """An answer is there after `seconds`; with `num_bytes` so many come in each span of these."""

    seconds: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for: `what` and `host` are the words for it and for the server in messages."""

    what: str
    host: str
    url: str
    headers: Mapping[str, str]


class HubAnswer:
    """The head of an answer, and its bytes, which are read once."""

    def __init__(self, question: Question, response: Any, cutter: _Cutter) -> None:
        self.question = question
        self.status: int = response.status_code
        self._response = response
        self._cutter = cutter

    def header(self, name: str) -> str:
        """Empty where there is none."""
        return str(self._response.headers.get(name, ""))

    def length(self) -> int | None:
        """The number of bytes that come, as far as it is said."""
        text = self.header("content-length")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None

    def parts(self) -> Iterator[bytes]:
        """The bytes as they come. Raises LineBroken, and HubError for a server that is too slow."""
        parts = self._response.iter_raw()
        while True:
            with _line_errors(self.question, self._cutter):
                data = next(parts, None)
            if self._cutter.is_cut:  # a body without a length ends like this as well
                raise _slow_error(self.question, self._cutter)
            if data is None:
                return
            self._cutter.came(len(data))
            yield data

    def read_all(self, max_bytes: int) -> bytes:
        """All bytes. Raises HubError for more than `max_bytes`, and what `parts` raises."""
        data = bytearray()
        for part in self.parts():
            data += part
            if len(data) > max_bytes:
                raise HubError(
                    f"{self.question.what}: {self.question.host} answers with more than "
                    f"{bytes_text(max_bytes)}, which is no list of files"
                )
        return bytes(data)


@contextlib.contextmanager
def ask(question: Question, pace: Pace, *, verb: str = "GET") -> Iterator[HubAnswer]:
    """The answer to `question`, whatever its status.

    A token that is among the headers goes to no other host. Raises HubError: LineBroken, or for an
    answer that leads on without an end, away from HTTPS, or is compressed.
    """
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        raise HubError(
            f"{question.what} is not here, and HF_HUB_OFFLINE forbids to ask for it",
            "`hypo models` shows what is here",
        )
    with _Cutter(pace) as cutter, contextlib.ExitStack() as stack:
        with _line_errors(question, cutter):
            client = get_session()
            stack.callback(_restore_cookies, client, list(client.cookies.jar))
            request = client.build_request(
                verb,
                question.url,
                # A line of its own: it can be cut.
                headers={**question.headers, "Accept-Encoding": "identity", "Connection": "close"},
                timeout=float(constants.HF_HUB_DOWNLOAD_TIMEOUT),
            )
            request.extensions["trace"] = cutter.saw
        for _ in range(_MAX_REDIRECTS):
            with _line_errors(question, cutter):
                response = client.send(request, stream=True, follow_redirects=False)
                stack.callback(response.close)
                following = response.next_request
            if following is None:
                break
            if request.url.scheme == "https" != following.url.scheme:
                raise HubError(f"{question.what}: {question.host} leads away from HTTPS")
            response.close()
            request = following
        else:
            raise HubError(f"{question.what}: {question.host} leads on and on, and to no answer")
        if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
            raise HubError(
                f"{question.what}: {question.host} sends it compressed ({encoding[:20]!r}), which "
                "was not asked for"
            )
        yield HubAnswer(question, response, cutter)


def _restore_cookies(client: Any, before: list[Any]) -> None:
    """Take out what an answer has put there: the client is not ours alone, and lives on."""
    client.cookies.jar.clear()
    for cookie in before:
        client.cookies.jar.set_cookie(cookie)


@contextlib.contextmanager
def _line_errors(question: Question, cutter: _Cutter) -> Iterator[None]:
    """Within, whatever the client raises is told in our own words."""
    try:
        yield
    except Exception as error:  # Addresses that a server leads to raise what they like.
        if cutter.is_cut:
            raise _slow_error(question, cutter) from error
        reason = (str(error) or type(error).__name__)[:_MAX_REASON_CHARS]
        shown = "".join(char if char.isprintable() else " " for char in reason)
        raise LineBroken(
            f"{question.what}: {question.host} does not answer: {shown}",
            "try again, what came so far is kept; `hypo models` shows what is here",
        ) from error


def _slow_error(question: Question, cutter: _Cutter) -> HubError:
    return HubError(
        f"{question.what}: {question.host} is too slow: {cutter.demand}",
        "try again, what came so far is kept",
    )


class _Cutter:
    """Cuts the lines of an answer that does not keep its pace, whatever its bytes go to.

    A timeout of the client begins anew with each byte, also with those of a head that never ends.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._change = threading.Condition()
        self._lines: list[socket.socket] = []
        self._num_bytes = 0
        self._is_over = False
        self.is_cut = False
        self._thread = threading.Thread(target=self._watch, name="hub-pace", daemon=True)

    @property
    def demand(self) -> str:
        if not self._pace.num_bytes:
            return f"no whole answer in {self._pace.seconds:g} s"
        return f"less than {bytes_text(self._pace.num_bytes)} in {self._pace.seconds:g} s"

    def __enter__(self) -> _Cutter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._change:
            self._is_over = True
            self._change.notify()
        self._thread.join()

    def saw(self, event: str, info: Mapping[str, Any]) -> None:
        """What the client tells of each of its steps; the lines that it opens are among these."""
        details = getattr(info.get("return_value"), "get_extra_info", None)
        line = details("socket") if details is not None else None
        if isinstance(line, socket.socket):
            with self._change:
                self._lines.append(line)
                if self.is_cut:
                    _cut(line)

    def came(self, num_bytes: int) -> None:
        with self._change:
            self._num_bytes += num_bytes

    def _watch(self) -> None:
        with self._change:
            before = 0
            while not self._change.wait_for(lambda: self._is_over, self._pace.seconds):
                if self._pace.num_bytes and self._num_bytes - before >= self._pace.num_bytes:
                    before = self._num_bytes
                    continue
                self.is_cut = True
                for line in self._lines:
                    _cut(line)
                return


def _cut(line: socket.socket) -> None:
    """End what waits for the line; of a line with TLS as well, whose own way would be orderly."""
    with contextlib.suppress(OSError):  # it is closed already
        socket.socket.shutdown(line, socket.SHUT_RDWR)
