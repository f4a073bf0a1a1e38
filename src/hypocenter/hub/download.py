"""Fetches a model from its hub, or from any server: listed, chosen, resumed, checked.

`huggingface_hub` asks the hub, reads the stream and tries again. It does not go on with a download
that a process before began, and of what it wrote it compares the size alone. So files are written
here, under the names that it gives them: what breaks off stays, and the digest is compared.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from hypocenter.cache_folder import make_private, private_folder
from hypocenter.config import OnProgress
from hypocenter.errors import HubError, ModelNotFound
from hypocenter.hub import cached
from hypocenter.hub.names import MAIN, FileAddress, HubName
from hypocenter.hub.variants import RemoteFile, choose, variants_of
from hypocenter.package import NAME
from hypocenter.wording import bytes_text

#: Folder of the cache for files of servers that are no hub.
FOLDER = "models"
MAX_FILES = 20_000
_MAX_SUGGESTED = 5
_SHA256_CHARS = 64
#: SHA-256, or that of git for what is small.
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CHUNK_BYTES = 4 << 20
_LOOK_SECONDS = 0.5
#: How long a list may take. A file's own times out by the second without a byte.
_LIST_SECONDS = 20.0


def pull(
    name: HubName,
    progress: OnProgress,
    say: Callable[[str], None],
    *,
    room_bytes: int | None,
    architectures: frozenset[str],
) -> Path:
    """Have the model of `name` here, as its hub has it now; the file to open.

    `say` is told what was chosen. Raises HubError, ModelNotFound, and OSError for what the disk
    says.
    """
    with _hub_errors(str(name), name):
        commit, files, architecture = _list_files(name)
    if architecture and architecture not in architectures:
        raise ModelNotFound(
            f"{name.repository} is of architecture {architecture}, which is not run here yet",
            "the README has a table of those that it runs",
        )
    chosen = choose(name, variants_of(files), room_bytes=room_bytes)
    folder = cached.repository_folder(name.repository)
    missing = [file for file in chosen.files if not _blob(folder, file).exists()]
    if missing:
        say(f"{name.repository}: {chosen}, one of {len(files)} files")
    _require_space(folder, missing)
    done, whole = chosen.num_bytes - sum(file.num_bytes for file in missing), chosen.num_bytes
    for file in missing:
        with _hub_errors(f"{name.repository}/{file.path}", name):
            meter = _Meter(f"downloading {file.path}", done, whole, progress)
            _fetch(_address(name, file, commit), _blob(folder, file), file, meter, _headers())
        done += file.num_bytes
    with _hub_errors(str(name), name):
        paths = [_link(name, file) for file in chosen.files]
    return paths[0]


def pull_file(address: FileAddress, progress: OnProgress, say: Callable[[str], None]) -> Path:
    """Have the file of any server here; a second time it is not asked for again."""
    path = file_path(address)
    if path.exists():
        return path
    make_private(path.parent)
    cached.note_address(path, address)
    with _hub_errors(address.url):
        num_bytes, version = _size_and_version(address.url)
        file = RemoteFile(address.file, num_bytes)
        _drop_other_version(path, version)
        say(f"{address.file}: {bytes_text(num_bytes)}")
        _require_space(path.parent, [file])
        meter = _Meter(f"downloading {address.file}", 0, num_bytes, progress)
        _fetch(address.url, path, file, meter, {})
    return path


def file_path(address: FileAddress) -> Path:
    """Where a server's file lies, or will. Raises HubError when there is no cache folder."""
    folder, problem = private_folder(FOLDER)
    if folder is None:
        raise HubError(f"{address}: no folder for it: {problem}", "HYPO_CACHE_DIR names another")
    digest = hashlib.blake2b(address.url.encode(), digest_size=8).hexdigest()
    return folder / digest / address.file


# -- the hub --------------------------------------------------------------------------------------


def _list_files(name: HubName) -> tuple[str, list[RemoteFile], str]:
    """The commit of a repository, its files, and the architecture that the hub has read there."""
    from huggingface_hub import HfApi

    try:
        info = HfApi(library_name=NAME).model_info(
            name.repository,
            revision=None if name.revision == MAIN else name.revision,
            files_metadata=True,
            timeout=_LIST_SECONDS,
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise HubError(f"{name.repository}: what its hub says is no list of files") from error
    siblings = info.siblings or []
    if len(siblings) > MAX_FILES:
        raise HubError(f"{name.repository} lists {len(siblings)} files; at most {MAX_FILES}")
    files = []
    for sibling in siblings:
        digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
        files.append(RemoteFile(sibling.rfilename, max(int(sibling.size or 0), 0), digest or ""))
    found = (info.gguf or {}).get("architecture")
    return info.sha or MAIN, files, found if isinstance(found, str) else ""


def _address(name: HubName, file: RemoteFile, commit: str) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(name.repository, file.path, revision=commit)


def _headers() -> dict[str, str]:
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    return dict(build_hf_headers(library_name=NAME))


def _blob(folder: Path, file: RemoteFile) -> Path:
    """Where the bytes of a file lie: under the digest that the hub names it by."""
    if not _DIGEST.fullmatch(file.sha256):
        raise HubError(f"{file.path}: its hub gives no digest of it, but {file.sha256!r}")
    return folder / "blobs" / file.sha256


def _link(name: HubName, file: RemoteFile) -> Path:
    """The file by its name; `huggingface_hub` finds its bytes there and makes the link."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name.repository, file.path, revision=name.revision))


def _suggestions(name: HubName) -> str:
    """Repositories that are called like `name`, if the hub says."""
    from huggingface_hub import HfApi

    words = name.repository.partition("/")[2].removesuffix("-GGUF")
    with contextlib.suppress(Exception):  # there is an error to tell of already
        found = HfApi(library_name=NAME).list_models(
            search=words, filter="gguf", sort="downloads", limit=_MAX_SUGGESTED
        )
        return ", ".join(model.id for model in found)
    return ""


@contextlib.contextmanager
def _hub_errors(what: str, name: HubName | None = None) -> Iterator[None]:
    """Within, whatever goes wrong with a hub or on the way to it is told in our own words."""
    from huggingface_hub import constants, errors

    #: Of whatever HTTP client `huggingface_hub` uses.
    http_error = cast(type[Exception], errors.HfHubHTTPError.__bases__[0])
    host = constants.ENDPOINT if name is not None else "its server"
    try:
        yield
    except errors.GatedRepoError as error:
        where = f"{constants.ENDPOINT}/{name.repository}" if name is not None else what
        raise HubError(
            f"{what} is open to those only who accepted its terms",
            f"accept them at {where}, and give your token by HF_TOKEN or `hf auth login`",
        ) from error
    except errors.RepositoryNotFoundError as error:
        near = _suggestions(name) if name is not None else ""
        raise HubError(
            f"{host} has no model {name.repository if name else what}, or it is private, and no "
            "file here is called that",
            (f"like it are {near}; " if near else "") + "for a private one give HF_TOKEN",
        ) from error
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise HubError(f"{host} has no {what} at that revision") from error
    except errors.OfflineModeIsEnabled as error:
        raise HubError(
            f"{what} is not here, and HF_HUB_OFFLINE forbids to ask for it",
            "`hypo models` shows what is here",
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        raise HubError(
            f"{what}: {host} answered with status {status}", "try again later"
        ) from error
    except http_error as error:
        reason = str(error) or type(error).__name__
        raise HubError(
            f"{what}: {host} does not answer: {reason}",
            "try again, what came so far is kept; `hypo models` shows what is here",
        ) from error
    except OSError as error:
        if error.errno is None:  # not of the disk: sizes that contradict each other, say
            raise HubError(f"{what}: {str(error).splitlines()[0]}", "try again") from error
        if error.errno == errno.ENOSPC:
            raise HubError(
                f"{what}: the disk is full",
                "`hypo models remove` makes room; what came so far is kept",
            ) from error
        raise


# -- bytes ----------------------------------------------------------------------------------------


class _Meter:
    """How far a download is, in the form in which `http_get` tells it."""

    def __init__(self, what: str, done: int, whole: int, progress: OnProgress) -> None:
        self._what, self._progress = what, progress
        self._done, self._whole = done, max(whole, 1)

    def __call__(self, *_: Any, initial: int = 0, **__: Any) -> _Meter:
        """It is asked for as if it were a class, once for each try; `initial` bytes are there."""
        self.update(initial)
        return self

    def __enter__(self) -> _Meter:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, num_bytes: float | None = 1) -> None:
        self._done += int(num_bytes or 0)
        self._progress(self._what, min(self._done / self._whole, 1.0))

    def waits(self) -> None:
        self._progress(f"waiting for another process that is {self._what}", 0.0)

    def checks(self, share: float) -> None:
        self._progress(f"checking what came of {self._what.partition(' ')[2]}", share)


def _fetch(url: str, path: Path, file: RemoteFile, meter: _Meter, headers: dict[str, str]) -> None:
    """Have the bytes of `file` at `path`: those that a try before left, and the rest."""
    from huggingface_hub.file_download import http_get

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + cached.INCOMPLETE)
    with _alone_with(partial, path, meter) as stream:
        if stream is None:
            return
        num_there = stream.seek(0, os.SEEK_END)
        if num_there > file.num_bytes:
            stream.truncate(0)
            num_there = stream.seek(0)
        if num_there < file.num_bytes:
            with _no_warnings():
                http_get(
                    url,
                    stream,
                    resume_size=num_there,
                    headers=headers,
                    expected_size=file.num_bytes,
                    tqdm_class=meter,  # type: ignore[arg-type]  # it is called, and what it gives is used
                )
        stream.flush()
        if len(file.sha256) == _SHA256_CHARS and (found := _sha256(stream, meter)) != file.sha256:
            partial.unlink()
            raise HubError(
                f"{file.path} came with the digest {found}, but its hub says {file.sha256}",
                "what came was removed; try again",
            )
        os.fsync(stream.fileno())
        partial.rename(path)


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Within, the package does not tell of each try: an error tells of the last."""
    log = logging.getLogger("huggingface_hub")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def _alone_with(partial: Path, path: Path, meter: _Meter) -> Iterator[BinaryIO | None]:
    """The file of an unfinished download, for us alone; None when another process finished it."""
    while True:
        with open(partial, "a+b") as made:
            try:
                fcntl.flock(made, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                meter.waits()
                time.sleep(_LOOK_SECONDS)
                continue
            if path.exists():
                partial.unlink(missing_ok=True)
                yield None
                return
            if not partial.exists() or not os.path.samestat(
                partial.stat(), os.fstat(made.fileno())
            ):
                continue  # it was renamed or removed between opening and locking
            with open(partial, "r+b") as stream:
                yield stream
            return


def _sha256(stream: BinaryIO, meter: _Meter) -> str:
    digest, whole = hashlib.sha256(), max(stream.seek(0, os.SEEK_END), 1)
    stream.seek(0)
    while data := stream.read(_CHUNK_BYTES):
        digest.update(data)
        meter.checks(stream.tell() / whole)
    return digest.hexdigest()


def _drop_other_version(path: Path, version: str) -> None:
    """Remove what came of another file under the same address: no digest would tell."""
    note = path.parent / "version"
    if not version or not note.exists() or note.read_text("utf-8") != version:
        path.with_name(path.name + cached.INCOMPLETE).unlink(missing_ok=True)
    note.write_text(version, "utf-8")


def _size_and_version(url: str) -> tuple[int, str]:
    """Of a file of any server, which must tell the size: what breaks off is known by that.

    The version is whatever changes with the file; empty where the server says nothing of it.
    """
    from huggingface_hub import get_session

    answer = get_session().head(url, follow_redirects=True, timeout=_LIST_SECONDS)
    answer.raise_for_status()
    length = answer.headers.get("content-length", "")
    if not length.isascii() or not length.isdigit():
        raise HubError(f"{url}: its server does not say how large the file is")
    changes = (answer.headers.get(name, "") for name in ("etag", "last-modified"))
    return int(length), next(filter(None, changes), "")


def _require_space(folder: Path, files: Sequence[RemoteFile]) -> None:
    num_bytes = 0
    for file in files:
        partial = folder / "blobs" / f"{file.sha256}{cached.INCOMPLETE}"
        num_bytes += file.num_bytes - (partial.stat().st_size if partial.exists() else 0)
    there = next(place for place in (folder, *folder.parents) if place.is_dir())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise HubError(
            f"{bytes_text(num_bytes)} are to come, but {there} has {bytes_text(free)} free",
            "`hypo models remove` makes room; HF_HOME names another disk",
        )
