"""The log of a server by itself: its lines, and what becomes of those that cannot be written."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from recorded.bundles import background

from hypocenter.base.errors import UsageError
from hypocenter.record import bundle as bundles
from hypocenter.server import faults
from hypocenter.server.operating.access import AccessLog, _as_text
from hypocenter.server.operating.log import (
    MAX_WAITING,
    JsonLines,
    LogSettings,
    TextLines,
    WorkerWords,
    logging_to,
    tell,
)
from hypocenter.server.operating.signals import Renewal
from hypocenter.settings.cache_folder import changeable_by_others

HEAD = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture
def record() -> Callable[[str], logging.LogRecord]:
    def make(message: str, **more: Any) -> logging.LogRecord:
        made = logging.LogRecord("hypocenter.server", logging.INFO, "", 1, message, None, None)
        made.__dict__.update(more)
        return made

    return make


FORGED = "a\n2026-11-27T14:03:07.911Z ERROR   forged\r\x1b[2J\u2028\x85b"


def test_nobody_forges_a_line(record: Callable[..., logging.LogRecord]) -> None:
    line = TextLines().format(record(FORGED))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    assert line.endswith(r"a\n2026-11-27T14:03:07.911Z ERROR   forged\r\x1b[2J\u2028\x85b")
    line = JsonLines().format(record(FORGED, event="e", data={"path": FORGED}))
    assert len(line.splitlines()) == 1
    assert line.isascii()
    assert (json.loads(line)["message"], json.loads(line)["path"]) == (FORGED, FORGED)


def test_each_line_of_a_traceback_has_time_level_and_a_bar(
    record: Callable[..., logging.LogRecord],
) -> None:
    try:
        raise ValueError("first\n2026-11-27T14:03:07.911Z INFO    forged")
    except ValueError:
        trace = sys.exc_info()
    lines = TextLines().format(record("failed", exc_info=trace)).splitlines()
    assert len(lines) >= 4
    assert re.fullmatch(f"{HEAD} INFO    failed", lines[0])
    assert all(re.match(f"{HEAD} INFO    [|] ", line) for line in lines[1:])
    told = json.loads(JsonLines().format(record("failed", exc_info=trace)))
    assert "ValueError: first" in told["traceback"]


def test_what_a_client_chose_is_one_word_of_a_request() -> None:
    data: dict[str, Any] = dict.fromkeys(("outcome", "ttft_seconds", "resumed", "key"))
    data |= {"peer": "10.0.0.7", "method": "GET", "path": "/a 200 \nx", "status": 404}
    line = _as_text(data | {"seconds": 0.1, "request_id": "r"})
    assert line == r"10.0.0.7 GET /a\x20200\x20\nx 404 seconds=0.1 id=r"


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def wait_for(holds: Callable[[], Any]) -> Any:
    stop = time.monotonic() + 20
    while not (found := holds()):
        assert time.monotonic() < stop
        time.sleep(0.01)
    return found


def test_levels_hold_and_libraries_say_only_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with logging_to(LogSettings(level="info", file=file)):
        for name in ("hypocenter.server", "hypocenter.access", "uvicorn.error"):
            for level in (logging.DEBUG, logging.INFO, logging.WARNING):
                logging.getLogger(name).log(level, "%s %s", name, logging.getLevelName(level))
    told = [line.split(maxsplit=2)[2] for line in _lines(file)]
    assert told == [
        "hypocenter.server INFO",
        "hypocenter.server WARNING",
        "hypocenter.access INFO",
        "hypocenter.access WARNING",
        "uvicorn.error WARNING",
    ]
    assert logging.getLogger("hypocenter").handlers == []


def test_a_disk_that_is_full_for_a_while_loses_lines_and_says_how_many(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.symlink_to("/dev/full")
    with logging_to(LogSettings(file=file)) as sink:
        for number in range(3):
            tell(logging.INFO, "e", f"line {number}")
        wait_for(lambda: sink.num_lost == 3)
        file.unlink()
        assert sink.open_anew()
        tell(logging.INFO, "e", "line 3")
    ends = [line.split(maxsplit=2)[2] for line in _lines(file)]
    assert ends == ["line 3", "3 lines of the log could not be written"]


def test_who_logs_waits_for_no_reader(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    with logging_to(LogSettings(file=pipe)) as sink:
        began = time.monotonic()
        for _ in range(MAX_WAITING + 500):  # 80 bytes each: the pipe holds 50 of them
            tell(logging.INFO, "e", "x" * 40)
        assert 0 < sink.num_lost <= 500
        assert time.monotonic() - began < 30
        os.close(reader)
    assert sink.num_lost >= MAX_WAITING


def test_words_of_a_worker_are_lines_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with logging_to(LogSettings(format="json", file=file)):
        words = WorkerWords(7)
        for piece in (b"first\nsec", b"ond\n\n\xff\n", b"no end"):
            words.take(piece)
        words.take(b"y" * 5000)
        words.end()
    told = [json.loads(line) for line in _lines(file)]
    assert {(one["event"], one["worker"]) for one in told} == {("worker_said", 7)}
    messages = [one["message"].removeprefix("worker 7: ") for one in told]
    assert messages == ["first", "second", "\ufffd", "no end" + "y" * 5000]


def test_what_cannot_be_read_again_stays_and_the_rest_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> tuple[str, ...]:
        raise UsageError("--api-key-file keys holds no key")

    kept: list[tuple[str, ...]] = []
    with logging_to(LogSettings(file=tmp_path / "log")) as sink:
        (tmp_path / "log").unlink()
        Renewal(sink, fail, kept.append).renew()
    [line] = _lines(tmp_path / "log")
    assert kept == []
    assert line.endswith(
        "ERROR   SIGHUP: read again: the log file; kept as it was: --api-key-file keys holds no key"
    )


# -- folders that others may change ---------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this user alone, where the server is started, with an empty cache."""
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    monkeypatch.chdir(home)
    return home


def test_the_default_folder_is_one_that_nobody_else_can_change(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = home / "cache"
    monkeypatch.setattr(faults, "private_folder", lambda name: (cached / name, ""))
    usual = home / "hypo-faults"
    assert faults.folder_of(None) == usual
    assert faults.folder_of("") is None
    home.chmod(0o777)
    assert faults.folder_of(None) == cached / "faults"
    home.chmod(0o1777)  # others may add to it, and not replace what is ours
    assert faults.folder_of(None) == usual
    usual.mkdir(mode=0o1777)
    usual.chmod(0o1777)
    assert faults.folder_of(None) == cached / "faults"
    usual.rmdir()
    (home / "elsewhere").mkdir()
    usual.symlink_to(home / "elsewhere")
    assert faults.folder_of(None) == cached / "faults"
    assert faults.folder_of(str(usual)) == home / "elsewhere"  # somebody has named it
    usual.unlink()
    usual.write_text("")
    assert faults.folder_of(None) == cached / "faults"


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes folders of others")
def test_a_folder_of_somebody_else_is_told_from_ours(home: Path) -> None:
    theirs = home / "theirs"
    theirs.mkdir(mode=0o755)
    assert changeable_by_others(theirs) == changeable_by_others(theirs / "new") == ""
    os.chown(theirs, 12345, 12345)
    for folder in (theirs, theirs / "new"):
        assert changeable_by_others(folder) == f"{theirs} belongs to another user"


def test_a_bundle_is_not_written_behind_a_link_that_was_put_in_its_way(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write beside it may exchange the folder while it is written."""
    (home / "victim").mkdir()
    make = tempfile.mkdtemp

    def swapped(**words: Any) -> str:
        made = Path(make(**words))
        made.rmdir()
        made.symlink_to(home / "victim")
        return str(made)

    monkeypatch.setattr("hypocenter.record.bundle.tempfile.mkdtemp", swapped)
    with pytest.raises(OSError, match=r"."):
        bundles.save(background(), home / "new")
    assert list((home / "victim").iterdir()) == []
    assert not (home / "new").exists()


def test_a_report_is_not_written_through_a_link(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = faults.FaultKeeper(home, lambda: None)
    (home / "victim").write_text("precious")
    folder = home / "fault-1"
    folder.mkdir()
    command = "hypocenter.server.faults.package.module_command"
    monkeypatch.setattr(command, lambda name: ["echo"])
    (folder / ".report.md").symlink_to(home / "victim")
    with pytest.raises(FileExistsError):
        keeper._write_report(folder)
    (folder / ".report.md").unlink()
    (folder / "report.md").symlink_to(home / "victim")
    keeper._write_report(folder)  # it takes the place of the link
    assert (home / "victim").read_text() == "precious"
    said = (folder / "report.md").read_text()
    page = re.fullmatch(
        rf"doctor {folder} --markdown --html /proc/self/fd/\d+/\.report\.html\n", said
    )
    assert page, said
    (home / "fault-2").symlink_to(folder)
    with pytest.raises(OSError, match="Not a directory"):
        keeper._write_report(home / "fault-2")
    assert [Path(one.bundle).name for one in keeper.list_all(str)] == ["fault-1"]


def test_the_scope_of_a_request_keeps_nothing_of_it() -> None:
    """A connection that stays open keeps the scope of its last request: hundreds of them idle."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["inquiry"] = None
        scope["state"]["body"] = bytes(1000)

    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "state": {}}
    asyncio.run(AccessLog(answer)(scope, cast(Any, None), cast(Any, None)))
    assert scope["state"] == {}
