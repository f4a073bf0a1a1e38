"""Three dimensions that are each allowed, and too many programs together."""

from __future__ import annotations

from hypocenter.diagnosis import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.edit(
        "rope_gpu",
        (
            'grid=(x.shape[0], facts["num_heads"])',
            'grid=(x.shape[0] << 15, facts["num_heads"], 1 << 15)',
        ),
    )


VICTIM = Victim(
    name="grid_product",
    title="rope asks for 2**32 programs",
    cause=Cause.GRID_PRODUCT,
    symptom="error",
    kernel="rope",
    argument="grid",
    source="triton#3299",
    plant=plant,
)
