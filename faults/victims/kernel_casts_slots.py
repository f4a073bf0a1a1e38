"""A kernel reads 4-byte slots through a pointer to 8-byte integers."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


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
    truth=Truth(
        causes=(Cause.DTYPE_WIDTH,),
        kernels=("rope_write",),
        arguments=("slots",),
        lines=("slot = tl.load(slots_ptr.to(tl.pointer_type(tl.int64)) + token)",),
    ),
    symptom="crash",
    # Triton takes 32 bits of each offset for AMD's GPUs, in tensors of less than 2 GiB: of each
    # 8 bytes the slot in the lower half counts, which is another token's.
    as_machine_code="differs",
    on_card=True,
    device="sim:rx7900xtx",
    source="flashinfer#5347",
    plant=plant,
)
