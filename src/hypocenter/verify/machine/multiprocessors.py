"""The same work in many programs of a GPU, each of which says on which multiprocessor it ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Scalar
from hypocenter.device import copies, memory
from hypocenter.device.launch import compile_all, run
from hypocenter.device.plan import PlanBuilder
from hypocenter.verify.outcome import Mistake

#: Numbers of a side of the product that each program makes, and its rounds.
SIDE, ROUNDS = 64, 200
PROGRAMS, MAX_LAUNCHES = 2048, 32

CONTRACT = Contract(
    "probe",
    Arg("start", (DType.F32,), "side, side"),
    Arg("out", (DType.F32,), "num_programs, side, side", "write"),
    Arg("where", (DType.I32,), "num_programs", "write"),
    Scalar("rounds", "rounds > 0", "must be above 0"),
)
#: So many are named; a card of which more compute wrongly is named as a whole.
_MOST_NAMED = 8


def has_multiprocessors(device: str) -> bool:
    """Whether programs of a device can tell where they run: NVIDIA's have a register for it."""
    return device.startswith("cuda")


class Probe:
    """Buffers and the launch."""

    def __init__(self, device: str) -> None:
        from hypocenter.verify.machine.multiprocessors_gpu import probe_kernel  # needs Triton

        def tensor(name: str, dtype: DType, *shape: int) -> Tensor:
            return memory.allocate(name, "verify", dtype, shape, device=device)

        start = tensor("start", DType.F32, SIDE, SIDE)
        drawn = np.random.default_rng(5).standard_normal((SIDE, SIDE)).astype(np.float32)
        copies.to_device(start, drawn)
        self._out = tensor("out", DType.F32, PROGRAMS, SIDE, SIDE)
        self._where = tensor("where", DType.I32, PROGRAMS)
        details = {"start": start, "out": self._out, "where": self._where, "rounds": ROUNDS}
        plan = PlanBuilder(PROGRAMS, device)
        plan.add_gpu(
            probe_kernel,
            start,
            self._out,
            self._where,
            ROUNDS,
            grid=(PROGRAMS,),
            contract=CONTRACT,
            facts=details,
            SIDE=SIDE,
        )
        self._launches = plan.launches
        compile_all(self._launches)

    def run(self, is_over: Callable[[], bool]) -> tuple[dict[str, Any], list[Mistake], bool]:
        """Launch until the time `is_over`: what was run, what is wrong, and whether an error that
        was planted into the last launch was seen."""
        programs: dict[int, int] = {}
        wrong: dict[int, int] = {}
        first, num_launches, out, where = None, 0, np.zeros(0), np.zeros(0, np.int32)
        while num_launches < MAX_LAUNCHES and not (num_launches and is_over()):
            run(self._launches)
            out, where = copies.to_host(self._out), copies.to_host(self._where)
            first = usual(out) if first is None else first
            for unit, is_wrong in zip(where, differing(out, first), strict=True):
                programs[int(unit)] = programs.get(int(unit), 0) + 1
                wrong[int(unit)] = wrong.get(int(unit), 0) + int(is_wrong)
            num_launches += 1
        assert first is not None
        out.view(np.uint32)[PROGRAMS // 2, 0, 0] ^= 1
        copies.to_device(self._out, out)
        seen = int(differing(copies.to_host(self._out), first).sum()) >= 1
        details = {
            "multiprocessors": len(programs),
            "programs": num_launches * PROGRAMS,
            "fewest_programs_of_one": min(programs.values()),
        }
        return details, list(_guilty_units(wrong, programs)), seen


def usual(out: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The result that most programs have: f32 [SIDE, SIDE]."""
    kinds: dict[bytes, list[int]] = {}
    for at, item in enumerate(out):
        kinds.setdefault(item.tobytes(), []).append(at)
    found: np.ndarray[Any, Any] = out[max(kinds.values(), key=len)[0]].copy()
    return found


def differing(out: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which programs have other bits than `right`: bool [num_programs]."""
    found: np.ndarray[Any, Any] = (out.view(np.uint32) != right.view(np.uint32)).any(axis=(1, 2))
    return found


def _guilty_units(wrong: dict[int, int], programs: dict[int, int]) -> Iterator[Mistake]:
    guilty = sorted((unit for unit in wrong if wrong[unit]), key=lambda unit: -wrong[unit])
    for unit in guilty[:_MOST_NAMED]:
        what = (
            f"multiprocessor {unit} gave other bits in {wrong[unit]} of {programs[unit]} programs"
        )
        details = {"multiprocessor": unit, "wrong": wrong[unit], "programs": programs[unit]}
        yield Mistake(what, "the same work in each program", details)
