"""Plants defects of the lab into the workers of a server, and looks at what clients get.

The first worker is healthy and is killed within its answers. The next one has the defect, and goes
on with these answers until that shows. Those behind it are healthy. Each answer is compared with
that of a server whose workers all are.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from faults.lab import CONFIG, Lab
from faults.model import model_path
from faults.serving.planted_server import ServerOrder, command
from faults.serving.planted_worker import Plant
from faults.victim import Victim
from faults.victim_run import HANG_SECONDS, STEP_SECONDS
from hypocenter.base.errors import HypoError
from hypocenter.server.target import Target, ending, free_port, text_of
from hypocenter.settings.config import EngineConfig

#: Symptoms that a server can see; the others are wrong numbers that look like right ones.
SEEN = ("crash", "error", "hang", "nonfinite")
_NUM_TOKENS = 8
#: Workers with the defect, one after the other. What two of them find of a request is held to be
#: the model's where it is no number, and the request's where each dies with it alone.
_NUM_PLANTED = {"crash": 2, "error": 2}
_WAIT_SECONDS = 240.0


class PlantedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What clients saw of one defect. `num_faults`: workers that ended by themselves."""

    victim: str
    symptom: str
    num_answers: int
    num_faults: int
    num_errors: int
    num_changed: int
    first_problem: str
    seconds: float

    @property
    def is_seen(self) -> bool:
        """Whether the defect is of a kind that a server can notice."""
        return self.symptom in SEEN

    @property
    def is_clean(self) -> bool:
        """Whether clients got what a healthy server says; of silent defects nothing is asked."""
        return not self.is_seen or not (self.num_errors or self.num_changed)


@dataclass(slots=True)
class _Answer:
    text: str = ""
    error: str = ""
    begun: threading.Event = field(default_factory=threading.Event)


class PlantedServers:
    """Runs one victim after the other; what healthy servers say is asked once per device."""

    def __init__(self) -> None:
        self._expected: dict[tuple[str, str], list[str]] = {}

    def run(self, victim: Victim, device: str = "") -> PlantedFigures:
        """Serve with the defect in up to two workers. Raises HypoError when none can be started."""
        device, began = device or victim.device, time.monotonic()
        questions = _questions(victim, device)
        key = (device, repr(questions))
        if key not in self._expected:
            with _serve_planted(device, Plant(folder="", num_planted=0)) as target:
                self._expected[key] = _texts(_ask(target, questions))
        num_planted = _NUM_PLANTED.get(victim.symptom, 1)
        plant = Plant(folder="", num_healthy=1, num_planted=num_planted, victim=victim.name)
        seconds = HANG_SECONDS if victim.symptom == "hang" else STEP_SECONDS
        with _serve_planted(device, plant, seconds) as target:
            answers = _ask(target, questions, is_killed=True)
            num_restarts = int(target.get("/debug/requests")[1]["restarts"])
        problems = [f"an error: {answer.error}" for answer in answers if answer.error]
        changed = [
            f"{answer.text!r} instead of {expected!r}"
            for answer, expected in zip(answers, self._expected[key], strict=True)
            if not answer.error and answer.text != expected
        ]
        return PlantedFigures(
            victim=victim.name,
            symptom=victim.symptom,
            num_answers=len(answers),
            num_faults=num_restarts - 1,
            num_errors=len(problems),
            num_changed=len(changed),
            first_problem=[*problems, *changed, ""][0],
            seconds=time.monotonic() - began,
        )


def _questions(victim: Victim, device: str) -> list[dict[str, Any]]:
    """The victim's own prompts, since some defects need them; greedy and seeded ones."""
    with Lab(device) as lab:
        victim.plant(lab)
        prompts = lab.prompts
        num_tokens = max(lab.num_tokens, _NUM_TOKENS)
    return [
        {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0.8 * (index % 2),
            "seed": index,
            "ignore_eos": True,
            "stream": True,
        }
        for index, prompt in enumerate([*prompts, *prompts])
    ]


@contextlib.contextmanager
def _serve_planted(
    device: str, plant: Plant, step_seconds: float = STEP_SECONDS
) -> Iterator[Target]:
    port, admin_key = free_port(), secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder:
        fields: dict[str, Any] = {**CONFIG, "device": device}
        order = ServerOrder(
            model=str(model_path()),
            engine=EngineConfig(**fields),
            port=port,
            admin_key=admin_key,
            plant=msgspec.json.encode(msgspec.structs.replace(plant, folder=folder)).decode(),
            step_seconds=step_seconds,
        )
        process = subprocess.Popen(command(order), stderr=subprocess.DEVNULL)
        with ending(process):
            target = Target(port, admin_key, process)
            target.wait_ready()
            yield target


def _ask(
    target: Target, questions: Sequence[dict[str, Any]], *, is_killed: bool = False
) -> list[_Answer]:
    """All at once; with `is_killed` the worker dies when each of them has begun."""
    answers = [_Answer() for _ in questions]

    def read(question: dict[str, Any], answer: _Answer) -> None:
        try:
            for event in target.stream(question):
                answer.text += text_of(event)
                answer.begun.set()
        except HypoError as error:
            answer.error = str(error)
        answer.begun.set()

    threads = [
        threading.Thread(target=read, args=pair) for pair in zip(questions, answers, strict=True)
    ]
    for thread in threads:
        thread.start()
    if is_killed:
        for answer in answers[: CONFIG["max_batch_requests"]]:
            answer.begun.wait(_WAIT_SECONDS)
        os.kill(target.wait_ready(), signal.SIGKILL)
    for thread in threads:
        thread.join()
    return answers


def _texts(answers: Sequence[_Answer]) -> list[str]:
    if failed := [answer.error for answer in answers if answer.error]:
        raise HypoError(f"a healthy server gave an error: {failed[0]}")
    return [answer.text for answer in answers]
