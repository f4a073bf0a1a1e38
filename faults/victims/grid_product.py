"""Three dimensions that are each allowed, and too many programs together."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


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
    truth=Truth(causes=(Cause.GRID_PRODUCT,), kernels=("rope_write",), arguments=("grid",)),
    symptom="error",
    on_card=True,
    source="triton#3299",
    plant=plant,
)
