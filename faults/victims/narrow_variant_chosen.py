"""The host picks the 32-bit variant of a kernel for a cache that needs the other."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from faults.victims.key_offset_overflow import far_blocks
from hypocenter.contracts.contract import Contract
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    far_blocks(lab)
    lab.patch(Contract, "needs_int64", lambda contract, **arguments: False)


def twin(lab: Lab) -> None:
    far_blocks(lab)


VICTIM = Victim(
    name="narrow_variant_chosen",
    title="2.2e9 elements are taken for few enough",
    truth=Truth(
        causes=(Cause.OFFSET_OVERFLOW,),
        kernels=("rope_write",),
        arguments=("k_cache", "v_cache", "WIDE"),
    ),
    symptom="crash",
    source="vllm#34530",
    plant=plant,
    twin=twin,
)
