"""Two-byte positions that do no harm until a prompt has two tokens."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
from hypocenter.lab.victims import positions_of_two_bytes


def plant(lab: Lab) -> None:
    positions_of_two_bytes.plant(lab)
    lab.warm_up = [[72]]


def twin(lab: Lab) -> None:
    lab.disarm()
    lab.warm_up = [[72]]


VICTIM = Victim(
    name="positions_of_two_bytes_later",
    title="2-byte positions survive a prompt of one token, and fault at a copy to the host",
    cause=Cause.DTYPE_WIDTH,
    symptom="crash",
    kernel="rope_write",
    argument="positions",
    device="sim:h200",
    line="position = as_offset(tl.load(positions_ptr + token), WIDE)",
    source="GRETA CORE",
    plant=plant,
    twin=twin,
)
