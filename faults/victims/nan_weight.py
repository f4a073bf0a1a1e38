"""A tensor of the file holds a value that is no number."""

from __future__ import annotations

from faults.lab import Lab
from faults.model import model_path
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause


def plant(lab: Lab) -> None:
    lab.model = model_path("q8_0", nan_in="blk.1.attn_v.weight")


def twin(lab: Lab) -> None:
    lab.model = model_path("q8_0")


VICTIM = Victim(
    name="nan_weight",
    title="a weight of the file holds NaN",
    truth=Truth(
        causes=(Cause.NONFINITE_VALUE,),
        kernels=("linear_codes_few",),
        arguments=("weight", "scales"),
    ),
    symptom="nonfinite",
    on_card=True,
    source="vllm#47303",
    plant=plant,
    twin=twin,
)
