"""Kills the workers of a server under load, and compares each answer with an undisturbed one.

Every stream asks from a list of requests, greedy and seeded ones, whose answers the same server
gave before anything was killed. What a worker's death loses, repeats or changes shows in the text.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hypocenter.base.errors import HypoError
from hypocenter.base.package import NAME, module_command
from hypocenter.server.target import Target, ending, free_port, text_of

#: Distinct requests, and the texts that they begin with: a text of the bundled model's kind.
_NUM_QUESTIONS = 48
#: How often what streams got is looked at.
_LOOK_SECONDS = 0.005
#: How long a stream may get nothing from a worker that is ready.
_MOVE_SECONDS = 120.0
#: Room for all streams, and some to spare; and how long a step may take.
KV_TOKENS, STEP_SECONDS = 1 << 15, 120.0
_MAX_SAID_BYTES = 1 << 12
_BEGINNINGS = ("import ", "def read(", "class Node:\n", "for line in ", "try:\n    ", "with open(")


@dataclass(frozen=True, kw_only=True)
class KillPlan:
    """How many workers are killed, by which signal, under how many streams of how many tokens."""

    model: str
    num_kills: int = 20
    num_streams: int = 32
    num_tokens: int = 200
    signal: int = signal.SIGKILL
    seed: int = 0
    #: The longest time between a worker that is ready and its death.
    max_seconds: float = 1.5
    device: str = "cpu"


class RestartFigures(msgspec.Struct, frozen=True):
    """A kill: seconds until another worker was ready, and the pauses of streams around it."""

    restart_seconds: float
    num_pauses: int
    median_pause_seconds: float
    max_pause_seconds: float


class KillFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What clients saw. Pauses are of the streams that were open at a kill, in seconds."""

    num_kills: int
    num_streams: int
    num_answers: int
    num_tokens: int
    num_errors: int
    num_changed: int
    first_problem: str
    num_pauses: int
    median_pause_seconds: float
    p99_pause_seconds: float
    max_pause_seconds: float
    restart_seconds: float
    seconds: float
    restarts: tuple[RestartFigures, ...] = ()

    @property
    def is_clean(self) -> bool:
        return not self.num_errors and not self.num_changed


@dataclass(slots=True)
class _Stream:
    """What one client has seen of all its answers; `times` are those of its pieces."""

    num_answers: int = 0
    num_tokens: int = 0
    times: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)


#: Says what is done, and the share of it that is behind.
Report = Callable[[str, float], None]
#: Has workers die one after the other: when each died, and how long until another was ready.
Deaths = Callable[[KillPlan, Target, Report], Iterator[tuple[float, float]]]
#: The command line of a server: of a plan, at a port, with the key of its debug routes.
ServerOf = Callable[[KillPlan, int, str], list[str]]


def run_kills(
    plan: KillPlan,
    report: Report = lambda what, share: None,
    *,
    server_of: ServerOf | None = None,
    deaths: Deaths | None = None,
) -> KillFigures:
    """Kill as planned, in the server that everybody has, unless another is given.

    Raises HypoError when the server cannot be started or ends.
    """
    admin_key, port = secrets.token_hex(8), free_port()
    with _running((server_of or _command)(plan, port, admin_key), admin_key) as process:
        target = Target(port, admin_key, process)
        target.wait_ready()
        questions = list(_questions(plan))
        expected = _answers(target, questions, plan.num_streams)
        streams = [_Stream() for _ in range(plan.num_streams)]
        numbers, is_over = itertools.count(), threading.Event()
        threads = [
            threading.Thread(
                target=_read_on, args=(target, stream, questions, expected, numbers, is_over)
            )
            for stream in streams
        ]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            dying = deaths(plan, target, report) if deaths else _kill(plan, target, streams, report)
            kills = list(dying)
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        return _figures(kills, streams, time.monotonic() - began)


def _questions(plan: KillPlan) -> Iterator[dict[str, Any]]:
    chosen = random.Random(plan.seed)
    for number in range(_NUM_QUESTIONS):
        yield {
            "prompt": f"# {chosen.randrange(10**6)}\n{_BEGINNINGS[number % len(_BEGINNINGS)]}",
            "max_tokens": plan.num_tokens - number % 7,
            "temperature": (0, 0.8, 1.2)[number % 3],
            "frequency_penalty": (0, 0, 0, 0.5)[number % 4],
            "seed": chosen.randrange(1 << 32),
            "ignore_eos": True,
            "stream": True,
        }


def _answers(target: Target, questions: Sequence[dict[str, Any]], at_once: int) -> list[str]:
    """What each is answered while nothing is killed, several at once."""
    answers = [""] * len(questions)
    numbers = iter(range(len(questions)))
    lock = threading.Lock()
    problems: list[HypoError] = []

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                answers[number] = "".join(map(text_of, target.stream(questions[number])))
            except HypoError as error:
                problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return answers


def _read_on(
    target: Target,
    stream: _Stream,
    questions: Sequence[dict[str, Any]],
    expected: Sequence[str],
    numbers: Iterator[int],
    is_over: threading.Event,
) -> None:
    """Ask one question after the other, and look at each answer whole."""
    while not is_over.is_set():
        number = next(numbers) % len(questions)
        texts = []
        try:
            for event in target.stream(questions[number]):
                texts.append(text_of(event))
                stream.times.append(time.monotonic())
        except HypoError as error:
            stream.errors.append(str(error))
            continue
        stream.num_answers += 1
        stream.num_tokens += int(questions[number]["max_tokens"])
        if "".join(texts) != expected[number]:
            stream.changes.append(f"{''.join(texts)!r} instead of {expected[number]!r}"[:600])


def _kill(
    plan: KillPlan,
    target: Target,
    streams: Sequence[_Stream],
    report: Report,
) -> Iterator[tuple[float, float]]:
    """When each worker was killed, and how long it took until another one was ready.

    It is killed once every stream has got something from it: a pause then holds one restart. Where
    the next one is to stand by, that is waited for: a death while it loads costs what it still has
    to load.
    """
    chosen = random.Random(plan.seed + 1)
    pid = target.wait_ready()
    for number in range(plan.num_kills):
        report("killing workers", number / plan.num_kills)
        target.wait_spare()
        _await_all(streams, time.monotonic())
        time.sleep(chosen.uniform(0.0, plan.max_seconds))
        at = time.monotonic()
        os.kill(pid, plan.signal)
        pid = target.wait_ready(other_than=pid)
        yield at, time.monotonic() - at


def _await_all(streams: Sequence[_Stream], since: float) -> None:
    """Wait until every stream has moved on. Raises HypoError when one does not."""
    while waiting := [stream for stream in streams if not stream.times or stream.times[-1] < since]:
        if time.monotonic() - since > _MOVE_SECONDS:
            raise HypoError(
                f"{len(waiting)} of {len(streams)} streams got nothing for {_MOVE_SECONDS:.0f} s, "
                "although a worker is ready"
            )
        time.sleep(_LOOK_SECONDS)


def _figures(
    kills: Sequence[tuple[float, float]], streams: Sequence[_Stream], seconds: float
) -> KillFigures:
    of_kills = [_pauses_at(at, streams) for at, _ in kills]
    # One that holds several kills is one pause.
    pauses = sorted(
        after - before for before, after in {pause for some in of_kills for pause in some}
    )
    problems = [text for stream in streams for text in (*stream.errors, *stream.changes)]
    restarts = sorted(took for _, took in kills)
    return KillFigures(
        num_kills=len(kills),
        num_streams=len(streams),
        num_answers=sum(stream.num_answers for stream in streams),
        num_tokens=sum(stream.num_tokens for stream in streams),
        num_errors=sum(len(stream.errors) for stream in streams),
        num_changed=sum(len(stream.changes) for stream in streams),
        first_problem=problems[0] if problems else "",
        num_pauses=len(pauses),
        median_pause_seconds=pauses[len(pauses) // 2] if pauses else 0.0,
        p99_pause_seconds=pauses[int(0.99 * (len(pauses) - 1))] if pauses else 0.0,
        max_pause_seconds=pauses[-1] if pauses else 0.0,
        restart_seconds=restarts[len(restarts) // 2] if restarts else 0.0,
        seconds=seconds,
        restarts=tuple(
            _restart(took, sorted(after - before for before, after in some))
            for (_, took), some in zip(kills, of_kills, strict=True)
        ),
    )


def _pauses_at(at: float, streams: Sequence[_Stream]) -> list[tuple[float, float]]:
    """From which piece to which each stream waited that was open then."""
    found = []
    for stream in streams:
        following = bisect_right(stream.times, at)
        if 0 < following < len(stream.times):
            found.append((stream.times[following - 1], stream.times[following]))
    return found


def _restart(took: float, pauses: Sequence[float]) -> RestartFigures:
    if not pauses:
        return RestartFigures(took, 0, 0.0, 0.0)
    return RestartFigures(took, len(pauses), pauses[len(pauses) // 2], pauses[-1])


def _command(plan: KillPlan, port: int, admin_key: str) -> list[str]:
    """`hypo serve`; its key comes by the environment."""
    options = {
        "--port": port,
        "--device": plan.device,
        "--parallel": plan.num_streams,
        "--kv-tokens": KV_TOKENS,
        "--deadline": STEP_SECONDS,
        "--bundles": "",
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [*module_command(NAME), "serve", plan.model, *words]


@contextlib.contextmanager
def _running(command: list[str], admin_key: str) -> Iterator[subprocess.Popen[bytes]]:
    """The server until the end; where it ended by itself, HypoError has the last line it said."""
    environment = {**os.environ, "HYPO_ADMIN_KEY": admin_key}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stderr=said, env=environment)
        with ending(process):
            try:
                yield process
            except HypoError as error:
                if process.poll() is None:
                    raise
                said.seek(max(0, said.seek(0, os.SEEK_END) - _MAX_SAID_BYTES))
                lines = said.read().decode(errors="replace").strip().splitlines()
                raise HypoError(": ".join([str(error), *lines[-1:]])) from error
