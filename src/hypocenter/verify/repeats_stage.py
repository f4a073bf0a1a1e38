"""Stage four: the same launches again and again, under load and on each core or multiprocessor,
give the same bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device import copies
from hypocenter.device.cpu.threads import set_num_threads
from hypocenter.device.launch import compile_all, run
from hypocenter.engine.runner import Runner
from hypocenter.settings.config import is_simulated
from hypocenter.verify.drawing import Drawer, cases_of
from hypocenter.verify.form import Unit
from hypocenter.verify.kernel_stage import label
from hypocenter.verify.machine.load import busy_cores, on_core
from hypocenter.verify.machine.multiprocessors import Probe, has_multiprocessors
from hypocenter.verify.outcome import Mistake, PlantedError, Stage, Uncovered, verdict_of
from hypocenter.verify.steps import PromptSteps, prompt

NAME = "repeats"
ASKS = "do the same launches give the same bits, under load and wherever they run?"
_TOKENS, _MOST_REPEATS = 64, 64
#: Where a processor stands for a GPU.
_TOKENS_SIMULATED = 6
_PLANTED = "the last bit of one number of one repeat"


class RepeatsStage:
    """Repeats a step, and each form; what differs is named by place, and by core where one is to
    blame."""

    def __init__(self, runner: Runner, units: Sequence[Unit]) -> None:
        self._runner, self._device = runner, runner.config.device
        self._findings: list[Mistake] = []
        # Inputs of the others only make sense as another launch makes them, so they are not drawn.
        self._units = [unit for unit in units if unit.is_drawn]
        self._uncovered = [
            Uncovered(label(unit), "what it reads is made by other launches")
            for unit in units
            if not unit.is_drawn
        ]
        self._num_all = len(units)
        self._num_checks = self._num_planted = self._num_seen = 0

    def run(self, is_over: Callable[[], bool]) -> Stage:
        """Repeat until the time `is_over`."""
        started = time.perf_counter()
        num_forms = self._repeat_forms(is_over)
        where = self._everywhere(is_over)
        self._repeat_steps(is_over)
        canary = PlantedError(_PLANTED, self._num_planted, self._num_seen)
        return Stage(
            name=NAME,
            asks=ASKS,
            verdict=verdict_of(self._findings, canary, num_forms),
            things="forms",
            num_covered=num_forms,
            num_all=self._num_all,
            num_checks=self._num_checks,
            canary=canary,
            findings=tuple(self._findings),
            uncovered=tuple(self._uncovered),
            details=where,
            seconds=time.perf_counter() - started,
        )

    def _repeat_steps(self, is_over: Callable[[], bool]) -> None:
        """A prompt's step again and again while all cores work."""
        runner = self._runner
        if runner.num_state_slots or runner.arch.family.sees_all:
            self._uncovered.append(Uncovered("a whole step", "this model's steps need an engine"))
            return
        if is_over():
            self._uncovered.append(Uncovered("a whole step", "the time was over"))
            return
        most = _TOKENS_SIMULATED if is_simulated(self._device) else _TOKENS
        length = min(most, runner.context_length - 1, runner.max_batch_tokens)
        steps, ids = PromptSteps(runner, 1, length), prompt(runner.vocab_size, length, 11)
        first = steps.run([(ids, 0, length)])
        if is_over():
            self._uncovered.append(Uncovered("a whole step", "the time was over"))
            return
        with busy_cores():
            for number in range(_MOST_REPEATS):
                again = steps.run([(ids, 0, length)])
                self._hold(first, again, f"step of {length} tokens, repeat {number + 1}")
                if is_over():
                    break
        tensor = steps.launch([(ids, 0, length)])
        values = copies.to_host(tensor)
        values.view(np.uint32)[0, 0] ^= 1
        copies.to_device(tensor, values)
        self._count_planted(first, copies.to_host(tensor)[:, : steps.width])

    def _repeat_forms(self, is_over: Callable[[], bool]) -> int:
        """Each form twice more on what it was given first; how many were."""
        drawers, num_done = {name: Drawer(name) for name in (self._device, "cpu")}, 0
        for unit in self._units:
            if is_over():
                self._uncovered.append(Uncovered(label(unit), "the time was over"))
                continue
            compile_all(unit.launches)
            case, drawer = cases_of(unit)[0], drawers[unit.device]
            found = []
            for _ in range(3):
                drawer.draw(unit, case)  # what it writes may be what it reads
                run(unit.launches)
                found.append(drawer.read(unit))
            names = [arg.name for arg in unit.written if arg.name in found[0]]
            for number, again in enumerate(found[1:], 1):
                for name in names:
                    self._hold(found[0][name], again[name], f"{label(unit)}: {name}", number)
            planted = _with_bit_turned(found[0][names[0]])
            drawer.write(unit, names[0], planted)
            self._count_planted(found[0][names[0]], drawer.read(unit)[names[0]])
            num_done += 1
        return num_done

    def _everywhere(self, is_over: Callable[[], bool]) -> dict[str, object]:
        """The same work on each core or multiprocessor by itself."""
        if self._device == "cpu":
            return self._each_core(is_over)
        if has_multiprocessors(self._device):
            probe = Probe(self._device)
            details, findings, planted = probe.run(is_over)
            self._findings += findings
            self._num_checks += int(details["programs"])
            self._num_planted += 1
            self._num_seen += planted
            return details
        why = f"{self._device} does not say on which multiprocessor a program runs"
        self._uncovered.append(Uncovered("each multiprocessor", why))
        return {}

    def _each_core(self, is_over: Callable[[], bool]) -> dict[str, object]:
        """Forms on one thread, bound to one core after the other."""
        cores = cores_of_process()
        drawer, done = Drawer("cpu"), 0
        by_core: dict[int, int] = {}
        set_num_threads(1)
        try:
            for unit in self._units:
                if is_over():
                    break
                found = {}
                for core in cores:
                    with on_core(core):
                        drawer.draw(unit, cases_of(unit)[0])
                        run(unit.launches)
                        found[core] = drawer.read(unit)
                for name in (arg.name for arg in unit.written):
                    for core in _odd_ones({c: values[name] for c, values in found.items()}):
                        by_core[core] = by_core.get(core, 0) + 1
                        place = f"{label(unit)}: {name}"
                        others = len(cores) - 1
                        what = f"core {core} gives other bits than {others} other cores do"
                        self._findings.append(Mistake(what, place, {"core": core}))
                    self._num_checks += len(cores)
                done += 1
        finally:
            set_num_threads(self._runner.num_threads)
        if done < len(self._units):
            left = f"{done} of {len(self._units)} forms; the time was over"
            self._uncovered.append(Uncovered("each core by itself", left))
        return {"cores": cores, "forms_on_each_core": done}

    def _hold(self, first: Array, again: Array, where: str, repeat: int | None = None) -> None:
        self._num_checks += 1
        place = first_difference(first, again)
        if place is None:
            return
        details = {
            "place": list(place),
            "first": float(first[place]),
            "again": float(again[place]),
        }
        if repeat is not None:
            details["repeat"] = repeat
        what = f"[{', '.join(map(str, place))}] has other bits when it runs again"
        self._findings.append(Mistake(what, where, details))

    def _count_planted(self, first: Array, changed: Array) -> None:
        self._num_planted += 1
        self._num_seen += first_difference(first, changed) is not None


def cores_of_process() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def first_difference(item: Array, other: Array) -> tuple[int, ...] | None:
    """The first place at which two arrays have other bits."""
    differ = _bits(item) != _bits(other)
    if not differ.any():
        return None
    return tuple(int(i) for i in np.argwhere(differ)[0])


def _bits(values: Array) -> Array:
    wide = np.ascontiguousarray(values)
    return wide.view(f"u{wide.dtype.itemsize}")


def _with_bit_turned(values: Array) -> Array:
    changed = np.ascontiguousarray(values).copy()
    flat = _bits(changed).reshape(-1)
    flat[0] ^= 1
    return changed


def _odd_ones(found: dict[int, Array]) -> list[int]:
    """The cores whose bits are not those of most; all but the first where none has most."""
    kinds: dict[bytes, list[int]] = {}
    for core, values in found.items():
        kinds.setdefault(np.ascontiguousarray(values).tobytes(), []).append(core)
    most = max(kinds.values(), key=len)
    return [core for cores in kinds.values() if cores is not most for core in cores]
