"""An examination ends in its time, and tells what it knows and what it left out."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded.bundles import Run

from hypocenter.base.errors import UsageError
from hypocenter.doctor import doctor
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Diagnosis, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.examining.time_limit import OutOfTime, TimeLimit, make_within
from hypocenter.doctor.rungs import replays as replaying

SECONDS = 0.5
#: Far less than what the rungs below would take, and far more than a busy machine needs.
MOST = 20.0


def known(case: Case) -> list[Claim]:
    return [row(Cause.WRONG_ANSWER, Verdict.INCONCLUSIVE, "known", "seen before")]


def sleeping(case: Case) -> list[Claim]:
    time.sleep(10 * MOST)
    return []


def deaf(case: Case) -> list[Claim]:
    """Goes on whatever fails in it."""
    while True:
        try:
            time.sleep(0.01)
            raise ValueError
        except Exception:
            continue


def diagnosed(monkeypatch: pytest.MonkeyPatch, **rungs: Any) -> Diagnosis:
    monkeypatch.setattr(doctor, "LADDER", rungs)
    return doctor.diagnose(Run().bundle(), seconds=SECONDS)


@pytest.mark.parametrize("endless", [sleeping, deaf])
def test_a_check_without_end_is_stopped_and_named(
    monkeypatch: pytest.MonkeyPatch, endless: Any
) -> None:
    begun, before = time.monotonic(), signal.getsignal(signal.SIGALRM)
    found = diagnosed(monkeypatch, known=known, endless=endless, last=known)
    assert time.monotonic() - begun < MOST
    assert [h.evidence for h in found.hypotheses if h.diagnostic == "known"] == [("seen before",)]
    [gap] = [gap for gap in found.unseen if "checks" in gap.what]
    assert gap.what == "what these checks look for: endless, last"
    assert f"after {SECONDS:g} seconds" in gap.reason
    assert "--examine-for" in gap.reason
    assert [rung.left_out != "" for rung in found.rungs] == [False, True, True]
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_a_bundle_that_takes_too_long_to_read_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = time.monotonic()
    monkeypatch.setattr(doctor, "Case", lambda *given, **more: sleeping(given[0]))
    with pytest.raises(UsageError, match=r"not read within 0\.5 seconds; --examine-for"):
        doctor.diagnose(Run().bundle(), seconds=SECONDS)
    assert time.monotonic() - begun < MOST


def test_causes_that_take_too_long_to_compare_are_told_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def proofs(case: Case) -> list[Claim]:
        return [
            proven(
                RootCause(cause=c, sentence=str(c), fix="", proof=Proof("", "", "")), "x", (), "", n
            )
            for n, c in ((7, Cause.MISSING_MASK), (3, Cause.INDEX_RANGE), (1, Cause.EMPTY_LAUNCH))
        ]

    begun = time.monotonic()
    monkeypatch.setattr(doctor, "JUDGE_SECONDS", SECONDS)
    monkeypatch.setattr(doctor, "judge", lambda case, rungs: sleeping(case))
    found = diagnosed(monkeypatch, proofs=proofs)
    assert time.monotonic() - begun < MOST
    # Nothing was to be seen of the run, which an empty launch would have ended.
    causes = [Cause.INDEX_RANGE, Cause.MISSING_MASK, Cause.EMPTY_LAUNCH]
    assert [root.cause for root in found.roots] == causes
    assert any("follow from others" in gap.what for gap in found.unseen)


def test_a_call_that_python_cannot_stop_is_told_with_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one of native code: the signal is heard when it has ended."""

    def native(case: Case) -> list[Claim]:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        try:
            time.sleep(SECONDS + 0.4)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        return []

    monkeypatch.setattr(doctor, "_NATIVE_SECONDS", 0.2)
    found = diagnosed(monkeypatch, native=native)
    [told] = [gap for gap in found.unseen if "native code" in gap.reason]
    assert told.what == "what the check 'native' looks for"
    assert "seconds after the time" in told.reason
    monkeypatch.setattr(doctor, "_NATIVE_SECONDS", 5.0)
    assert not [
        gap for gap in diagnosed(monkeypatch, native=native).unseen if "nativ" in gap.reason
    ]


def test_what_is_made_within_the_time_is_returned() -> None:
    assert make_within(MOST, lambda: 7) == 7
    assert make_within(SECONDS, lambda: sleeping(None)) is None  # type: ignore[arg-type]


def test_a_quick_one_is_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnosed(monkeypatch, known=known)
    assert not [gap for gap in found.unseen if "checks" in gap.what]


def test_outside_of_the_main_thread_no_signal_is_used() -> None:
    done: list[int] = []

    def examine() -> None:
        with TimeLimit(0.01).enforce():
            time.sleep(0.1)
            done.append(1)

    thread = threading.Thread(target=examine)
    thread.start()
    thread.join()
    assert done == [1]


def test_what_a_part_may_take_is_at_most_what_is_left() -> None:
    limit = TimeLimit(5.0)
    assert limit.until(1.0) < time.monotonic() + 1.1
    assert limit.until(100.0) == limit.ends
    assert TimeLimit(0.0).left == 0.0


def test_launches_before_the_one_that_took_too_long_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing is refuted by those that there was time for."""
    pytest.importorskip("triton")
    uses = [SimpleNamespace(launch=SimpleNamespace(source=name), seq=0) for name in "ab"]
    told = row(Cause.MISSING_MASK, Verdict.INCONCLUSIVE, "replay", "seen in a")

    def climb(rung: Any, use: Any) -> list[Claim]:
        if use is uses[1]:
            raise OutOfTime
        rung.clean += 1
        return [told]

    monkeypatch.setattr(replaying, "_suspects", lambda case: iter(uses))
    monkeypatch.setattr(replaying, "_climb", climb)
    case = Case(Run().bundle())
    claims = replaying.replays(case)
    assert claims[0] is told
    assert not [claim for claim in claims if claim.hypothesis.verdict is Verdict.REFUTED]
    assert any("no time to replay" in str(gap) for gap in case.unseen)


def test_what_is_run_on_a_gpu_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """A compiler that was started has the pipe in its hands, and would be waited for."""
    pytest.importorskip("triton")
    from hypocenter.replay import device_runs

    note, begun = tmp_path / "pid", time.monotonic()
    command = ["sh", "-c", f"sleep 300 & echo $! > {note}; wait"]
    said = device_runs.run_for(command, dict(os.environ), tmp_path, 1.0)
    assert said == "it was not done after 1 seconds"
    assert time.monotonic() - begun < MOST
    started = Path(f"/proc/{int(note.read_text())}/stat")
    stop = time.monotonic() + MOST
    while started.exists() and started.read_text().split()[2] != "Z" and time.monotonic() < stop:
        time.sleep(0.05)
    assert not started.exists() or started.read_text().split()[2] == "Z"


def test_a_program_that_waits_for_its_turn_ends_with_the_examination() -> None:
    """Programs of a replay that wait have threads of their own, which no signal reaches."""
    pytest.importorskip("triton")
    from hypocenter.replay.waiting import Abandoned, Turns

    numbers = iter([1])
    ended = threading.Event()

    def run(number: int) -> None:
        try:
            while not turns.is_over:  # as a replay looks between two steps of a program
                time.sleep(0.01)
            raise Abandoned
        finally:
            ended.set()

    turns = Turns(run, lambda: None, lambda kept: None, lambda: next(numbers, None), print)
    begun = time.monotonic()

    def wait_and_close() -> None:
        try:
            turns.wait(True)  # the first program waits, and the next one begins
        finally:
            turns.close()

    with pytest.raises(OutOfTime), TimeLimit(SECONDS).enforce():
        wait_and_close()
    assert ended.wait(MOST)
    assert time.monotonic() - begun < MOST


def test_threads_examine_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = 0, 0

    def rung(case: Case) -> list[Claim]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.05)
        inside -= 1
        return []

    monkeypatch.setattr(doctor, "LADDER", {"replay": rung})
    bundle = Run().bundle()
    threads = [threading.Thread(target=doctor.diagnose, args=(bundle,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
