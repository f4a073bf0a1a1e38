"""Lies of a hub, drawn at random, and what they must not do to whoever asks it.

A lie is a list of files, a head, a body or a redirect that is wrong, or a cache into which others
have put links. `problem_of` pulls a model through one and says what is wrong with the outcome.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import hashlib
import json
import os
import random
import shutil
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

from hypocenter.base.errors import HypoError
from hypocenter.hub import cached, download, listing
from hypocenter.hub.answers import Pace
from hypocenter.hub.find import find_model
from hypocenter.hub.names import HubName
from hypocenter.settings.cache_folder import private_folder
from outside.loopback_hub import COMMIT, Hub, use

NAME = "acme/tiny-GGUF"
FILE = "tiny-Q4_K_M.gguf"
DATA = bytes(range(256)) * 20
SHA256 = hashlib.sha256(DATA).hexdigest()
#: What one lie may cost. A few MiB lie in the buffers of each socket, read by nobody.
MAX_SECONDS = 20.0
MAX_SENT_BYTES, MAX_KEPT_BYTES = 60 << 20, 4 << 20
MAX_SAID_CHARS = 8000
#: After each so many lies an honest hub is asked, which must not suffer from them.
HONEST_EVERY = 10
_MAX_LIST_BYTES = 1 << 20
_SEND_BYTES = 64 << 20
_SILENT_SECONDS = 1.0
_ZIPPED = gzip.compress(bytes(1 << 24))


@dataclass
class Reply:
    """What the hub says to one kind of question. Of `head` a None leaves a line out."""

    body: bytes
    status: int = 200
    head: dict[str, str | None] = field(default_factory=dict)
    shape: str = "plain"


@dataclass
class Lie:
    """`words` say what it is made of; `plant` changes a cache before.

    `num_sent` counts bytes; `starts` are the first bytes of the file that were asked for.
    """

    seed: int
    listing: Reply
    file: Reply
    words: list[str] = field(default_factory=list)
    plant: Callable[[Path, Path], None] | None = None
    is_plain_server: bool = False
    num_sent: int = 0
    starts: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"lie {self.seed} ({', '.join(self.words)})"


# -- drawing --------------------------------------------------------------------------------------


def _evil_texts(victim: Path) -> list[str]:
    return [
        "", ".", "..", "../../../../victim/planted", f"{victim}/planted", str(victim / "kept"), "/",
        "../" * 30 + "nowhere", "a\0b", "C:\\x", "..\\..\\x", "x" * 300, "y" * 5000, "a\nb",
        "\ud800", "\x1b[31m", "refs/main", "%2e%2e%2f", "main", "d" * 40, "d" * 64, "0" * 41, '"',
        "é" * 40, "a//b", "blobs", f"../../blobs/{SHA256}", "null", "1e999", "９",
    ]  # fmt: skip


def _evil_values(rng: random.Random, victim: Path) -> Any:
    nested: Any = 0
    for _ in range(rng.choice((3, 900))):
        nested = [nested]
    pool = [
        None, True, -1, 0, 1, 5, len(DATA) - 1, len(DATA) + 1, 1 << 45, 1 << 63, 1 << 70, 1.5,
        float("inf"), [], {}, [1], {"a": 1}, nested, [None] * 30_000,
    ]  # fmt: skip
    return rng.choice(pool) if rng.random() < 0.5 else rng.choice(_evil_texts(victim))


def _honest_list() -> dict[str, Any]:
    def entry(path: str, data: bytes) -> dict[str, Any]:
        stored = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return {"rfilename": path, "size": len(data), "blobId": "b" * 40, "lfs": stored}

    return {
        "id": NAME, "sha": COMMIT, "lastModified": "2026-01-01T00:00:00.000Z", "private": False,
        "siblings": [entry(FILE, DATA), entry("README.md", b"hello")],
        "gguf": {"architecture": "llama", "total": 5}, "tags": ["gguf"], "cardData": {"a": ["b"]},
    }  # fmt: skip


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All containers in it with each of their keys."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found += [(value, key), *_places(value[key])]
    return found


def _lie_in_list(lie: Lie, rng: random.Random, victim: Path) -> None:
    listed = _honest_list()
    for _ in range(rng.choice((1, 1, 2, 4))):
        container, key = rng.choice(_places(listed))
        action = rng.choice(("other", "other", "other", "missing", "more"))
        if action == "other":
            container[key] = _evil_values(rng, victim)
        elif action == "missing":
            del container[key]
        else:
            listed.setdefault("siblings", [])
            if isinstance(listed["siblings"], list):
                listed["siblings"] += _strange_files(rng, victim)
        lie.words.append(f"list {action} {str(key)[:20]}")
    lie.listing.body = json.dumps(listed).replace("Infinity", "1e999").encode()


def _strange_files(rng: random.Random, victim: Path) -> list[dict[str, Any]]:
    model = _honest_list()["siblings"][0]
    text = rng.choice(_evil_texts(victim))
    names = [
        f"{text}-Q4_K_M.gguf", f"{text}/{FILE}", f"{FILE}/{FILE}", f"a/{text}/b-Q4_K_M.gguf",
        *(f"s{n}-Q4_K_M-00001-of-99999.gguf" for n in range(300)), "-00000-of-00000.gguf",
        *(f"s-Q4_K_M-{n:05}-of-00003.gguf" for n in (1, 2, 3, 4)), "_Q4" * 330 + "!.gguf",
    ]  # fmt: skip
    return [{**copy.deepcopy(model), "rfilename": name} for name in names]


def _lie_in_bytes_of_list(lie: Lie, rng: random.Random, victim: Path) -> None:
    body = bytearray(lie.listing.body or b"{}")
    kind = rng.choice(("flip", "cut", "insert", "deep", "noise", "keys", "zip"))
    if kind == "flip":
        for _ in range(rng.choice((1, 5, 50))):
            body[rng.randrange(len(body))] = rng.randrange(256)
    elif kind == "cut":
        del body[rng.randrange(len(body)) :]
    elif kind == "insert":
        place = rng.randrange(len(body))
        body[place:place] = rng.choice((b"\xff\xfe", b"\0", b'"', b"[" * 50_000, b"9" * 5000, b"}"))
    elif kind == "deep":
        body = bytearray(b'{"siblings":' + b'{"a":' * 100_000)
    elif kind == "noise":
        body = bytearray(rng.randbytes(rng.choice((0, 1, 5000))))
    elif kind == "keys":
        body = bytearray(b'{"sha":1,' + b'"a":2,' * 100_000 + body[1:])
    else:
        body = bytearray(_ZIPPED)
        lie.listing.head["Content-Encoding"] = "gzip"
    lie.listing.body = bytes(body)
    lie.words.append(f"list bytes {kind}")


_HEADS = (
    "ETag", "X-Linked-ETag", "X-Repo-Commit", "X-Linked-Size", "Content-Disposition", "Location",
    "Content-Length", "Content-Range", "Content-Encoding", "Transfer-Encoding", "Retry-After",
    "Set-Cookie", "Link", "X-Error-Code", "X-Error-Message", "X-HF-Warning", "Connection",
    "Last-Modified", "X-Xet-Hash", "X-Xet-Refresh-Route", "Content-Type", "Upgrade",
)  # fmt: skip
_HEAD_VALUES = (
    "0", "1", "-1", "99999999999999999999999", "5119", "5121", "gzip", "br", "chunked", "identity",
    "bytes 0-5119/5120", "bytes 5-5119/5120", "bytes 9-0/*", "bytes */5120", "RepoNotFound",
    "GatedRepo", "EntryNotFound", "RevisionNotFound", "https://evil.invalid/x", "a=b; Path=/",
    '<http://127.0.0.1:9/>; rel="next"', 'attachment; filename="../../x"', "close", "keep-alive",
)  # fmt: skip


def _lie_in_head(lie: Lie, rng: random.Random, victim: Path) -> None:
    reply = rng.choice((lie.listing, lie.file, lie.file))
    for _ in range(rng.choice((1, 1, 3))):
        name = rng.choice(_HEADS)
        texts = [*_HEAD_VALUES, *_evil_texts(victim)]
        text: str | None = rng.choice((None, rng.choice(texts), f'"{rng.choice(texts)}"'))
        reply.head[name] = text
        lie.words.append(f"head {name}: {str(text)[:30]!r}")


def _lie_in_status(lie: Lie, rng: random.Random, victim: Path) -> None:
    reply = rng.choice((lie.listing, lie.file))
    reply.status = rng.choice(
        (201, 204, 206, 300, 304, 400, 401, 403, 404, 408, 416, 429, 500, 503)
    )
    if rng.random() < 0.5:
        code = rng.choice(("RepoNotFound", "GatedRepo", "EntryNotFound", "RevisionNotFound", "x"))
        reply.head["X-Error-Code"] = code
    lie.words.append(f"status {reply.status}")


_SHAPES = (
    "close", "chunked", "tiny chunks", "short", "long", "endless", "endless chunks", "bad chunks",
    "noise", "early", "other bytes",
)  # fmt: skip
#: These cost their time, so they are drawn seldom.
_SLOW_SHAPES = ("drip", "silent", "dripped head", "hints")


def _lie_in_body(lie: Lie, rng: random.Random, victim: Path) -> None:
    reply = rng.choice((lie.listing, lie.file, lie.file))
    reply.shape = rng.choice(_SLOW_SHAPES if rng.random() < 0.03 else _SHAPES)
    lie.words.append(f"{'list' if reply is lie.listing else 'file'} is {reply.shape}")


def _lie_in_redirect(lie: Lie, rng: random.Random, victim: Path) -> None:
    reply = rng.choice((lie.listing, lie.file))
    reply.status = rng.choice((301, 302, 303, 307, 308))
    reply.head["Location"] = rng.choice(
        (
            "/", "//", "", "http://", "http://[::1", "http://a..b/", f"http://{'a' * 70}/", "?",
            "file:///etc/passwd", "ftp://127.0.0.1/x", "http://127.0.0.1:9/", "http:///x", "#",
            "http://127.0.0.1:99999", "http://u:p@127.0.0.1:9/", "data:,x", "javascript:1",
            "http://\x80/", "../" * 50, "\\\\h\\x", "unix:/x", "http://127.0.0.1:0/", "/%zz",
            "http://é.invalid:9/", "/\x00",
        )
    )  # fmt: skip
    if rng.random() < 0.3:
        reply.shape = "endless"
    lie.words.append(f"{reply.status} to {reply.head['Location']!r}")


def _plant(lie: Lie, rng: random.Random, victim: Path) -> None:
    """Have others put something into the cache before, in the place of a file or a folder."""
    repository = "models--acme--tiny-GGUF"
    place = rng.choice(
        (
            repository, f"{repository}/blobs", f"{repository}/snapshots", f"{repository}/refs",
            f"{repository}/snapshots/{COMMIT}", f"{repository}/refs/main",
            f"{repository}/snapshots/{COMMIT}/{FILE}", f"{repository}/blobs/{SHA256}",
            f"{repository}/blobs/{SHA256}.incomplete", f"{repository}/blobs/{SHA256}.incomplete",
        )
    )  # fmt: skip
    kind = rng.choice(
        ("folder link", "file link", "lost link", "hard link", "pipe", "file", "folder")
    )

    def plant(cache: Path, victim: Path) -> None:
        path = cache / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "hard link":
            os.link(victim / "kept", path)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "file":
            path.write_bytes(rng.choice((b"", b"../../../victim", b"x" * 100, b"x" * 9000)))
        elif kind == "folder":
            path.mkdir()
        else:
            targets = {"folder link": victim, "file link": victim / "kept"}
            path.symlink_to(targets.get(kind, victim / "planted"))

    lie.plant = plant
    lie.words.append(f"{kind} at {place.removeprefix(repository)}")


_KINDS = (
    _lie_in_list, _lie_in_list, _lie_in_bytes_of_list, _lie_in_head, _lie_in_head, _lie_in_status,
    _lie_in_body, _lie_in_redirect, _plant, _plant,
)  # fmt: skip


def honest_hub(seed: int) -> Lie:
    """No lie at all."""
    head: dict[str, str | None] = {"ETag": f'"{SHA256}"', "X-Repo-Commit": COMMIT}
    return Lie(seed, Reply(json.dumps(_honest_list()).encode()), Reply(DATA, head=head))


def draw(seed: int, victim: Path) -> Lie:
    """The lie of a number; the same each time."""
    rng = random.Random(seed)
    lie = honest_hub(seed)
    lie.is_plain_server = rng.random() < 0.2
    for kind in rng.choices(_KINDS, k=rng.choice((1, 1, 2, 3))):
        kind(lie, rng, victim)
    return lie


# -- the server -----------------------------------------------------------------------------------


class LyingHub(socketserver.ThreadingTCPServer):
    """Answers each question with what `lie` has for it."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64
    lie: Lie

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked may have gone."""


class _Handler(socketserver.StreamRequestHandler):
    server: LyingHub

    def handle(self) -> None:
        lie = self.server.lie
        self.request.settimeout(10)
        verb, path, *_ = self.rfile.readline(1 << 16).decode("latin-1").split()
        span = ""
        while line := self.rfile.readline(1 << 16).strip():
            if line.lower().startswith(b"range: bytes="):
                span = line.split(b"=")[1].decode().rstrip("-")
        reply = lie.listing if "/api/" in path else lie.file
        if reply is lie.file:
            lie.starts.append(int(span or 0))
        with contextlib.suppress(OSError):
            for data in _stream(reply, verb, int(span or 0)):
                self.request.sendall(data)
                lie.num_sent += len(data)
                if lie.num_sent > _SEND_BYTES:
                    return


def _stream(reply: Reply, verb: str, start: int) -> Iterator[bytes]:
    """The bytes of a reply, without an end for some shapes."""
    rng = random.Random(len(reply.body))
    if reply.shape in ("silent", "hints", "dripped head", "noise"):
        yield from _headless(reply.shape, rng)
        return
    body, status = reply.body, reply.status
    head: dict[str, str | None] = {"Content-Length": str(len(body))}
    if verb == "GET" and reply.shape not in ("plain", "short", "drip", "other bytes"):
        head = {"Transfer-Encoding": "chunked" if "chunks" in reply.shape + "s" else None}
    if start and status == 200 and reply.shape == "plain":
        status, body = 206, body[start:]
        head["Content-Range"] = f"bytes {start}-{start + len(body) - 1}/{start + len(body)}"
        head["Content-Length"] = str(len(body))
    head.update(reply.head)
    lines = [f"{name}: {text}" for name, text in head.items() if text is not None]
    yield "\r\n".join([f"HTTP/1.1 {status} OK", *lines, "", ""]).encode("utf-8", "surrogatepass")
    if verb == "GET":
        yield from _body(reply.shape, body, rng)


def _headless(shape: str, rng: random.Random) -> Iterator[bytes]:
    if shape == "noise":
        yield rng.randbytes(3000)
    elif shape == "hints":
        while True:
            yield b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100
            threading.Event().wait(0.001)
    elif shape == "dripped head":
        yield b"HTTP/1.1 200 OK\r\nX-Long: "
        while True:
            yield b"x"
            threading.Event().wait(0.05)
    else:
        threading.Event().wait(2 * _SILENT_SECONDS)


def _body(shape: str, body: bytes, rng: random.Random) -> Iterator[bytes]:
    if shape == "chunked":
        yield b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    elif shape == "tiny chunks":
        yield b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    elif shape == "bad chunks":
        yield rng.choice(
            (b"zz\r\n", b"-1\r\nx", b"%x\r\nabc\r\n" % (1 << 70), b"1;" + b"x" * 300_000)
        )
    elif shape == "endless chunks":
        yield from _forever(b"10000\r\n" + b" " * 65536 + b"\r\n")
    elif shape in ("endless", "long"):
        yield body
        yield from _forever(b" " * 65536) if shape == "endless" else [b"more"]
    elif shape in ("short", "early"):
        yield body[: len(body) // 2]
    elif shape == "other bytes":
        yield bytes(reversed(body))
    elif shape == "drip":
        for place in range(len(body)):
            yield body[place : place + 1]
            threading.Event().wait(0.05)
    else:
        yield body


def _forever(data: bytes) -> Iterator[bytes]:
    while True:
        yield data


# -- the check ------------------------------------------------------------------------------------


@contextlib.contextmanager
def lying_hub(folder: Path) -> Iterator[LyingHub]:
    """A hub that this process asks, with short times; `folder` is the world that it may not touch.

    The caches are `a/b/hub` and `a/b/own` in it.
    """
    (folder / "victim").mkdir(parents=True)
    # As if it were the beginning of a download.
    (folder / "victim" / "kept").write_bytes(DATA[:1000])
    (folder / "victim" / "kept.gguf").write_bytes(DATA)
    (folder / "here").mkdir()
    with LyingHub(("127.0.0.1", 0), _Handler) as hub, pytest.MonkeyPatch.context() as patch:
        use(Hub(url=hub.url), folder / "a" / "b", patch)
        patch.chdir(folder / "here")
        patch.delenv("HF_TOKEN", raising=False)
        patch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", _SILENT_SECONDS)
        patch.setattr(listing, "LIST_SECONDS", 2 * _SILENT_SECONDS)
        patch.setattr(listing, "_MAX_LIST_BYTES", _MAX_LIST_BYTES)
        patch.setattr(download, "LIST_SECONDS", 2 * _SILENT_SECONDS)
        patch.setattr(download, "_PACE", Pace(2 * _SILENT_SECONDS, 100))
        patch.setattr(download, "_MAX_VAIN_TRIES", 1)
        patch.setattr("time.sleep", lambda seconds: None)
        thread = threading.Thread(target=hub.serve_forever, args=[0.02])
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
            close_session()
            private_folder.cache_clear()


def problem_of(hub: LyingHub, seed: int, folder: Path) -> str:
    """What is wrong after a model was pulled and removed through a lie; empty when all is well."""
    caches = folder / "a" / "b"
    _empty(caches)
    lie = hub.lie = draw(seed, folder / "victim")
    if lie.plant is not None:
        lie.plant(caches / "hub", folder / "victim")
    before, begun = _state(folder), time.monotonic()
    problems = [_problem_of_pull(hub.url, lie, caches), _problem_of_removal(caches)]
    if time.monotonic() - begun > MAX_SECONDS:
        problems.append(f"took {time.monotonic() - begun:.1f} s")
    if lie.num_sent > MAX_SENT_BYTES:
        problems.append(f"took {lie.num_sent} bytes from the hub")
    if (after := _state(folder)) != before:
        changed = {path for path, _ in set(before.items()) ^ set(after.items())}
        problems.append(f"changed outside of the caches: {sorted(changed)}")
    if seed % HONEST_EVERY == 0:
        _empty(caches)
        hub.lie = honest_hub(seed)
        problems.append(_problem_of_pull(hub.url, hub.lie, caches, must_come=True))
    found = [problem for problem in problems if problem]
    return f"{lie}: {'; '.join(found)}" if found else ""


def _empty(caches: Path) -> None:
    shutil.rmtree(caches, ignore_errors=True)
    (caches / "hub").mkdir(parents=True)
    private_folder.cache_clear()


def _problem_of_removal(caches: Path) -> str:
    try:
        cached.find_cached(HubName(NAME))
        cached.cached_models(caches / "own" / "models")
        cached.remove(HubName(NAME), caches / "own" / "models")
    except HypoError as error:
        return "" if _is_one_line(error) else f"removing says {str(error)[:300]!r}"
    except Exception as error:
        return f"removing raised {error!r}"
    return ""


def _is_one_line(error: HypoError) -> bool:
    return len(str(error).splitlines()) == 1 and len(str(error)) < MAX_SAID_CHARS


def _problem_of_pull(url: str, lie: Lie, caches: Path, *, must_come: bool = False) -> str:
    text = f"{url}/{FILE}" if lie.is_plain_server else f"{NAME}:Q4_K_M"
    path = None
    try:
        path = find_model(text, architectures=frozenset({"llama"}), is_newest=True)
    except HypoError as error:
        if must_come or not _is_one_line(error):
            return f"says {str(error)[:300]!r}"
    except Exception as error:
        return f"raised {error!r}"
    kept = sum(found.lstat().st_size for found in caches.rglob("*") if found.is_file())
    if kept > MAX_KEPT_BYTES:
        return f"left {kept} bytes in the cache"
    if path is None:
        return ""
    if not path.is_relative_to(caches):
        return f"gives {path}"
    blob = path.resolve()
    if lie.plant is None and not lie.is_plain_server:
        data = blob.read_bytes()
        digests = hashlib.sha256(data), hashlib.sha1(b"blob %d\0" % len(data) + data)
        in_cache = blob.parent == caches / "hub/models--acme--tiny-GGUF/blobs"
        if not in_cache or blob.name not in [digest.hexdigest() for digest in digests]:
            return f"{path} is {blob} with the digest {digests[0].hexdigest()}"
    return ""


def _state(folder: Path) -> dict[str, tuple[int, int, int]]:
    """TensorKind, size and time of each file and folder but those of the caches."""
    found = {}
    for place, folders, files in os.walk(folder):
        if place == str(folder / "a" / "b"):
            folders[:] = [name for name in folders if name not in ("hub", "own")]
        for name in (*folders, *files):
            status = os.lstat(path := os.path.join(place, name))
            is_above = path in (str(folder / "a"), str(folder / "a" / "b"))
            time_ns = 0 if is_above else status.st_mtime_ns
            found[path] = (status.st_mode, status.st_size if not is_above else 0, time_ns)
    return found
