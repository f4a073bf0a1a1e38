"""What signals do: end the server, renew what lies in files, or open the log anew.

SIGTERM and SIGINT let open answers end. SIGHUP reads keys and certificate again and opens the log
file anew; SIGUSR1 only the latter. SIGHUP also comes when a terminal is closed. Then there is
nobody left who could end the server, so it drains as with SIGTERM, unless it runs under nohup.
"""

from __future__ import annotations

import logging
import os
import signal
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from hypocenter.base.errors import UsageError
from hypocenter.base.wording import count_text
from hypocenter.server.operating.listening import Certificate
from hypocenter.server.operating.log import Sink, tell

#: Those that workers, and what they start, never hear of: they are for the server.
FOR_THE_SERVER = frozenset({signal.SIGHUP, signal.SIGUSR1})


@dataclass(slots=True)
class Renewal:
    """What SIGHUP reads again: each part may be missing. `set_keys` takes those that were read."""

    sink: Sink | None = None
    read_keys: Callable[[], tuple[str, ...]] | None = None
    set_keys: Callable[[tuple[str, ...]], None] = lambda keys: None
    certificate: Certificate | None = None
    context: ssl.SSLContext | None = None

    def renew(self) -> None:
        """Read all of it, and tell of it in one line. What cannot be read stays as it was."""
        done: list[str] = []
        failed: list[str] = []
        for part in (self._keys, self._certificate, self._log):
            try:
                if said := part():
                    done.append(said)
            except (UsageError, OSError) as error:
                failed.append(str(error))
        read = f"read again: {', '.join(done)}" if done else "nothing was read again"
        kept = f"; kept as it was: {'; '.join(failed)}" if failed else ""
        level = logging.ERROR if failed else logging.INFO
        tell(level, "reloaded", f"SIGHUP: {read}{kept}", reloaded=done, failed=failed)

    def open_log_anew(self) -> None:
        """Only that, and a word only where it fails."""
        try:
            self._log()
        except UsageError as error:
            tell(logging.ERROR, "reloaded", f"SIGUSR1: {error}", reloaded=[], failed=[str(error)])

    def _keys(self) -> str:
        if self.read_keys is None:
            return ""
        keys = self.read_keys()
        self.set_keys(keys)
        return count_text(len(keys), "API key")

    def _certificate(self) -> str:
        if self.certificate is None or self.context is None:
            return ""
        self.certificate.renew(self.context)
        return "the certificate"

    def _log(self) -> str:
        return "the log file" if self.sink is not None and self.sink.open_anew() else ""


class Terminal:
    """Whether the terminal is gone that this process was started from."""

    def __init__(self) -> None:
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
        self._was_there = not is_ignored and _has_terminal()

    @property
    def is_gone(self) -> bool:
        return self._was_there and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:  # a process without one has no such device
        return False
    return True
