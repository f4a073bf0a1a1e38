"""Where the server listens: a port or a Unix socket, with or without TLS.

Whatever cannot be had is refused before a model is loaded. Reads no request.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hypocenter.base.errors import UsageError

#: What the system holds of an answer that its client does not take. By itself it goes to 4 MB.
SEND_BYTES = 256 << 10
BACKLOG = 2048
#: Of a `sockaddr_un` on Linux, less the byte that ends it: unix(7).
MAX_SOCKET_PATH_BYTES = 107
_CONNECT_SECONDS = 1.0


def bind(host: str, port: int) -> socket.socket:
    """The socket that listens at a port; raises UsageError when it cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UsageError(f"--host {host}: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # its connections too
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        taken = error.errno == errno.EADDRINUSE
        way_out = "; another server has it, so give another --port" if taken else ""
        raise UsageError(f"{host} port {port}: {error.strerror}{way_out}") from error
    return made


@contextlib.contextmanager
def bound_unix(path: Path) -> Iterator[socket.socket]:
    """A Unix socket that listens at `path`, for this user alone; the file goes at the end.

    One that is there already is replaced where nobody listens at it. Raises UsageError.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise UsageError(
            f"--uds {path}: it has more than {MAX_SOCKET_PATH_BYTES} bytes; take a shorter path"
        )
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_stale(path):
            path.unlink()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        made.bind(str(path))
        # Until it listens nobody can connect, so nobody has come in by other rights.
        os.chmod(path, 0o600)
        made.listen(BACKLOG)
        ours = os.lstat(path)
    except (UsageError, OSError) as error:
        made.close()
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--uds {path}: {error.strerror}") from error
    try:
        yield made
    finally:
        made.close()
        with contextlib.suppress(OSError):  # it is gone, or the folder is
            if os.path.samestat(os.lstat(path), ours):
                path.unlink()


def _is_stale(path: Path) -> bool:
    """Whether there is a socket at which nobody listens; False where there is nothing.

    Raises UsageError for what is no socket, and where somebody listens.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(found.st_mode):
        raise UsageError(f"--uds {path} is there and is no socket; name another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            pass  # its queue is full, so somebody has it
    raise UsageError(f"--uds {path}: another server listens there; name another path")


@dataclass(frozen=True, slots=True)
class Certificate:
    """The files of `--ssl-certfile` and `--ssl-keyfile`; without the latter both are in one."""

    certificate: Path
    key: Path | None

    def context(self) -> ssl.SSLContext:
        """For TLS 1.2 and later. Raises UsageError where the files are no pair."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load_into(made)
        return made

    def renew(self, context: ssl.SSLContext) -> None:
        """Have new connections get what the files hold now. Raises UsageError, and changes
        nothing."""
        self.context()  # one that fails may leave a context with half of a pair
        self._load_into(context)

    def _load_into(self, context: ssl.SSLContext) -> None:
        named = f"--ssl-certfile {self.certificate}"
        if self.key is not None:
            named += f", --ssl-keyfile {self.key}"

        def refuse_password() -> str:
            raise UsageError(f"{named}: the key is encrypted; give one without a password")

        try:
            context.load_cert_chain(self.certificate, self.key, refuse_password)
        except ssl.SSLError as error:
            is_other = error.reason == "KEY_VALUES_MISMATCH"
            what = "the key is not that of the certificate" if is_other else "no PEM of a pair"
            reason = error.reason or str(error)
            raise UsageError(f"{named}: {what} ({reason}); name a pair") from error
        except OSError as error:
            raise UsageError(f"{named}: {error.strerror}") from error


def address_of(listening: socket.socket, *, is_tls: bool) -> str:
    """The URL for clients; of a Unix socket any host will do."""
    scheme = "https" if is_tls else "http"
    if listening.family == socket.AF_UNIX:
        return f"{scheme}://localhost"
    host, number = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{number}"
