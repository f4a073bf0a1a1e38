"""Fetches a model from its hub, or from any server: listed, chosen, resumed, checked.

Files are written here, and not by `huggingface_hub`, which names them by the heads of answers. The
names and places are those that it has, so that other tools share them: a blob by the digest that
the hub listed, and that its bytes have; a snapshot by the listed commit and the listed name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from hypocenter.base.errors import HubError, ModelNotFound
from hypocenter.base.wording import bytes_text
from hypocenter.hub import cached
from hypocenter.hub.answers import HubAnswer, LineBroken, Pace, Question, ask
from hypocenter.hub.folders import open_file, open_folder, put_link, put_text, size_of
from hypocenter.hub.listing import LIST_SECONDS, hub_question, list_files, require_success
from hypocenter.hub.names import FileAddress, HubName
from hypocenter.hub.variants import RemoteFile, choose, variants_of
from hypocenter.settings.cache_folder import private_folder
from hypocenter.settings.config import OnProgress

#: Folder of the cache for files of servers that are no hub.
FOLDER = "models"
_SHA1_CHARS = 40
#: SHA-256, or that of git for what is small.
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
#: First byte and size of what comes, as `Content-Range` has them.
_SPAN = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)")
_CHUNK_BYTES = 4 << 20
_LOOK_SECONDS = 0.5
#: A file comes at this pace or is left, to be gone on with later: 4 KiB a second.
_PACE = Pace(seconds=60.0, num_bytes=60 * 4096)
#: Tries in a row that bring less than so many bytes more.
_MAX_VAIN_TRIES, _WORTH_BYTES = 5, 1 << 20
_MAX_WAIT_SECONDS = 30.0
#: The server asks to come back later.
_BUSY = (408, 429)
#: The disk's room is looked at again after so many bytes.
_ROOM_BYTES = 64 << 20
_MODE_PRIVATE = 0o700


@dataclass(frozen=True, slots=True)
class _Place:
    """A file of a cache: `parts` are the folders below `cache` that it lies in."""

    cache: Path
    parts: tuple[str, ...]
    name: str

    @property
    def path(self) -> Path:
        return self.cache.joinpath(*self.parts, self.name)

    @property
    def partial(self) -> Path:
        return self.path.with_name(self.name + cached.INCOMPLETE)


def pull(
    name: HubName,
    progress: OnProgress,
    say: Callable[[str], None],
    *,
    room_bytes: int | None,
    architectures: frozenset[str],
) -> Path:
    """Have the model of `name` here, as its hub has it now; the file to open.

    `say` is told what was chosen. Raises HubError and ModelNotFound.
    """
    with _disk_errors(str(name)):
        commit, files, architecture = list_files(name)
        if architecture and architecture not in architectures:
            raise ModelNotFound(
                f"{name.repository} is of architecture {architecture!r}, which is not run here yet",
                "the README has a table of those that it runs",
            )
        chosen = choose(name, variants_of(files), room_bytes=room_bytes)
        missing = [file for file in chosen.files if not _is_here(name, commit, file)]
        if missing:
            say(f"{name.repository}: {chosen}, one of {len(files)} files")
        _require_space([(_blob(name, file), file.num_bytes) for file in missing])
        done, whole = chosen.num_bytes - sum(file.num_bytes for file in missing), chosen.num_bytes
        for file in missing:
            meter = _Meter(f"downloading {file.path}", done, whole, progress)
            _fetch(_question(name, file, commit), _blob(name, file), file, meter, name)
            done += file.num_bytes
        for file in chosen.files:
            _link(name, commit, file)
        _note_commit(name, commit)
    return cached.repository_folder(name.repository) / "snapshots" / commit / chosen.path


def pull_file(address: FileAddress, progress: OnProgress, say: Callable[[str], None]) -> Path:
    """Have the file of any server here; a second time it is not asked for again."""
    path = file_path(address)
    if path.exists():
        return path
    place = _Place(path.parent.parent, (path.parent.name,), path.name)
    with _disk_errors(address.url):
        question = Question(address.url, "its server", address.url, {})
        num_bytes, version = _size_and_version(question)
        with open_folder(place.cache, place.parts, makes=True, mode=_MODE_PRIVATE) as folder:
            cached.note_address(folder, address)
            _drop_other_version(folder, place, version)
        file = RemoteFile(address.file, num_bytes)
        say(f"{address.file}: {bytes_text(num_bytes)}")
        _require_space([(place, num_bytes)])
        _fetch(question, place, file, _Meter(f"downloading {file.path}", 0, num_bytes, progress))
    return path


def file_path(address: FileAddress) -> Path:
    """Where a server's file lies, or will. Raises HubError when there is no cache folder."""
    folder, problem = private_folder(FOLDER)
    if folder is None:
        raise HubError(f"{address}: no folder for it: {problem}", "HYPO_CACHE_DIR names another")
    digest = hashlib.blake2b(address.url.encode(), digest_size=8).hexdigest()
    return folder / digest / address.file


# -- where a hub's files lie ----------------------------------------------------------------------


def _question(name: HubName, file: RemoteFile, commit: str) -> Question:
    from huggingface_hub import constants, hf_hub_url

    if file.num_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise HubError(
            f"{name.repository}/{file.path} has {bytes_text(file.num_bytes)}, and the hub gives at "
            f"most {bytes_text(constants.MAX_HTTP_DOWNLOAD_SIZE)} in one file",
            "take one that is split",
        )
    url = hf_hub_url(name.repository, file.path, revision=commit)
    return hub_question(f"{name.repository}/{file.path}", url)


def _blob(name: HubName, file: RemoteFile) -> _Place:
    """Where the bytes of a file lie: under the digest that the hub listed, and that is compared."""
    if not _DIGEST.fullmatch(file.sha256):
        raise HubError(f"{file.path}: its hub gives no digest of it, but {file.sha256!r}")
    folder = cached.repository_folder(name.repository)
    return _Place(folder.parent, (folder.name, "blobs"), file.sha256)


def _snapshot(name: HubName, commit: str, file: RemoteFile) -> _Place:
    folder = cached.repository_folder(name.repository)
    *parts, last = file.path.split("/")
    return _Place(folder.parent, (folder.name, "snapshots", commit, *parts), last)


def _is_here(name: HubName, commit: str, file: RemoteFile) -> bool:
    """Whether the blob is, or, in a cache that cannot have links, the file in its place."""
    blob, snapshot = _blob(name, file), _snapshot(name, commit, file)
    with contextlib.suppress(FileNotFoundError), open_folder(blob.cache, blob.parts) as folder:
        if size_of(folder, blob.name) == file.num_bytes:
            return True
    with (
        contextlib.suppress(FileNotFoundError),
        open_folder(snapshot.cache, snapshot.parts) as folder,
    ):
        is_link = snapshot.path.is_symlink()
        return not is_link and size_of(folder, snapshot.name) == file.num_bytes
    return False


def _link(name: HubName, commit: str, file: RemoteFile) -> None:
    """Make the file of a snapshot: a link to the blob, or the blob itself where none can be."""
    from huggingface_hub import constants

    blob, snapshot = _blob(name, file), _snapshot(name, commit, file)
    upwards = "../" * (len(snapshot.parts) - 1)
    with (
        open_folder(blob.cache, blob.parts, makes=True) as blobs,
        open_folder(snapshot.cache, snapshot.parts, makes=True) as folder,
    ):
        if size_of(blobs, blob.name) is None:
            return  # the file itself is in its place
        try:
            if constants.HF_HUB_DISABLE_SYMLINKS:
                raise PermissionError(errno.EPERM, "links are not wanted")
            put_link(folder, snapshot.name, f"{upwards}blobs/{blob.name}")
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            os.rename(blob.name, snapshot.name, src_dir_fd=blobs, dst_dir_fd=folder)


def _note_commit(name: HubName, commit: str) -> None:
    """Write down which commit a branch is now, as the hub's tools do."""
    if name.revision == commit:
        return
    folder = cached.repository_folder(name.repository)
    *parts, last = name.revision.split("/")
    with open_folder(folder.parent, (folder.name, "refs", *parts), makes=True) as refs:
        put_text(refs, last, commit)


@contextlib.contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    """Within, whatever the disk says is told in our own words."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HubError(
                f"{what}: the disk is full",
                "`hypo models remove` makes room; what came so far is kept",
            ) from error
        where = f"{error.filename}: " if error.filename else ""
        raise HubError(f"{what}: {where}{error.strerror or error}") from error


# -- bytes ----------------------------------------------------------------------------------------


class _Meter:
    """How far a download is: `done` bytes of `whole` came before it."""

    def __init__(self, what: str, done: int, whole: int, progress: OnProgress) -> None:
        self._what, self._progress = what, progress
        self._done, self._whole = done, max(whole, 1)

    def is_at(self, num_bytes: int) -> None:
        self._progress(self._what, min((self._done + num_bytes) / self._whole, 1.0))

    def waits(self) -> None:
        self._progress(f"waiting for another process that is {self._what}", 0.0)

    def checks(self, share: float) -> None:
        self._progress(f"checking what came of {self._what.partition(' ')[2]}", share)


def _fetch(
    question: Question, place: _Place, file: RemoteFile, meter: _Meter, name: HubName | None = None
) -> None:
    """Have the bytes of `file` at `place`: those that a try before left, and the rest."""
    with (
        open_folder(place.cache, place.parts, makes=True) as folder,
        _alone_with(folder, place, file, meter) as stream,
    ):
        if stream is None:
            return
        if stream.seek(0, os.SEEK_END) > file.num_bytes:
            stream.truncate(0)
        _fill(question, stream, file, meter, name)
        stream.flush()
        if file.sha256 and (found := _digest(stream, file, meter)) != file.sha256:
            os.unlink(place.partial.name, dir_fd=folder)
            raise HubError(
                f"{file.path} came with the digest {found}, but its hub says {file.sha256}",
                "what came was removed; try again",
            )
        os.fsync(stream.fileno())
        os.rename(place.partial.name, place.name, src_dir_fd=folder, dst_dir_fd=folder)


def _fill(
    question: Question, stream: BinaryIO, file: RemoteFile, meter: _Meter, name: HubName | None
) -> None:
    """Try until all bytes are there, as long as tries are of use."""
    num_vain = 0
    while (num_there := stream.seek(0, os.SEEK_END)) < file.num_bytes:
        meter.is_at(num_there)
        try:
            _try(question, stream, file, meter, name)
        except LineBroken as error:
            num_vain = 0 if stream.tell() >= num_there + _WORTH_BYTES else num_vain + 1
            if num_vain > _MAX_VAIN_TRIES:
                raise
            time.sleep(min(max(error.wait_seconds, 1.0), _MAX_WAIT_SECONDS))


def _try(
    question: Question, stream: BinaryIO, file: RemoteFile, meter: _Meter, name: HubName | None
) -> None:
    """Write what is missing behind what is there. Raises LineBroken where another try may help."""
    num_there = stream.tell()
    wanted = {"Range": f"bytes={num_there}-"} if num_there else {}
    question = replace(question, headers={**question.headers, **wanted})
    with ask(question, _PACE) as answer:
        _require_file(answer, name)
        if answer.status == 200:  # it begins anew, whatever was asked for
            stream.truncate(0)
            num_there = stream.seek(0)
        _require_rest(answer, num_there, file)
        num_looked = num_there
        for data in answer.parts():
            if num_there + len(data) > file.num_bytes:
                stream.truncate(0)
                raise HubError(
                    f"{question.what}: {question.host} said {file.num_bytes} bytes, and sends more",
                    "what came was removed; try again",
                )
            stream.write(data)
            num_there += len(data)
            meter.is_at(num_there)
            if num_there - num_looked >= _ROOM_BYTES:
                num_looked = num_there
                _require_room(stream, question.what, file.num_bytes - num_there)
    if num_there < file.num_bytes:
        raise LineBroken(
            f"{question.what}: {question.host} ends after {num_there} of {file.num_bytes} bytes",
            "try again, what came so far is kept",
        )


def _require_file(answer: HubAnswer, name: HubName | None) -> None:
    """Raises HubError for an answer that is no file; LineBroken for one that asks to come later."""
    what, host = answer.question.what, answer.question.host
    if answer.status in _BUSY:
        error = LineBroken(
            f"{what}: {host} answered with status {answer.status}", "try again later"
        )
        seconds = answer.header("retry-after")
        error.wait_seconds = float(seconds) if re.fullmatch("[0-9]{1,6}", seconds) else 0.0
        raise error
    if name is not None:
        require_success(answer, name)
    elif answer.status not in (200, 206):
        raise HubError(
            f"{what}: {host} answered with status {answer.status}", "look at the address"
        )


def _require_rest(answer: HubAnswer, num_there: int, file: RemoteFile) -> None:
    """Raises HubError where the head of an answer contradicts what was asked for, and listed."""
    what, host = answer.question.what, answer.question.host
    if answer.status == 206:
        span = answer.header("content-range")
        found = _SPAN.fullmatch(span)
        if not found or int(found[1]) != num_there or found[2] not in ("*", str(file.num_bytes)):
            raise HubError(
                f"{what}: {host} sends the bytes {span[:60]!r}; {num_there}-/{file.num_bytes} were "
                "asked for",
                "try again",
            )
    num_bytes, rest = answer.length(), file.num_bytes - num_there
    if num_bytes is not None and (num_bytes > rest or (num_bytes < rest and answer.status == 200)):
        raise HubError(f"{what}: {host} said {rest} bytes, but sends {num_bytes}", "try again")


@contextlib.contextmanager
def _alone_with(
    folder: int, place: _Place, file: RemoteFile, meter: _Meter
) -> Iterator[BinaryIO | None]:
    """The file of an unfinished download, for us alone; None when another process finished it."""
    while True:
        with open(open_file(folder, place.partial), "r+b") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                meter.waits()
                time.sleep(_LOOK_SECONDS)
                continue
            if size_of(folder, place.name) == file.num_bytes:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(place.partial.name, dir_fd=folder)
                yield None
                return
            if not _is_still_there(folder, place, stream):
                continue  # it was renamed or removed between opening and locking
            yield stream
            return


def _is_still_there(folder: int, place: _Place, stream: BinaryIO) -> bool:
    try:
        found = os.stat(place.partial.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(stream.fileno()))


def _digest(stream: BinaryIO, file: RemoteFile, meter: _Meter) -> str:
    """A digest of the kind that the hub gave; git puts the size before what it hashes."""
    num_bytes = stream.seek(0, os.SEEK_END)
    digest = hashlib.sha256()
    if len(file.sha256) == _SHA1_CHARS:
        digest = hashlib.sha1(b"blob %d\0" % num_bytes, usedforsecurity=False)
    stream.seek(0)
    while data := stream.read(_CHUNK_BYTES):
        digest.update(data)
        meter.checks(stream.tell() / num_bytes)
    return digest.hexdigest()


def _drop_other_version(folder: int, place: _Place, version: str) -> None:
    """Remove what came of another file under the same address: no digest would tell."""
    if not version or cached.version_of(place.path) != version:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place.partial.name, dir_fd=folder)
    cached.note_version(folder, version)


def _size_and_version(question: Question) -> tuple[int, str]:
    """The size and version of a file of any server, which must say the size: what breaks off is
    known by that.

    The version is a digest of whatever changes with the file; empty where the server says nothing.
    """
    with ask(question, Pace(LIST_SECONDS), verb="HEAD") as answer:
        _require_file(answer, None)
        num_bytes = answer.length()
        if num_bytes is None:
            raise HubError(f"{question.what}: its server does not say how large the file is")
        said = answer.header("etag") or answer.header("last-modified")
    return num_bytes, hashlib.blake2b(said.encode(), digest_size=16).hexdigest() if said else ""


def _require_space(places: Sequence[tuple[_Place, int]]) -> None:
    num_bytes = 0
    for place, size in places:
        num_bytes += size
        with contextlib.suppress(OSError):
            num_bytes -= min(place.partial.lstat().st_size, size)
    if not places:
        return
    folder = places[0][0].path.parent
    there = next(above for above in (folder, *folder.parents) if above.is_dir())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise HubError(
            f"{bytes_text(num_bytes)} are to come, but {there} has {bytes_text(free)} free",
            "`hypo models remove` makes room; HF_HOME names another disk",
        )


def _require_room(stream: BinaryIO, what: str, num_bytes: int) -> None:
    """Raises HubError when others have filled the disk meanwhile, before it is full."""
    free = shutil.disk_usage(stream.fileno()).free
    if num_bytes > free:
        raise HubError(
            f"{what}: {bytes_text(num_bytes)} are still to come, and the disk has "
            f"{bytes_text(free)} free",
            "`hypo models remove` makes room; what came so far is kept",
        )
