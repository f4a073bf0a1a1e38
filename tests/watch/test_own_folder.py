"""Folders among temporary files: what a killed process left goes, and nobody else's does."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from hypocenter.base.own_folder import own_folder

PREFIX = "hypo-check-"


def left_by_a_killed_process(base: Path, prefix: str, *, is_old: bool = True) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    (folder / "lock").touch()
    if is_old:
        os.utime(folder, (0, 0))
    return folder


def test_what_a_person_named_alike_stays(tmp_path: Path) -> None:
    """An old folder of results must not go because its name begins as ours do."""
    results = tmp_path / f"{PREFIX}results-of-mine"
    results.mkdir(mode=0o700)
    short = tmp_path / f"{PREFIX}12345678"
    short.mkdir(mode=0o755)
    for folder in (results, short):
        (folder / "figures.json").write_text("{}")
        os.utime(folder, (0, 0))
    link = tmp_path / f"{PREFIX}abcdefgh"
    link.symlink_to(results)
    left = [left_by_a_killed_process(tmp_path, prefix) for prefix in (PREFIX, f".{PREFIX}")]
    with own_folder(PREFIX, tmp_path) as folder:
        assert set(tmp_path.iterdir()) == {results, short, link, folder}
        assert not any(path.exists() for path in left)
    assert (results / "figures.json").exists()
    assert (short / "figures.json").exists()


def test_one_that_is_being_made_is_no_leftover_before_it_is_locked(tmp_path: Path) -> None:
    being_made = left_by_a_killed_process(tmp_path, f".{PREFIX}", is_old=False)
    with own_folder(PREFIX, tmp_path):
        assert being_made.is_dir()
    os.utime(being_made, (0, 0))
    with own_folder(PREFIX, tmp_path):
        assert not being_made.exists()


def test_the_lock_is_one_that_a_network_file_system_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS locks for oneself alone only what is open to be written (flock(2))."""
    flock = fcntl.flock

    def as_over_nfs(file: int, operation: int) -> None:
        way = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        if operation & fcntl.LOCK_EX and way == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", as_over_nfs)
    with own_folder(PREFIX, tmp_path) as folder, own_folder(PREFIX, tmp_path):
        assert folder.is_dir()


def test_a_forked_child_that_ends_leaves_the_folder_of_its_parent(tmp_path: Path) -> None:
    parent = os.getpid()
    child = 0
    try:
        with own_folder(PREFIX, tmp_path) as folder:
            child = os.fork()
            if child == 0:
                raise KeyboardInterrupt
            os.waitpid(child, 0)
            assert folder.is_dir()
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert list(tmp_path.iterdir()) == []


def test_without_locks_nobody_takes_it_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlockable(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unlockable)
    with own_folder(PREFIX, tmp_path) as folder:
        os.utime(folder, (0, 0))
        monkeypatch.undo()
        with own_folder(PREFIX, tmp_path):
            assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []
