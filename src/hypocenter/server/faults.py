"""What a worker left when it died of a fault: a bundle, and the doctor's report of it.

`keep` runs in the thread that watched the worker; the next worker starts meanwhile. Others may be
able to write where bundles lie, so no link is followed there, and no file of others is read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hypocenter.base import package
from hypocenter.base.errors import HypoError, UsageError
from hypocenter.record import bundle as bundles
from hypocenter.record.ring import run_folders as runs_below
from hypocenter.server.answers import Fault
from hypocenter.server.operating.log import tell
from hypocenter.server.worker_life import is_fault
from hypocenter.settings.cache_folder import changeable_by_others, make_private, private_folder
from hypocenter.watch.child import Ended
from hypocenter.watch.collect import collect

#: Bundles that are kept; the oldest goes first.
MAX_BUNDLES = 8
#: Where they go when nobody says: in the folder of the start, or else in the cache folder.
DEFAULT_FOLDER, _IN_CACHE = "hypo-faults", "faults"
_PREFIX = "fault-"
#: A report, and what it is named until it is whole; the same as a page.
_REPORT, _PART = "report.md", ".report.md"
_PAGE, _PAGE_PART = "report.html", ".report.html"
_REPORT_SECONDS = 300.0
_MAX_REPORT_BYTES = 4 << 20


def folder_of(named: str | None) -> Path | None:
    """The folder for bundles: the one that a person named, or the default; None: none are kept.

    Nobody chose the default, so it may not be one that others can change: then it is a folder of
    the cache. Raises UsageError for a named one that cannot be written to.
    """
    if named is not None:
        return _require_writable(Path(named).resolve()) if named else None
    folder = Path.cwd() / DEFAULT_FOLDER
    problem = changeable_by_others(folder) or _why_unwritable(folder)
    if not problem:
        return folder
    other, other_problem = private_folder(_IN_CACHE)
    where = f"they go to {other}" if other else f"none are kept, for {other_problem}"
    message = (
        f"bundles of faults cannot go to {folder}: {problem}; {where}; --bundles names another"
    )
    tell(logging.WARNING, "bundles_elsewhere", message, folder=str(other or ""))
    return other


def _require_writable(folder: Path) -> Path:
    if problem := _why_unwritable(folder):
        raise UsageError(f"--bundles {folder}: {problem}; name another folder")
    return folder


def _why_unwritable(folder: Path) -> str:
    """Why nothing can be written there, or the folder not be made; empty when it can."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        return f"{there} is no folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"


class FaultKeeper:
    """Saves bundles below `folder`; None: nothing is saved."""

    def __init__(self, folder: Path | None, on_saved: Callable[[], None]) -> None:
        self._folder, self._on_saved = folder, on_saved
        #: Names of those whose report is being written.
        self._writing: set[str] = set()

    def keep(self, runs: Path, ended: Ended) -> None:
        """Save what a worker left below `runs`, if it died of a fault."""
        if self._folder is None or not is_fault(ended) or not runs_below(runs):
            return
        try:
            bundle = collect(runs, ended)
            if bundle is None:
                return
            make_private(self._folder)
            folder = self._free_name(self._folder, time.strftime(f"{_PREFIX}%Y%m%d-%H%M%S"))
            self._writing.add(folder.name)
            bundles.save(bundle, folder)
        except (OSError, HypoError) as error:
            tell(logging.ERROR, "bundle_failed", f"a worker's bundle could not be saved: {error}")
            return
        self._on_saved()
        message = (
            f"the bundle of worker {ended.pid} is {folder}; `hypo doctor {folder}` explains it"
        )
        tell(logging.WARNING, "bundle_saved", message, bundle=str(folder), pid=ended.pid)
        try:
            self._write_report(folder)
        except (OSError, subprocess.TimeoutExpired) as error:
            tell(logging.ERROR, "report_failed", f"{folder}: no report was written: {error}")
        finally:
            self._writing.discard(folder.name)
        self._remove_oldest(self._folder)

    def list_all(self, link: Callable[[str], str]) -> list[Fault]:
        """The bundles that are there, the newest first, with what was reported of them.

        `link` makes the link to the report of a name as a page.
        """
        found = []
        for folder in [] if self._folder is None else _own_bundles(self._folder):
            report = _text_in(folder, _REPORT)
            page = "" if _text_in(folder, _PAGE) is None else link(folder.name)
            state = "being written" if folder.name in self._writing else "missing"
            state = state if report is None else "written"
            found.append(Fault(str(folder), report, state, page))
        return found

    def page_of(self, name: str) -> str | None:
        """The report of this name as a page; None where there is none."""
        folders = () if self._folder is None else _own_bundles(self._folder)
        folder = next((folder for folder in folders if folder.name == name), None)
        return None if folder is None else _text_in(folder, _PAGE)

    def _free_name(self, base: Path, name: str) -> Path:
        number, folder = 1, base / name
        while os.path.lexists(folder):
            number += 1
            folder = base / f"{name}-{number}"
        return folder

    def _write_report(self, folder: Path) -> None:
        """Each form of it has its name once it is whole."""
        command = ["nice", "-n", "19", *package.module_command(package.NAME)]
        with _open_folder(folder) as inside:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(_PART, flags, 0o600, dir_fd=inside)
            page = f"/proc/self/fd/{inside}/{_PAGE_PART}"
            try:
                subprocess.run(
                    [*command, "doctor", str(folder), "--markdown", "--html", page],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(inside,),  # no name of a folder can lead elsewhere meanwhile
                    timeout=_REPORT_SECONDS,
                    check=False,  # it exits with 3 for a fault
                )
                with contextlib.suppress(FileNotFoundError):  # the page could not be made
                    os.rename(_PAGE_PART, _PAGE, src_dir_fd=inside, dst_dir_fd=inside)
                os.rename(_PART, _REPORT, src_dir_fd=inside, dst_dir_fd=inside)
            finally:
                os.close(file)

    def _remove_oldest(self, base: Path) -> None:
        for folder in _own_bundles(base)[MAX_BUNDLES:]:
            shutil.rmtree(folder, ignore_errors=True)


def _own_bundles(base: Path) -> list[Path]:
    """Folders of ours below `base`, the newest first; no links."""
    found = []
    for path in sorted(base.glob(f"{_PREFIX}*"), reverse=True):  # a name begins with its time
        with contextlib.suppress(OSError):  # somebody else removes it
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                found.append(path)
    return found


def _text_in(folder: Path, name: str) -> str | None:
    """The text of a report in a folder of ours; None for none, or for a link in its place."""
    try:
        with _open_folder(folder) as inside:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(name, flags, dir_fd=inside), "rb") as file:
                return file.read(_MAX_REPORT_BYTES).decode(errors="replace")
    except OSError:
        return None


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """A descriptor of a folder of ours, which is no link. Raises OSError for another one."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    opened = os.open(folder, flags)
    try:
        if os.fstat(opened).st_uid != os.getuid():
            raise PermissionError(1, "belongs to another user", str(folder))
        yield opened
    finally:
        os.close(opened)
