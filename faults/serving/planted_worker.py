"""The program of a worker with a defect, for a server under test.

`python -m faults.serving.planted_worker PLANT SOCKET MODEL`, where PLANT is a `Plant` as JSON. It
is the worker that everybody has, but for what is planted in its engine when it loads its model.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from faults.lab import Lab, alter
from faults.victim import victims
from hypocenter.engine.batch import Batch
from hypocenter.engine.llm import LLM
from hypocenter.engine.runner import Runner
from hypocenter.settings.config import EngineConfig
from hypocenter.worker import worker

#: Elements that a 32-bit offset still reaches: a kernel with such offsets goes there, too.
_FAR_ELEMENTS = (1 << 31) - 1

_MIN_STEPS = 20


class Plant(msgspec.Struct, frozen=True, kw_only=True):
    """Which workers of a server get which defect.

    `folder` is where they count themselves: `num_healthy` load a model first, then `num_planted`
    get the defect. `victim` names it. Without a name a step writes the cache of a slot that is far
    away, at a random moment within `max_seconds`; that begins when `folder` holds `armed`, and
    some steps have run: no request is to be blamed for what the worker does. With a `poison_id`
    it is: a step of a prompt in which that token stands ends the process.
    """

    folder: str
    num_healthy: int = 0
    num_planted: int = 1
    victim: str = ""
    max_seconds: float = 0.0
    poison_id: int | None = None


def main(words: Sequence[str]) -> int:
    """Serve as `worker.main` does; returns its exit code."""
    plant = msgspec.json.decode(words[0], type=Plant)
    vars(worker)["LLM"] = functools.partial(_load, plant)
    return worker.main(words[1:])


def _load(plant: Plant, path: str, config: EngineConfig, **named: Any) -> LLM:
    number = _number_of_this(Path(plant.folder))
    if not plant.num_healthy <= number < plant.num_healthy + plant.num_planted:
        return LLM(path, config, **named)
    lab = Lab(config.device)  # never closed: the defect stays as long as the process
    if not plant.victim:
        lab.disarm()
        lab.before_step(_write_far(plant) if plant.poison_id is None else _die_of(plant.poison_id))
        return LLM(path, config, **named)
    healthy = dict(lab.config)
    victims([plant.victim])[0].plant(lab)
    changed = {name: value for name, value in lab.config.items() if healthy.get(name) != value}
    llm = LLM(lab.model, EngineConfig(**(asdict(config) | changed)), **named)
    lab.run_hooks(llm)
    return llm


def _number_of_this(folder: Path) -> int:
    """How many have loaded a model before, of all processes that count in `folder`."""
    number = 0
    while True:
        try:
            os.close(os.open(folder / f"{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            number += 1
        else:
            return number


def _write_far(plant: Plant) -> Callable[[Runner, Batch], Batch]:
    """Has a step write its cache where none is: an access that no GPU and no processor allows."""
    armed, chosen = Path(plant.folder) / "armed", random.Random()
    moment: list[float] = []
    steps = itertools.count(1)

    def change(runner: Runner, batch: Batch) -> Batch:
        if not moment and next(steps) > _MIN_STEPS and armed.exists():
            moment.append(time.monotonic() + chosen.uniform(0.0, plant.max_seconds))
        if not moment or time.monotonic() < moment[0] or not len(batch.slots):
            return batch
        slot_elements = runner.arch.layers[0].kv_width
        far = _FAR_ELEMENTS if runner.config.device == "cpu" else _FAR_ELEMENTS // slot_elements
        return replace(batch, slots=alter(batch.slots, len(batch.slots) - 1, int(np.int32(far))))

    return change


def _die_of(token_id: int) -> Callable[[Runner, Batch], Batch]:
    """Has a step with that token end the process as a wild access does."""

    def change(runner: Runner, batch: Batch) -> Batch:
        if token_id in batch.token_ids:
            os.kill(os.getpid(), signal.SIGSEGV)
        return batch

    return change


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
