"""Files: where others may write nothing of ours is written, and no link leads a command outside."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from outside.served import Served, serving, started
from outside.terminal import hypo_in_process

from attack.arena import BOSS, Row
from attack.process import tree

Note = Callable[[Row], None]

_HEADERS = {"Authorization": f"Bearer {BOSS}"}
_NUM_CACHES = 60
_END_SECONDS = 20.0


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[Path]:
    """One that everybody may write to, as a shared disk often is."""
    folder.mkdir()
    folder.chmod(0o777)
    yield folder


def _contents(folder: Path) -> dict[str, bytes | str]:
    """All that lies below: bytes of files, and where links lead."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def _let_a_worker_fault(served: Served) -> None:
    """Have one die of a fault, and wait for its bundle to be made, if one is."""
    served.kill_worker(signal.SIGSEGV)
    stop = time.monotonic() + _END_SECONDS
    while time.monotonic() < stop and not any("bundle" in line for line in served.stderr):
        time.sleep(0.1)
    time.sleep(5.0)  # the report is made behind it


@pytest.mark.parametrize(
    "plant", ["a link", "a folder of another", "a folder that is open", "none"]
)
def test_a_folder_that_others_may_write_to_gets_no_bundle(
    tmp_path: Path, note: Note, plant: str
) -> None:
    row = Row(f"serve in an open folder, hypo-faults is {plant}")
    outside = tmp_path / "outside"
    outside.mkdir()
    with _open_folder(tmp_path / "open") as here:
        faults = here / "hypo-faults"
        if plant == "a link":
            faults.symlink_to(outside)
        elif plant != "none":
            faults.mkdir()
            faults.chmod(0o777)
        if plant == "a folder of another":
            if os.getuid() != 0:
                pytest.skip("only root can give a folder to another user")
            os.chown(faults, 65534, 65534)
        before = _contents(tmp_path)
        _serve_and_fault(here, row)
        written = sorted(_contents(tmp_path).keys() - before.keys())
        if written:
            row.problems.append(f"{len(written)} files were written, such as {written[0]}")
    note(row)


def _serve_and_fault(here: Path, row: Row) -> None:
    """Serve there until a worker faulted; a refusal at start, in a line, is as good."""
    try:
        with started(here, "--admin-key", BOSS) as served:
            with contextlib.suppress(OSError, AssertionError):
                served.wait_ready(60)
            if served.process.poll() is None:
                _let_a_worker_fault(served)
            elif not any("hypo-faults" in line for line in served.stderr):
                row.problems.append(f"it ended: {served.stderr[-2:]}")
    except OSError as error:
        row.problems.append(f"{type(error).__name__}: {error}")


def test_what_is_left_of_a_fault_is_private_and_no_link_is_followed(
    tmp_path: Path, note: Note
) -> None:
    row = Row("bundles: modes, and links that are followed")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "report.md").write_text("SECRET OF ANOTHER")
    here = tmp_path / "here"
    here.mkdir(mode=0o700)
    faults = here / "hypo-faults"
    with serving(here, "--admin-key", BOSS) as served:
        _let_a_worker_fault(served)
        for path in faults.rglob("*"):
            if path.stat().st_mode & 0o077:
                mode = stat.S_IMODE(path.stat().st_mode)
                row.problems.append(f"{path.relative_to(here)} has mode {mode:o}")
        if not [*faults.glob("fault-*")]:
            row.problems.append("there is no bundle")
        (faults / "fault-20000101-000000").symlink_to(secret)
        planted = faults / "fault-20000101-000001"
        planted.mkdir()
        (planted / "report.md").symlink_to(secret / "report.md")
        if b"SECRET" in served.get("/debug/faults", headers=_HEADERS).body:
            row.problems.append("/debug/faults follows links")
    if not (secret / "report.md").exists():
        row.problems.append("a link was followed by what removes old bundles")
    note(row)


def _plant_cache(chosen: random.Random, hub: Path, outside: Path) -> None:
    """A cache of one model whose links, folders and names lead where they should not."""
    outside.mkdir(parents=True)
    for number in range(4):
        (outside / f"v{number}.gguf").write_bytes(b"GGUF" + bytes(16))
    folder = hub / "models--own--model"
    if chosen.random() < 0.15:
        real = outside / "repository"
        real.mkdir()
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(real)
    blobs, commit = folder / "blobs", "a" * 40
    snapshot = folder / "snapshots" / commit
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    if chosen.random() < 0.2:
        (folder / "snapshots").mkdir()
        elsewhere = outside / "snapshot"
        elsewhere.mkdir()
        snapshot.symlink_to(elsewhere)
    else:
        snapshot.mkdir(parents=True)
    if chosen.random() < 0.2:
        blobs.symlink_to(outside)
    else:
        blobs.mkdir()
    up = os.path.relpath(outside, snapshot)
    for number, name in enumerate(("m-Q4_K_M.gguf", "m-Q8_0.gguf", "sub/m-F16.gguf")):
        link = snapshot / name
        link.parent.mkdir(exist_ok=True)
        digest = f"{number:064x}"
        with contextlib.suppress(FileExistsError):
            (blobs / digest).write_bytes(b"GGUF" + bytes(8))
        own = os.path.relpath(blobs / digest, link.parent)
        leads = chosen.choice(
            (own, own, str(outside / f"v{number}.gguf"), f"{up}/v{number}.gguf",
             f"../../blobs/../../../../outside/v{number}.gguf", "/dev/null", str(outside))
        )  # fmt: skip
        link.symlink_to(leads)
    (blobs / ("b" * 64 + ".incomplete")).symlink_to(outside / "v3.gguf")


def test_removing_a_model_removes_nothing_outside_of_its_folder(
    tmp_path: Path, note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row(f"models remove, {_NUM_CACHES} caches with planted links")
    removed = 0
    for seed in range(_NUM_CACHES):
        chosen, here = random.Random(seed), tmp_path / str(seed)
        outside = here / "outside"
        _plant_cache(chosen, here / "hub", outside)
        kept = {name: text for name, text in _contents(outside).items() if name.startswith("v")}
        name = chosen.choice(("own/model", "own/model:Q4_K_M", "own/model:F16"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "hub"))
        done = hypo_in_process("models", "remove", name)
        removed += done.returncode == 0
        left = _contents(outside)
        if gone := [one for one in kept if left.get(one) != kept[one]]:
            row.problems.append(f"cache {seed}, {name}: {gone} of others are gone")
        if "a defect" in done.stderr or "Traceback" in done.stderr:
            row.problems.append(f"cache {seed}, {name}: {done.stderr[-200:]}")
        shutil.rmtree(here)
    row.seen = {"removed": removed}
    if removed < _NUM_CACHES // 4:
        row.problems.append(f"only {removed} were removed at all")
    note(row)


def _held_by(pid: int) -> set[Path]:
    """Files and folders of /dev/shm and of the temporary folder that a process tree uses."""
    found: set[Path] = set()
    for one in tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/maps").read_text().splitlines():
                if match := re.search(r"(/dev/shm/\S+)", line):
                    found.add(Path(match[1]))
            for link in Path(f"/proc/{one}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(link)
                    if target.startswith("/dev/shm/") and not target.endswith("(deleted)"):
                        found.add(Path(target))
    return found


def test_a_server_that_was_killed_leaves_nothing_behind_the_next_start(
    tmp_path: Path, note: Note
) -> None:
    """Its workers end, and the next start sweeps what it could not."""
    row = Row("kill -9 of the server, and the next start")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = {"TMPDIR": str(temporary)}
    with serving(tmp_path, environ=environ) as served:
        held = _held_by(served.process.pid)
        pids = set(tree(served.process.pid))
        served.process.kill()
        served.process.wait()
        stop = time.monotonic() + _END_SECONDS
        while alive := {pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists()}:
            if time.monotonic() > stop:
                row.problems.append(f"{len(alive)} processes live on")
                break
            time.sleep(0.1)
    after_kill = [path for path in held if path.exists()]
    row.seen = {
        "after the kill": len(after_kill) + len([*temporary.iterdir()]), "held before": len(held)
    }  # fmt: skip
    with serving(tmp_path, environ=environ):
        pass
    row.problems += [
        f"{path} stays" for path in (*after_kill, *temporary.iterdir()) if path.exists()
    ]
    note(row)
