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

from hypocenter.errors import ModelNotFound
from hypocenter.hub.names import FileAddress, HubName, RemoteName
from hypocenter.hub.variants import RemoteFile, Variant, choose, variants_of

_PREFIX, _SEPARATOR = "models--", "--"
#: A download that goes on where it stopped.
INCOMPLETE = ".incomplete"
_ADDRESS = "address"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model that is here: its name, the file to open, and all its files."""

    name: str
    path: Path
    num_bytes: int
    last_used: float
    files: tuple[Path, ...]


def hub_folder() -> Path:
    """The cache that HF_HUB_CACHE, HF_HOME or the user's home name."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(repository: str) -> Path:
    return hub_folder() / f"{_PREFIX}{repository.replace('/', _SEPARATOR)}"


def snapshot_of(name: HubName) -> Path | None:
    """The folder of the revision that `name` has here; that of the last commit for a branch."""
    folder = repository_folder(name.repository)
    commit = name.revision
    with contextlib.suppress(OSError, UnicodeDecodeError):
        commit = (folder / "refs" / name.revision).read_text("ascii").strip()
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


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
    found: dict[tuple[str, Path], CachedModel] = {}
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
                # A file that did not change is in several snapshots, and here once.
                found[str(name), paths[0].resolve()] = _model(str(name), paths)
    if other_folder is not None:
        for path in sorted(other_folder.glob("*/*.gguf")):
            found[path.name, path] = _model(_address_of(path), (path,))
    return sorted(found.values(), key=lambda model: model.name)


def remove(wanted: RemoteName, other_folder: Path | None) -> tuple[list[str], int]:
    """Remove what is here of a model, or of a whole repository; names, and the bytes that are free.

    Raises ModelNotFound when there is nothing.
    """
    models = [model for model in cached_models(other_folder) if _is_meant(model.name, wanted)]
    partial = _partial_files(wanted)
    if not models and not partial:
        raise ModelNotFound(f"{wanted} is not here", "`hypo models` shows what is")
    num_bytes = sum(_remove_link(path) for model in models for path in model.files)
    num_bytes += sum(_remove_link(path) for path in partial)
    if isinstance(wanted, HubName):
        folder = repository_folder(wanted.repository)
        if folder.is_dir() and not any(
            _variants_in(snapshot) for snapshot in (folder / "snapshots").glob("*")
        ):
            shutil.rmtree(folder)
    return sorted({model.name for model in models}), num_bytes


def _is_meant(name: str, wanted: RemoteName) -> bool:
    if isinstance(wanted, FileAddress) or wanted.tag or wanted.file:
        return name.lower() == str(wanted).lower()
    return name.startswith((f"{wanted.repository}:", f"{wanted.repository}/"))


def _partial_files(wanted: RemoteName) -> list[Path]:
    """Downloads of a whole repository that broke off."""
    if isinstance(wanted, FileAddress) or wanted.tag or wanted.file:
        return []
    return sorted((repository_folder(wanted.repository) / "blobs").glob(f"*{INCOMPLETE}"))


def _remove_link(path: Path) -> int:
    """Remove a file and, of a link, what it leads to, unless another one does; the bytes of it."""
    blob = _blob_of(path) if path.is_symlink() else None
    num_bytes = path.stat().st_size if path.exists() else 0
    path.unlink()
    with contextlib.suppress(OSError):  # only when it is empty
        path.parent.rmdir()
    if blob is None:
        return num_bytes
    links = (other for other in (blob.parent.parent / "snapshots").rglob("*") if other.is_symlink())
    if any(_blob_of(other) == blob for other in links):
        return 0
    blob.unlink(missing_ok=True)
    return num_bytes


def _blob_of(link: Path) -> Path:
    """One step only: a blob may be a link itself, to a store that several caches share."""
    return Path(os.path.normpath(link.parent / link.readlink()))


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


def note_address(path: Path, address: FileAddress) -> None:
    """Write beside a file of another server where it is from."""
    (path.parent / _ADDRESS).write_text(address.url + "\n", "utf-8")


def _address_of(path: Path) -> str:
    """Of a file of another server, which is written beside it."""
    with contextlib.suppress(OSError):
        return (path.parent / _ADDRESS).read_text("utf-8").strip()
    return path.name
