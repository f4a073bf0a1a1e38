"""Two programs add their halves of a sum to one output, without atomics."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause

STEPS = ("total = tl.dot(w, values, total)\n", "total = tl.where(inside, tl.fma(")
OWN = "if chunk % tl.num_programs(2) == tl.program_id(2):\n                    "
GRID = "grid=(sum(tiles), row_tiles)"
ATOMIC = (
    (
        "        total += tl.load(at, mask=live, other=0.0)\n",
        "        tl.atomic_add(at, total, live)\n",
    ),
    ("    tl.store(at, total, mask=live)", "    else:\n        tl.store(at, total, mask=live)"),
)


def halve(lab: Lab) -> None:
    """Where a product is added, every second stretch of columns is a second program's."""
    lab.edit("linear_float_gpu", *((step, OWN + step) for step in STEPS))
    both = GRID.replace("row_tiles)", "row_tiles, 1 + accumulate)")
    lab.edit("linear_gpu", (GRID, both))


def plant(lab: Lab) -> None:
    halve(lab)


def twin(lab: Lab) -> None:
    lab.edit("shared_gpu", *ATOMIC)
    halve(lab)


VICTIM = Victim(
    name="halves_without_atomics",
    title="two programs of linear load, add and store one output",
    truth=Truth(
        causes=(Cause.PROGRAM_RACE,),
        kernels=("linear_float",),
        arguments=("out",),
        lines=("total += tl.load(at, mask=live, other=0.0)",),
    ),
    symptom="none",
    source="vllm#11493",
    plant=plant,
    twin=twin,
)
