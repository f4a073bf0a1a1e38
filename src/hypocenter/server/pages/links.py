"""Links to reports that are keys themselves, since a browser that follows one sends no other.

`/debug/faults`, which the admin key opens, tells them. Each names a report and a time, and bears a
code that only this process can make of the two. It holds for ten minutes.
"""

from __future__ import annotations

import hashlib
import hmac
import time

PATH = "/report/"
_SECONDS = 600


class ReportLinks:
    """Makes links and knows them again; `secret` is of this process alone."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def link(self, name: str, now: float | None = None) -> str:
        """Where a browser finds the report of this name; relative to the server's first page."""
        until = int(time.time() if now is None else now) + _SECONDS
        return f"{PATH.removeprefix('/')}{name}?until={until}&code={self._code(name, until)}"

    def allows(self, name: str, until: str, code: str, now: float | None = None) -> bool:
        """Whether a link of ours leads to it, and is not too old."""
        if not (until.isascii() and until.isdigit() and len(until) < 16 and code.isascii()):
            return False
        is_ours = hmac.compare_digest(self._code(name, int(until)), code)
        return is_ours and (time.time() if now is None else now) <= int(until)

    def _code(self, name: str, until: int) -> str:
        said = f"{until} {name}".encode()
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()
