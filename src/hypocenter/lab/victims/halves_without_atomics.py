"""Two programs add their halves of a sum to one output, without atomics."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

MASK = "mask = (column < num_columns - start * 64) & live[None, None, :]"
GRID = """grid=(sum(tiles), triton.cdiv(num_rows, tile)),
            NUM_WEIGHTS"""
ATOMIC = (
    (
        "        total += tl.load(at, mask=live, other=0.0)\n",
        "        tl.atomic_add(at, total, live)\n",
    ),
    ("    tl.store(at, total, mask=live)", "    else:\n        tl.store(at, total, mask=live)"),
)


def halve(lab: Lab) -> None:
    """Where a product is added, every second stretch of columns is a second program's."""
    own = f"{MASK} & (chain % tl.num_programs(2) == tl.program_id(2))[:, None, None]"
    lab.edit("linear_float_gpu", (MASK, own))
    both = GRID.replace("tile)),", 'tile), 1 + shared["ACCUMULATE"]),')
    lab.edit("linear_gpu", (GRID, both))


def plant(lab: Lab) -> None:
    halve(lab)


def twin(lab: Lab) -> None:
    lab.edit("shared_gpu", *ATOMIC)
    halve(lab)


VICTIM = Victim(
    name="halves_without_atomics",
    title="two programs of linear load, add and store one output",
    cause=Cause.PROGRAM_RACE,
    symptom="none",
    kernel="linear_float_few",
    argument="out",
    line="total += tl.load(at, mask=live, other=0.0)",
    source="vllm#11493",
    plant=plant,
    twin=twin,
)
