"""Models that are on this machine already, in the cache that Hugging Face's own tools share.

    models--OWNER--NAME/refs/main              the commit that `main` was, when somebody asked last
    models--OWNER--NAME/snapshots/COMMIT/FILE  a link to blobs/SHA256

(https://huggingface.co/docs/huggingface_hub/guides/manage-cache). Files of other servers lie in
this package's own cache.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hypocenter.base.errors import HubError, ModelNotFound
from hypocenter.hub.folders import ThroughLink, open_folder, put_text, read_text
from hypocenter.hub.names import COMMIT, FileAddress, HubName, RemoteName
from hypocenter.hub.variants import RemoteFile, Variant, choose, variants_of

_PREFIX, _SEPARATOR = "models--", "--"
#: A download that goes on where it stopped.
INCOMPLETE = ".incomplete"
_ADDRESS, _VERSION = "address", "version"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model that is here: its name, the file to open, and all its files."""

    name: str
    path: Path
    num_bytes: int
    last_used: float
    files: tuple[Path, ...]


@dataclass(slots=True)
class Removed:
    """Names of models, the bytes that are free now, and what was left, with the reason."""

    names: list[str]
    num_bytes: int
    left: list[str]


def hub_folder() -> Path:
    """The cache that HF_HUB_CACHE, HF_HOME or the user's home name."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(repository: str) -> Path:
    return hub_folder() / f"{_PREFIX}{repository.replace('/', _SEPARATOR)}"


def snapshot_of(name: HubName) -> Path | None:
    """The folder of the revision that `name` has here; that of the last commit for a branch."""
    folder = repository_folder(name.repository)
    commit = read_text(folder / "refs" / name.revision).strip() or name.revision
    snapshot = folder / "snapshots" / commit
    return snapshot if COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def find_cached(name: HubName) -> tuple[Variant, Path] | None:
    """The model that `name` means among those that are here, and the file to open."""
    snapshot = snapshot_of(name)
    if snapshot is None:
        return None
    variants = _variants_in(snapshot)
    if not variants:
        return None
    try:
        chosen = choose(name, variants)
    except ModelNotFound:
        return None
    return chosen, snapshot / chosen.path


def cached_models(other_folder: Path | None) -> list[CachedModel]:
    """All models that are here, by name; `other_folder` has those of other servers."""
    # A file that did not change is in several snapshots, and here once.
    found = {(model.name, model.path.resolve()): model for model in _in_snapshots(other_folder)}
    return sorted(found.values(), key=lambda model: model.name)


def _in_snapshots(other_folder: Path | None) -> Iterator[CachedModel]:
    """The same, with what several snapshots have once for each of them."""
    for folder in sorted(hub_folder().glob(f"{_PREFIX}*{_SEPARATOR}*")):
        repository = folder.name.removeprefix(_PREFIX).replace(_SEPARATOR, "/", 1)
        for snapshot in sorted((folder / "snapshots").glob("*")):
            for variant in _variants_in(snapshot):
                paths = tuple(snapshot / file.path for file in variant.files)
                name = (
                    HubName(repository, variant.label)
                    if variant.label
                    else HubName(repository, file=variant.path)
                )
                yield _model(str(name), paths)
    if other_folder is not None:
        for path in sorted(other_folder.glob("*/*.gguf")):
            yield _model(_address_of(path), (path,))


def remove(wanted: RemoteName, other_folder: Path | None) -> Removed:
    """Remove what is here of a model, or of a whole repository.

    What links of the cache lead to elsewhere stays, and no folder that is a link is entered. Raises
    ModelNotFound when there is nothing, and HubError when all of it is left.
    """
    models = [model for model in _in_snapshots(other_folder) if _is_meant(model.name, wanted)]
    partial = _partial_files(wanted)
    if not models and not partial:
        raise ModelNotFound(f"{wanted} is not here", "`hypo models` shows what is")
    cache = hub_folder() if isinstance(wanted, HubName) or other_folder is None else other_folder
    removed = Removed([], 0, [])
    for model in models:
        taken = [_remove_file(cache, path, removed) for path in model.files]
        if any(taken) and model.name not in removed.names:
            removed.names.append(model.name)
    are_gone = [_remove_file(cache, path, removed) for path in partial]
    if isinstance(wanted, HubName):
        are_gone.append(_remove_folder(repository_folder(wanted.repository), removed))
    if removed.left and not removed.names and not any(are_gone):
        raise HubError(f"nothing of {wanted} was removed: {removed.left[0]}")
    return removed


def _remove_file(cache: Path, path: Path, removed: Removed) -> bool:
    """Remove a file, and of a link also the blob that it alone leads to; whether it is gone."""
    *parts, name = path.relative_to(cache).parts
    try:
        with open_folder(cache, parts) as folder:
            blob = None
            with contextlib.suppress(OSError):  # it is no link
                blob = path.parent / os.readlink(name, dir_fd=folder)
            num_bytes = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
            os.unlink(name, dir_fd=folder)
        if blob is None:
            removed.num_bytes += num_bytes
        else:
            _remove_blob(cache, parts[0], blob, removed)
        with open_folder(cache, parts[:-1]) as above, contextlib.suppress(OSError):
            os.rmdir(parts[-1], dir_fd=above)  # only when it is empty
    except ThroughLink as found:
        removed.left.append(f"{path} stays: {found.path} is a link or no folder")
        return False
    except OSError as error:
        removed.left.append(f"{path} stays: {error.strerror}")
        return False
    return True


def _remove_blob(cache: Path, repository: str, blob: Path, removed: Removed) -> None:
    """Remove a blob of `repository`, unless another link leads to it; nothing that lies elsewhere.

    The blob may be a link itself, to a store that several repositories share: the link goes.
    """
    blobs = cache / repository / "blobs"
    if _real_place(blob) != (os.path.realpath(blobs), blob.name):
        removed.left.append(f"{blob} stays: it is not in {blobs}, and a link led to it")
        return
    links = (link for link in (blobs.parent / "snapshots").rglob("*") if link.is_symlink())
    if any(_real_place(link.parent / link.readlink()) == _real_place(blob) for link in links):
        return
    with open_folder(cache, (repository, "blobs")) as folder:
        try:
            found = os.stat(blob.name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        os.unlink(blob.name, dir_fd=folder)
    if stat.S_ISLNK(found.st_mode):
        removed.left.append(f"the bytes of {blob.name} stay: the blob was a link to a shared store")
    else:
        removed.num_bytes += found.st_size


def _remove_folder(folder: Path, removed: Removed) -> bool:
    """Remove a repository's folder once it has no model; whether it is gone."""
    if not folder.is_dir() or any(map(_variants_in, (folder / "snapshots").glob("*"))):
        return False
    if folder.is_symlink():
        removed.left.append(f"{folder} stays: it is a link")
        return False
    try:
        shutil.rmtree(folder)
    except OSError as error:
        removed.left.append(f"{folder} stays: {error.strerror}")
        return False
    return True


def _is_meant(name: str, wanted: RemoteName) -> bool:
    if isinstance(wanted, FileAddress) or wanted.tag or wanted.file:
        return name.lower() == str(wanted).lower()
    return name.startswith((f"{wanted.repository}:", f"{wanted.repository}/"))


def _partial_files(wanted: RemoteName) -> list[Path]:
    """Downloads of a whole repository that broke off."""
    if isinstance(wanted, FileAddress) or wanted.tag or wanted.file:
        return []
    return sorted((repository_folder(wanted.repository) / "blobs").glob(f"*{INCOMPLETE}"))


def _real_place(path: Path) -> tuple[str, str]:
    """The folder where a file lies in truth, and its name there; it may be a link itself."""
    return os.path.realpath(path.parent), path.name


def _variants_in(snapshot: Path) -> list[Variant]:
    return variants_of(_files_in(snapshot))


def _files_in(snapshot: Path) -> Iterator[RemoteFile]:
    for path in sorted(snapshot.rglob("*.gguf")):
        with contextlib.suppress(OSError):  # a link that leads nowhere
            found = path.stat()
            if stat.S_ISREG(found.st_mode):
                yield RemoteFile(path.relative_to(snapshot).as_posix(), found.st_size)


def _model(name: str, files: tuple[Path, ...]) -> CachedModel:
    found = [path.stat() for path in files]
    used = max(max(status.st_atime, status.st_mtime) for status in found)
    return CachedModel(name, files[0], sum(status.st_size for status in found), used, files)


def note_address(folder: int, address: FileAddress) -> None:
    """Write beside a file of another server, into the same folder, where it is from."""
    put_text(folder, _ADDRESS, address.url + "\n")


def note_version(folder: int, version: str) -> None:
    """Write there as well which of the server's files it is."""
    put_text(folder, _VERSION, version)


def version_of(path: Path) -> str:
    """What was written; empty where nothing was."""
    return read_text(path.with_name(_VERSION))


def _address_of(path: Path) -> str:
    return read_text(path.with_name(_ADDRESS)).strip() or path.name
