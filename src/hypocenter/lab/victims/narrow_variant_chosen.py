"""The host picks the 32-bit variant of a kernel for a cache that needs the other."""

from __future__ import annotations

from hypocenter.contracts.contract import Contract
from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
from hypocenter.lab.victims.key_offset_overflow import far_blocks


def plant(lab: Lab) -> None:
    far_blocks(lab)
    lab.patch(Contract, "needs_int64", lambda contract, **arguments: False)


def twin(lab: Lab) -> None:
    far_blocks(lab)


VICTIM = Victim(
    name="narrow_variant_chosen",
    title="2.2e9 elements are taken for few enough",
    cause=Cause.OFFSET_OVERFLOW,
    symptom="crash",
    kernel="rope_write",
    argument="k_cache",
    also=("v_cache", "WIDE"),
    source="vllm#34530",
    plant=plant,
    twin=twin,
)
