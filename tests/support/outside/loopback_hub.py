"""A hub on loopback that speaks as Hugging Face's does, and that fails as hubs do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

from hypocenter.settings.cache_folder import private_folder

COMMIT = "c" * 40


@dataclass
class Repository:
    """`access`: open, gated or private; those let in who gives the token `hf_letmein`."""

    files: dict[str, bytes]
    architecture: str = "llama"
    access: str = "open"
    commit: str = COMMIT


@dataclass
class Hub:
    """`asked` are the requests it got. What goes wrong is set by whoever tests that."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    #: A file's stream ends after so many bytes, so many times.
    breaks_after: int = 0
    num_breaks: int = 0
    #: What the list says of files' sizes and digests.
    size_said: int | None = None
    sha256_said: str | None = None
    #: Bytes that come are these many zeros wrong.
    damages: bool = False
    hang_seconds: float = 0.0
    status: int = 0
    list_body: bytes | None = None
    ignores_range: bool = False
    #: Files come from another host, which must not see the token: its address, once that runs.
    store: str = ""
    headers_seen: list[set[str]] = field(default_factory=list)
    #: What stands in the heads of answers about files, in the place of what is true.
    headers_said: dict[str, str] = field(default_factory=dict)
    #: What a plain server says of a file's version.
    version: str = ""
    url: str = ""

    def files_asked(self) -> list[tuple[str, str]]:
        """Path and Range of each file that was asked for, but not only for its head."""
        return [
            (path, span) for verb, path, span in self.asked if verb == "GET" and "/api/" not in path
        ]


@contextlib.contextmanager
def running_hub(**repositories: Repository) -> Iterator[Hub]:
    """Repositories by OWNER__NAME."""
    hub = Hub({name.replace("__", "/"): one for name, one in repositories.items()})

    class Handler(_Handler):
        def setup(self) -> None:
            self.hub = hub
            super().setup()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have this process ask that hub; the cache is below `folder`. Returns the cache."""
    cache = folder / "hub"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    go_offline(monkeypatch, is_offline=False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setenv("HYPO_CACHE_DIR", str(folder / "own"))
    private_folder.cache_clear()
    return cache


def go_offline(monkeypatch: pytest.MonkeyPatch, *, is_offline: bool) -> None:
    """The client of before would go on as it was made."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    close_session()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        self.hub.headers_seen.append({name.lower() for name in self.headers})
        if self.hub.hang_seconds:
            threading.Event().wait(self.hub.hang_seconds)
        if self.hub.status:
            self._send(self.hub.status, b"{}", has_body=has_body)
        elif path == "/api/models":
            [wanted] = parse_qs(parts.query).get("search", [""])
            near = [name for name in self.hub.repositories if wanted.lower() in name.lower()]
            self._send(200, json.dumps([{"id": name} for name in near]).encode(), has_body=has_body)
        elif path.startswith("/api/models/"):
            name = "/".join(path.split("/")[3:5])
            if self._may_enter(name, has_body=has_body):
                listed = self._list(name, self.hub.repositories[name])
                body = (
                    json.dumps(listed).encode()
                    if self.hub.list_body is None
                    else self.hub.list_body
                )
                self._send(200, body, has_body=has_body)
        elif "/resolve/" in path:
            name, _, rest = path[1:].partition("/resolve/")
            if self._may_enter(name, has_body=has_body):
                self._send_file(
                    self.hub.repositories[name], rest.partition("/")[2], has_body=has_body
                )
        else:  # any other server
            plain = self.hub.repositories.get("plain/files", Repository({}))
            found = plain.files.get(path[1:])
            version = {"ETag": self.hub.version} if self.hub.version else {}
            status = 404 if found is None else 200
            self._send(status, found or b"", version, has_body=has_body, can_break=True)

    def _may_enter(self, name: str, *, has_body: bool) -> bool:
        repository = self.hub.repositories.get(name)
        has_token = self.headers.get("Authorization") == "Bearer hf_letmein"
        if repository is None or (repository.access == "private" and not has_token):
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, has_body=has_body)
        elif repository.access == "gated" and not has_token and "/resolve/" in self.path:
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo"}, has_body=has_body)
        else:
            return True
        return False

    def _list(self, name: str, repository: Repository) -> dict[str, Any]:
        hub = self.hub
        siblings = [
            {
                "rfilename": path,
                "size": len(data) if hub.size_said is None else hub.size_said,
                "blobId": "b" * 40,
                "lfs": {
                    "sha256": hub.sha256_said or hashlib.sha256(data).hexdigest(),
                    "size": len(data),
                    "pointerSize": 130,
                },
            }
            for path, data in repository.files.items()
        ]
        return {
            "id": name,
            "sha": repository.commit,
            "siblings": siblings,
            "gguf": {"architecture": repository.architecture},
        }

    def _send_file(self, repository: Repository, path: str, *, has_body: bool) -> None:
        data = repository.files.get(path)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, has_body=has_body)
            return
        digest = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": repository.commit}
        headers.update(self.hub.headers_said)
        if self.hub.store:
            linked = {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            where = {"Location": f"{self.hub.store}/{digest}.gguf", **linked}
            self._send(302, b"", {**headers, **where}, has_body=has_body)
            return
        if self.hub.damages:
            data = bytes(100) + data[100:]
        self._send(200, data, headers, has_body=has_body, can_break=True)

    def _send(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        *,
        has_body: bool,
        can_break: bool = False,
    ) -> None:
        span = self.headers.get("Range", "") if has_body else ""
        if span and status == 200 and not self.hub.ignores_range:
            start = int(span.removeprefix("bytes=").split("-")[0])
            status, whole = 206, len(data)
            data = data[start:]
            headers = {**(headers or {}), "Content-Range": f"bytes {start}-{whole - 1}/{whole}"}
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not has_body:
            return
        if can_break and self.hub.num_breaks and len(data) > self.hub.breaks_after:
            self.hub.num_breaks -= 1
            self.wfile.write(data[: self.hub.breaks_after])
            self.close_connection = True
            return
        with contextlib.suppress(ConnectionError):  # who timed out has gone
            self.wfile.write(data)
