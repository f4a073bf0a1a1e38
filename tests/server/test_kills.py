"""`hypo kill-serve`: when a worker is killed, and which pause holds which restart."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from hypocenter.base.errors import HypoError
from hypocenter.cli.verbs.kill_serve import table
from hypocenter.server import kills
from hypocenter.server.kills import _await_all, _figures, _Stream


def stream(*times: float) -> _Stream:
    return _Stream(times=list(times))


def test_each_pause_stands_beside_the_restart_that_it_holds() -> None:
    streams = [stream(1, 2, 5, 6, 9.5, 10), stream(1.5, 4, 6.5, 8), stream(7.5, 9)]
    figures = _figures([(3, 0.5), (7, 1.5)], streams, 10)
    assert figures.num_pauses == 4
    first, second = figures.restarts
    assert (first.restart_seconds, first.num_pauses, first.max_pause_seconds) == (0.5, 2, 3)
    # The third stream began later, so it was not open.
    assert (second.restart_seconds, second.num_pauses, second.max_pause_seconds) == (1.5, 2, 3.5)
    lines = table(figures, "SIGKILL").splitlines()
    assert lines[-2].split() == ["1", "0.50", "s", "2", "3.00", "s", "3.00", "s"]
    assert lines[-1].split() == ["2", "1.50", "s", "2", "3.50", "s", "3.50", "s"]


def test_a_pause_that_holds_two_kills_is_one() -> None:
    figures = _figures([(2, 0.1), (3, 0.1)], [stream(1, 4)], 5)
    assert (figures.num_pauses, figures.max_pause_seconds) == (1, 3)


def test_a_table_shows_the_longest_of_many_restarts() -> None:
    kills = [(float(number), 0.1) for number in range(60)]
    streams = [stream(*(number + 0.5 + (number % 7) / 100 for number in range(-1, 60)))]
    text = table(_figures(kills, streams, 60), "SIGKILL")
    assert "and 20 kills with shorter pauses; --json has all" in text


def test_a_worker_lives_until_every_stream_has_moved_on() -> None:
    streams = [stream(1.0), stream()]
    since = time.monotonic()
    done: list[bool] = []

    def move(one: _Stream) -> None:
        done.append(True)
        one.times.append(time.monotonic())

    for seconds, one in ((0.05, streams[0]), (0.15, streams[1])):
        threading.Timer(seconds, move, [one]).start()
    _await_all(streams, since)
    assert len(done) == 2


def test_a_stream_that_gets_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "_MOVE_SECONDS", 0.05)
    moved = stream(time.monotonic() + 100)
    with pytest.raises(HypoError, match="1 of 2 streams got nothing for 0 s"):
        _await_all([moved, stream()], time.monotonic())


@pytest.mark.parametrize(("code", "said"), [
    ("import sys; print('one', file=sys.stderr); sys.exit('no such model')", ": no such model"),
    ("import sys; sys.exit(3)", ""),
])  # fmt: skip
def test_a_server_that_ends_by_itself_is_quoted(code: str, said: str) -> None:
    def wait() -> None:
        with kills._running([sys.executable, "-c", code], "key") as process:
            process.wait()
            raise HypoError("the server ended")

    with pytest.raises(HypoError) as found:
        wait()
    assert str(found.value) == f"the server ended{said}"
