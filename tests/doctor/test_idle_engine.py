"""An engine that goes round and runs nothing: the statement at which its thread stood."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded.bundles import BLOCK, REQUEST, Run, decoder, inputs, tensors_of_decoder

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.doctor import diagnose
from hypocenter.engine import scheduler
from hypocenter.record.bundle import Bundle
from hypocenter.record.engine_events import Answered, BlocksNamed, Entered
from hypocenter.record.events import Place, Reached
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.raised import statement_at

FILE = scheduler.__file__
LINE = 1 + next(
    at
    for at, text in enumerate(Path(FILE).read_text().splitlines())
    if "if not self.running:" in text
)


def hung(
    *frames: tuple[str, int, str],
    answers: bool = False,
    also: Callable[[Run], None] = lambda run: None,
) -> Bundle:
    """A run that ran request 7, has let in request 8, and was ended; where its thread stood."""
    run = Run()
    tensors_of_decoder(run, k_cache={"owner": "kv_cache"})
    plan = decoder(run)
    for number in (7, 8):
        run.emit(Entered, request=number, num_prompt_tokens=2, settings=(), seed=0)
    run.run(plan, inputs(), (REQUEST,))
    for number in (7, 8) if answers else (7,):
        run.emit(Answered, request=number, num_tokens=3, digest="k:1")
    also(run)
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    stack = "\n".join(["Fatal Python error: Aborted", "", "Current thread 0x7f00:", *lines, ""])
    fault = FaultRecord(kind="hang", message="no step had begun", stack=stack, waiting=("x",))
    last = Place(1, plan, len(run.plans[plan - 1].launches) - 1)
    return run.bundle(fault, progress=Reached(last, last))


STEPPING = (
    (FILE, LINE + 20, "_may_enter"),
    (FILE, LINE, "schedule"),
    (FILE.replace("scheduler", "engine"), 136, "_step"),
    ("/home/me/program.py", 3, "<module>"),
)


def test_the_statement_at_which_it_goes_round_is_named() -> None:
    root = diagnose(hung(*STEPPING), without=("replay",)).roots[0]
    assert root.cause is Cause.ENDLESS_LOOP
    assert (root.file, root.line) == (FILE, LINE)
    assert root.expression == statement_at(FILE, LINE) == "if not self.running:"
    assert "1 request that had entered (1 of which never ran) wait" in root.sentence
    assert root.proof.green == "1 step before had such a token, and ended"


ENGINE = FILE.replace("scheduler", "turns")
TURN = 1 + next(
    at for at, text in enumerate(Path(ENGINE).read_text().splitlines()) if text.strip() == "work()"
)
BETWEEN = (
    (FILE.replace("engine/scheduler", "record/recorder"), 103, "recording_defects"),
    ("/usr/lib/python3.11/contextlib.py", 137, "__enter__"),
    (ENGINE, TURN, "_take_turn"),
    (ENGINE, 1, "complete"),
)


def test_a_thread_between_two_steps_goes_round_too() -> None:
    root = diagnose(hung(*BETWEEN), without=("replay",)).roots[0]
    assert (root.cause, root.file, root.line) == (Cause.ENDLESS_LOOP, None, None)
    assert "about to make the next step" in root.sentence
    waits = (("/usr/lib/python3.11/threading.py", 327, "wait"), *BETWEEN)
    assert not diagnose(hung(*waits), without=("replay",)).roots


def line_of(text: str, file: str = ENGINE) -> int:
    lines = Path(file).read_text().splitlines()
    return 1 + next(at for at, line in enumerate(lines) if line.strip().startswith(text))


def test_wherever_it_stands_between_two_steps() -> None:
    """A sample of the stack may fall on any line of the way."""
    turn, asked = BETWEEN[2], line_of("return os.getpid() == self._process")
    for within in (
        ((ENGINE, asked, "is_of_this_process"), (ENGINE, asked + 6, "require_own_process"), turn),
        ((ENGINE, line_of("self._num_turns += 1"), "_end_turn"), turn),
        ((ENGINE, 1, "<genexpr>"),),
        (),
    ):
        root = diagnose(hung(*within, BETWEEN[3]), without=("replay",)).roots[0]
        assert (root.cause, root.file, root.line) == (Cause.ENDLESS_LOOP, None, None)
    for waits in ("with self._turn_ended", "self._turn_ended.wait_for"):
        of_another = ((ENGINE, line_of(waits), "_take_turn"), BETWEEN[3])
        assert not diagnose(hung(*of_another), without=("replay",)).roots


DISK, ROOM = (FILE.replace("scheduler", name) for name in ("disk_blocks", "disk_room"))
HEAD = "/usr/lib/python3.11/contextlib.py", 137, "__enter__"


@pytest.mark.parametrize(
    "waits",
    [
        ((DISK, line_of("with self._lock:", DISK), "take"),),
        ((ROOM, line_of("fcntl.flock(file, fcntl.LOCK_EX)", ROOM), "_lock"), HEAD),
        (HEAD, (ROOM, line_of("with self._lock() as file", ROOM), "reserve")),
    ],
    ids=["a lock", "a file's lock", "a context"],
)
def test_a_step_that_waits_for_a_lock_does_not_go_round(waits: Any) -> None:
    """That of a thread, or of another process that holds the folder of blocks."""
    step = (FILE.replace("scheduler", "engine"), 136, "_step")
    found = diagnose(hung(*waits, step, BETWEEN[2], BETWEEN[3]), without=("replay",))
    assert not found.roots


def test_a_drive_that_waits_for_its_turn_does_not_go_round() -> None:
    waits = (ENGINE, line_of("self._lock.acquire()"), "_turn"), HEAD
    assert not diagnose(hung(*waits, BETWEEN[3]), without=("replay",)).roots


def test_a_prompt_of_which_all_tokens_were_found_is_told() -> None:
    def sentence(request: int, *, num_tokens: int) -> str:
        def name(run: Run) -> None:
            run.emit(Entered, request=9, num_prompt_tokens=num_tokens, settings=(), seed=0)
            run.emit(BlocksNamed, request=request, blocks=(4, 5), prefixes=b"")

        return diagnose(hung(*BETWEEN, also=name), without=("replay",)).roots[0].sentence

    found = f"all {2 * BLOCK} tokens of request 9 were found in 2 kept blocks"
    assert found in sentence(9, num_tokens=2 * BLOCK)
    assert "were found" not in sentence(9, num_tokens=2 * BLOCK + 1)
    assert "were found" not in sentence(7, num_tokens=2 * BLOCK)  # it ran


def test_an_engine_without_requests_and_a_thread_that_waits_are_no_finding() -> None:
    assert not diagnose(hung(*STEPPING, answers=True), without=("replay",)).roots
    waits = (("/usr/lib/python3.11/threading.py", 327, "wait"), *STEPPING)
    assert not diagnose(hung(*waits), without=("replay",)).roots
    assert not diagnose(hung(STEPPING[0], STEPPING[3]), without=("replay",)).roots
    assert not diagnose(hung(), without=("replay",)).roots
