"""Kills the workers of a server under load, and compares each answer with an undisturbed one.

Every stream asks from a list of requests, greedy and seeded ones, whose answers the same server
gave before anything was killed. What a worker's death loses, repeats or changes shows in the text.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import random
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hypocenter import package
from hypocenter.errors import HypoError

_START_SECONDS = 300.0
_TIMEOUT = 600.0
_LOOK_SECONDS = 0.01
#: Distinct requests, and the texts that they begin with: a text of the bundled model's kind.
_NUM_QUESTIONS = 48
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
    options: tuple[str, ...] = ()


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


def run_kills(
    plan: KillPlan, report: Callable[[str, float], None] = lambda what, share: None
) -> KillFigures:
    """Kill as planned. Raises HypoError when the server cannot be started or ends."""
    admin_key, port = secrets.token_hex(8), _free_port()
    with _server(plan, port, admin_key) as process:
        target = _Target(port, admin_key, process)
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
            kills = list(_kill(plan, target, report))
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        return _figures(kills, streams, time.monotonic() - began)


class _Target:
    """The server under test."""

    def __init__(self, port: int, admin_key: str, process: subprocess.Popen[bytes]) -> None:
        self.port, self._process = port, process
        self._headers = {"Authorization": f"Bearer {admin_key}"}

    def get(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT)
        try:
            connection.request("GET", path, headers=self._headers)
            answer = connection.getresponse()
            return answer.status, msgspec.json.decode(answer.read())
        finally:
            connection.close()

    def wait_ready(self, other_than: int | None = None) -> int:
        """The worker's process, once one is ready that is not `other_than`."""
        stop = time.monotonic() + _START_SECONDS
        while time.monotonic() < stop:
            if self._process.poll() is not None:
                raise HypoError(f"the server ended with exit code {self._process.returncode}")
            with contextlib.suppress(OSError):
                if self.get("/ready")[0] == 200:
                    pid = self.get("/debug/requests")[1]["worker_pid"]
                    if pid not in (None, other_than):
                        return int(pid)
            time.sleep(_LOOK_SECONDS)
        raise HypoError(f"no worker was ready within {_START_SECONDS:.0f} seconds")

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of an answer; raises HypoError for one that does not end as it should."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT)
        try:
            connection.request("POST", "/v1/completions", msgspec.json.encode(body))
            answer = connection.getresponse()
            if answer.status != 200:
                raise HypoError(f"status {answer.status}: {answer.read(300)!r}")
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    event = msgspec.json.decode(line[6:])
                    if "error" in event:
                        raise HypoError(f"an error in the stream: {event['error']}")
                    yield event
            raise HypoError("the stream ended without its end")
        except (OSError, http.client.HTTPException) as error:
            raise HypoError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()


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


def _answers(target: _Target, questions: Sequence[dict[str, Any]], at_once: int) -> list[str]:
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
                answers[number] = "".join(map(_text, target.stream(questions[number])))
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
    target: _Target,
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
                texts.append(_text(event))
                stream.times.append(time.monotonic())
        except HypoError as error:
            stream.errors.append(str(error))
            continue
        stream.num_answers += 1
        stream.num_tokens += int(questions[number]["max_tokens"])
        if "".join(texts) != expected[number]:
            stream.changes.append(f"{''.join(texts)!r} instead of {expected[number]!r}"[:600])


def _text(event: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in event["choices"])


def _kill(
    plan: KillPlan, target: _Target, report: Callable[[str, float], None]
) -> Iterator[tuple[float, float]]:
    """When each worker was killed, and how long it took until another one was ready."""
    chosen = random.Random(plan.seed + 1)
    pid = target.wait_ready()
    for number in range(plan.num_kills):
        report("killing workers", number / plan.num_kills)
        time.sleep(chosen.uniform(0.0, plan.max_seconds))
        at = time.monotonic()
        os.kill(pid, plan.signal)
        pid = target.wait_ready(other_than=pid)
        yield at, time.monotonic() - at


def _figures(
    kills: Sequence[tuple[float, float]], streams: Sequence[_Stream], seconds: float
) -> KillFigures:
    pauses = sorted(
        after - before
        for stream in streams
        for before, after in zip(stream.times, stream.times[1:], strict=False)
        if any(before <= at < after for at, _ in kills)
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
    )


@contextlib.contextmanager
def _server(plan: KillPlan, port: int, admin_key: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*package.module_command(package.NAME), "serve", plan.model, "--port", str(port)]
    command += ["-np", str(plan.num_streams), "--admin-key", admin_key, "-q", *plan.options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
