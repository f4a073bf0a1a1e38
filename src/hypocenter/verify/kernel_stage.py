"""Stage one: every form of a launch, on inputs drawn from its contract, against float64.

A form whose op has no reference here is told as not covered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device.helper_processes import always, never
from hypocenter.device.launch import compile_all, run
from hypocenter.device.plan import Plan
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.verify import (
    adapted,
    attending,
    expert_products,
    latents,
    mixtures,
    products,
    rowwise,
    states,
)
from hypocenter.verify.block_caches import is_of_blocks, with_error
from hypocenter.verify.drawing import Drawer, DrawnCase, cases_of
from hypocenter.verify.expected import Expected, Miss, OpInputs, compare
from hypocenter.verify.file_weights import NotInFile
from hypocenter.verify.form import Unit, distinct_units
from hypocenter.verify.outcome import Mistake, PlantedError, Stage, Uncovered, verdict_of

REFERENCES = {
    **rowwise.REFERENCES,
    **products.REFERENCES,
    **attending.REFERENCES,
    **mixtures.REFERENCES,
    **expert_products.REFERENCES,
    **latents.REFERENCES,
    **states.REFERENCES,
    **adapted.REFERENCES,
}
NAME = "kernels"
NOT_COMPILED = "kernels were not compiled in time; the next run has them sooner"
ASKS = "does each form of a launch compute what float64 does, on inputs drawn from its contract?"


@dataclass(slots=True, eq=False)
class _Progress:
    """A form, and how many of its cases have been looked at; `why_not`: no more can be."""

    unit: Unit
    cases: list[DrawnCase]
    num_done: int = 0
    why_not: str = ""

    def why(self) -> str:
        done = f"{self.num_done} of {len(self.cases)} cases; " if self.num_done else ""
        return done + (self.why_not or "the time was over")


class KernelStage:
    """Runs the units of a model and keeps what is found of each form."""

    def __init__(
        self, file: GGUFFile, device: str, plans: Sequence[Plan], *, compiles: bool = True
    ) -> None:
        """Unless it `compiles` what is missing, such forms are not looked at."""
        self._is_over_for_compiler: Callable[[], bool] = never if compiles else always
        self.units = distinct_units(plans)
        #: The host computes a part of some models.
        self._file, self._drawers = file, {name: Drawer(name) for name in (device, "cpu")}
        self._findings: list[Mistake] = []
        self._num_planted = 0
        self._unseen: list[str] = []
        self._worst = 0.0
        self._num_launches, self._launch_seconds = 0, 0.0

    @property
    def launch_seconds(self) -> float:
        """What a launch took on the average, until its result was read."""
        return self._launch_seconds / max(self._num_launches, 1)

    def run(self, is_over: Callable[[], bool]) -> Stage:
        """Look at the first case of every form, then at the second ones, until the time
        `is_over`."""
        started = time.perf_counter()
        waiting = [_Progress(unit, cases_of(unit)) for unit in self.units]
        every = tuple(waiting)
        while waiting and not is_over():
            item = waiting.pop(0)
            if not item.num_done and item.unit.op in REFERENCES:
                launches = item.unit.launches
                if not compile_all(launches, is_over=self._is_over_for_compiler):
                    item.why_not = NOT_COMPILED
                    continue
            if self._look(item) and item.num_done < len(item.cases):
                waiting.append(item)
        left = [item for item in every if item.why_not or (item in waiting)]
        canary = PlantedError(
            "one number off by twice its bound",
            self._num_planted,
            self._num_planted - len(self._unseen),
        )
        num_covered = sum(item.num_done > 0 for item in every)
        return Stage(
            name=NAME,
            asks=ASKS,
            verdict=verdict_of(self._findings, canary, num_covered),
            things="forms",
            num_covered=num_covered,
            num_all=len(self.units),
            num_checks=sum(item.num_done for item in every),
            canary=canary,
            findings=tuple(self._findings),
            uncovered=tuple(Uncovered(label(item.unit), item.why()) for item in left),
            details={
                "largest_share_of_a_bound": self._worst,
                "unseen": self._unseen,
                "num_cases": sum(len(item.cases) for item in every),
            },
            seconds=time.perf_counter() - started,
        )

    def _look(self, item: _Progress) -> bool:
        """Look at the next case of a form; whether there may be another."""
        if item.unit.op not in REFERENCES:
            item.why_not = f"{item.unit.op} has no reference here"
            return False
        try:
            found = self._check(item.unit, item.cases[item.num_done])
        except NotInFile as error:
            item.why_not = str(error)
            return False
        item.num_done += 1
        if found is not None:
            self._findings.append(found)
        return found is None

    def _check(self, unit: Unit, case: DrawnCase) -> Mistake | None:
        """Run one case; what is wrong about it."""
        drawer = self._drawers[unit.device]
        before = drawer.draw(unit, case)
        given = OpInputs(unit, before, case.live, self._file)
        expected = REFERENCES[unit.op](given) if case.live else []
        began = time.perf_counter()
        run(unit.launches)
        after = drawer.read(unit)
        self._launch_seconds += time.perf_counter() - began
        self._num_launches += len(unit.launches)
        if (kept := _changed_beyond(unit, case, before, after)) is not None:
            return Mistake(
                f"{kept} was written beyond the live rows", label(unit), {"case": case.name}
            )
        misses = [compare(item, unit, after) for item in expected]
        for miss in misses:
            if miss.share > 1:
                return _finding(unit, case, miss)
            self._worst = max(self._worst, miss.share)
        if expected:
            self._plant(unit, expected[0], after)
        return None

    def _plant(self, unit: Unit, expected: Expected, after: Mapping[str, Array]) -> None:
        """Put an error into what the device holds, and look again."""
        planted = planted_error(unit, expected, after)
        if planted is None:
            return
        name, values = planted
        self._drawers[unit.device].write(unit, name, values)
        self._num_planted += 1
        miss = compare(expected, unit, self._drawers[unit.device].read(unit))
        if miss.share <= 1:
            self._unseen.append(label(unit))


def planted_error(
    unit: Unit, expected: Expected, after: Mapping[str, Array]
) -> tuple[str, Array] | None:
    """A tensor that a unit wrote, and its values with one number off by a little more than twice
    its bound; of operands one code, by two steps, or one rounded number by four and its bound.

    None where what is right is zero alone.
    """
    kind = expected.as_operands
    if kind == "rounded":
        if not expected.exact.any():
            return None  # a row of zeros has no step
        values = after["rounded"].copy()
        at, column = (
            int(i)
            for i in np.unravel_index(int(np.abs(expected.exact).argmax()), expected.exact.shape)
        )
        values[int(expected.rows[at]), column] += 4 + int(_in_steps(expected, at, column))
        return "rounded", values
    if kind:
        name = "gated_codes" if kind == "gated" else "codes"
        values = after[name].copy()
        codes = values.view(np.int8).reshape(*values.shape[:-1], -1)
        code = codes[0, 0, 0, 0]
        codes[0, 0, 0, 0] = code - 2 if code > 0 else code + 2
        return name, values
    values = after[expected.name].copy()
    bounds = np.broadcast_to(expected.bound, expected.exact.shape)
    worst = int(np.where(np.isfinite(bounds), bounds, -1).argmax())
    index = tuple(int(i) for i in np.unravel_index(worst, expected.exact.shape))
    tensor = unit.arguments[expected.name]
    if is_of_blocks(tensor):
        finite = np.where(np.isfinite(bounds), np.abs(expected.exact), -1)
        largest = np.unravel_index(int(finite.argmax()), finite.shape)
        index = tuple(int(i) for i in largest)
        return expected.name, with_error(expected.name, values, tensor.dtype, index)
    bound, exact = float(bounds[index]), float(expected.exact[index])
    row, *others = index
    if expected.columns is not None:
        others[-1] = int(expected.columns[others[-1]])
    place = (int(expected.rows[row]), *others)
    wrong = exact + max(2.01 * bound, 2.0**-22 * abs(exact), 2.0**-100)
    if values.dtype == np.int32:
        values[place] = int(exact) + 1
    elif values.dtype == np.uint16:
        values[place] = np.float16(wrong).view(np.uint16)
    else:
        values[place] = wrong
    return expected.name, values


def _in_steps(expected: Expected, at: int, column: int) -> float:
    """A bound in steps of f16 at the number that it belongs to."""
    bound = np.broadcast_to(expected.bound, expected.exact.shape)[at, column]
    size = abs(float(expected.exact[at, column]))
    return float(2 * bound / (size * 2.0**-11)) if size else 0.0


def _changed_beyond(
    unit: Unit, case: DrawnCase, before: Mapping[str, Array], after: Mapping[str, Array]
) -> str | None:
    """The first tensor of floats of which a row beyond the live ones was written."""
    for arg in unit.written:
        tensor = unit.arguments[arg.name]
        is_rows = tensor is not None and len(tensor.shape) == 2 and tensor.shape[0] == unit.num_rows
        if is_rows and arg.layout != "pages" and arg.name in before:
            item, other = (
                np.ascontiguousarray(values[arg.name][case.live :]).view(np.uint8)
                for values in (before, after)
            )
            if not np.array_equal(item, other):
                return arg.name
    return None


def _finding(unit: Unit, case: DrawnCase, miss: Miss) -> Mistake:
    place = ", ".join(map(str, miss.place))
    what = f"{miss.tensor}[{place}] is {miss.got:.9g}, and {miss.exact:.9g} in float64"
    details = {
        "case": case.name,
        "tensor": miss.tensor,
        "place": list(miss.place),
        "got": miss.got,
        "exact": miss.exact,
        "times_its_bound": miss.share,
    }
    return Mistake(miss.what or what, label(unit), details)


def label(unit: Unit) -> str:
    """A unit for people: its kernels, rows and the weight that it reads."""
    weights = [
        unit.arguments[arg.name]
        for arg in unit.given
        if arg.name.split("_")[0] in ("weight", "table")
    ]
    names = [weight.name for weight in weights if weight is not None][:1]
    of = f" of {names[0]}" if names else ""
    return f"{unit.kernels}, {unit.num_rows} rows{of}"
