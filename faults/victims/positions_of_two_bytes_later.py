"""Two-byte positions that do no harm until a prompt has two tokens."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from faults.victims import positions_of_two_bytes
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    positions_of_two_bytes.plant(lab)
    lab.warm_up = [[72]]


def twin(lab: Lab) -> None:
    lab.disarm()
    lab.warm_up = [[72]]


VICTIM = Victim(
    name="positions_of_two_bytes_later",
    title="2-byte positions survive a prompt of one token, and fault at a copy to the host",
    truth=Truth(
        causes=(Cause.DTYPE_WIDTH,),
        kernels=("rope_write",),
        arguments=("positions",),
        lines=("position = as_offset(tl.load(positions_ptr + token), WIDE)",),
    ),
    symptom="crash",
    on_card=True,
    device="sim:h200",
    source="GRETA CORE",
    plant=plant,
    twin=twin,
)
