"""Two programs turn the same head in place."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

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
    cause=Cause.PROGRAM_RACE,
    symptom="differs",
    kernel="rope_write",
    argument="q",
    line="token, head = tl.program_id(0), tl.program_id(1) // 2",
    source="ik_llama#2502",
    plant=plant,
    twin=twin,
)
