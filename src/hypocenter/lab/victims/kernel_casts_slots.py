"""A kernel reads 4-byte slots through a pointer to 8-byte integers."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.edit(
        "rope_write_gpu",
        (
            "slot = as_offset(tl.load(slots_ptr + token), WIDE)",
            "slot = tl.load(slots_ptr.to(tl.pointer_type(tl.int64)) + token)",
        ),
    )


VICTIM = Victim(
    name="kernel_casts_slots",
    title="rope_write casts the slots to 8-byte integers",
    cause=Cause.DTYPE_WIDTH,
    symptom="crash",
    kernel="rope_write",
    argument="slots",
    line="slot = tl.load(slots_ptr.to(tl.pointer_type(tl.int64)) + token)",
    device="sim:rx7900xtx",
    source="flashinfer#5347",
    plant=plant,
)
