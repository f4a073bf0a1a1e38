"""Three dimensions that are each allowed, and too many programs together."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.edit(
        "rope_write_gpu",
        (
            "grid=(q.shape[0], num_heads + num_kv_heads)",
            "grid=(q.shape[0] << 15, num_heads, 1 << 15)",
        ),
    )


VICTIM = Victim(
    name="grid_product",
    title="rope_write asks for 2**32 programs",
    cause=Cause.GRID_PRODUCT,
    symptom="error",
    kernel="rope_write",
    argument="grid",
    source="triton#3299",
    plant=plant,
)
