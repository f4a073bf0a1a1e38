"""Two programs turn the same head in place."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause

TWICE = (
    (
        "token, head = tl.program_id(0), tl.program_id(1)",
        "token, head = tl.program_id(0), tl.program_id(1) // 2",
    ),
    ("num_heads + num_kv_heads),", "2 * (num_heads + num_kv_heads)),"),
)


#: One whose text shows it: k, which is not turned in place, stays right.
PROMPTS = [[300, 301, 9]]


def plant(lab: Lab) -> None:
    twin(lab)
    lab.edit("rope_write_gpu", *TWICE)


def twin(lab: Lab) -> None:
    lab.prompts = PROMPTS


VICTIM = Victim(
    name="rotated_twice",
    title="two programs of rope_write turn and write one head",
    truth=Truth(
        causes=(Cause.PROGRAM_RACE,),
        kernels=("rope_write",),
        arguments=("q",),
        lines=("token, head = tl.program_id(0), tl.program_id(1) // 2",),
    ),
    symptom="differs",
    on_card=True,
    source="ik_llama#2502",
    plant=plant,
    twin=twin,
)
