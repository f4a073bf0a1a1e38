"""Where the folder of a run lies, which earlier ones are kept, and who this process is.

A note in it says that somebody ended the process on purpose, so that it is no crash. faulthandler
writes that, in C and at once, so a process that is stuck ends as ever.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import shutil
import signal
import stat
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO

from hypocenter.record import ring
from hypocenter.record.run_records import ProcessRecord
from hypocenter.settings.cache_folder import make_private
from hypocenter.settings.environment import relevant_variables

#: Folders of runs that died, or that reported a fault, are kept up to this number.
MAX_DIED = 4
#: Folders of runs that ended well go after so many seconds, or when there are more of them.
MAX_CLEAN, CLEAN_SECONDS = 4, 600.0
#: What all folders of ended runs may take together; the oldest go first.
MAX_TOTAL_BYTES = 256 << 20

_PACKAGES = ("hypocenter", "numpy", "numba", "llvmlite", "msgspec", "torch", "triton")


#: Kernel modules of NVIDIA's and AMD's drivers.
_DRIVERS = ("nvidia", "amdgpu")
_MAX_VERSION_CHARS = 100

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_note: IO[bytes] | None = None
_watched: list[signal.Signals] = []


def claim_folder(base: Path) -> Path:
    """A name below `base` for this process, after old folders there were removed.

    Raises OSError when `base` cannot be made, or is not private to this user.
    """
    make_private(base)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{base} is no folder of this user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        if any(base.iterdir()):
            raise PermissionError(f"{base} is open to others; chmod 700 it")
        base.chmod(0o700)
    remove_old(base)
    name, number = f"{os.getpid()}-{start_ns()}", 1
    while (base / name).exists():
        number += 1
        name = f"{os.getpid()}-{start_ns()}-{number}"
    return base / name


def remove_old(base: Path) -> None:
    """Remove what is left of runs that nobody will ask about any more."""
    num_died, num_clean, num_bytes = 0, 0, 0
    for folder in ring.run_folders(base):
        if ring.is_alive(folder):
            continue
        heart = ring.read_heartbeat(folder)
        try:
            age = time.time() - (folder / "ring").stat().st_mtime
            num_bytes += sum(file.stat().st_size for file in folder.rglob("*"))
        except OSError:
            continue  # somebody else is about to remove it
        if heart is not None and heart.is_clean:
            num_clean += 1
            is_old = num_clean > MAX_CLEAN or age > CLEAN_SECONDS
        else:
            num_died += 1
            is_old = num_died > MAX_DIED
        if is_old or num_bytes > MAX_TOTAL_BYTES:
            shutil.rmtree(folder, ignore_errors=True)


def start_ns() -> int:
    """When this process began, in ns since the machine did; it tells a reused pid apart."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) * (10**9 // os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.monotonic_ns()


def loaded_drivers(root: Path = Path("/")) -> str:
    """Versions of the GPU drivers that the kernel has loaded; empty without one.

    `root` is where /sys is looked for. A driver of Linux's own has the kernel's version.
    """
    found = []
    for module in _DRIVERS:
        folder = root / "sys/module" / module
        if folder.is_dir():
            version = "of the kernel"
            with contextlib.suppress(OSError):
                version = (folder / "version").read_text(errors="replace").strip()
            found.append(f"{module} {version[:_MAX_VERSION_CHARS]}")
    return ", ".join(found)


def process_record() -> ProcessRecord:
    """This process, and the packages that it may use."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ProcessRecord(
        pid=os.getpid(),
        command=tuple(sys.orig_argv),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        platform=platform.platform(),
        driver=loaded_drivers(),
        environment=relevant_variables(),
        packages=packages,
    )


def note_signals(folder: Path) -> None:
    """From now on SIGTERM and SIGHUP leave a note, unless the program handles them itself.

    Raises OSError when there can be no file for it.
    """
    global _note
    stop_noting()
    _note = open(folder / ring.BY_HAND, "wb", buffering=0)  # noqa: SIM115 - until `forget`
    for number in _SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:
            faulthandler.register(number, file=_note, all_threads=False, chain=True)
            _watched.append(number)


def stop_noting() -> None:
    """The run is over, or this is the child of a fork."""
    global _note
    while _watched:
        with contextlib.suppress(OSError, ValueError):
            faulthandler.unregister(_watched.pop())
    if _note is not None:
        _note.close()
    _note = None
