"""Two programs turn the same head in place."""

from __future__ import annotations

from hypocenter.diagnosis import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

TWICE = (
    (
        "token, head = tl.program_id(0), tl.program_id(1)",
        "token, head = tl.program_id(0), tl.program_id(1) // 2",
    ),
    ('facts["num_heads"]),', '2 * facts["num_heads"]),'),
)


def plant(lab: Lab) -> None:
    lab.edit("rope_gpu", *TWICE)


VICTIM = Victim(
    name="rotated_twice",
    title="two programs of rope read and write one head",
    cause=Cause.PROGRAM_RACE,
    symptom="differs",
    kernel="rope",
    argument="x",
    line="token, head = tl.program_id(0), tl.program_id(1) // 2",
    source="ik_llama#2502",
    plant=plant,
)
