"""A tensor of the file holds a value that is no number."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.model import model_path
from hypocenter.lab.victim import Victim


def plant(lab: Lab) -> None:
    lab.model = model_path("q8_0", nan_in="blk.1.attn_v.weight")


def twin(lab: Lab) -> None:
    lab.model = model_path("q8_0")


VICTIM = Victim(
    name="nan_weight",
    title="a weight of the file holds NaN",
    cause=Cause.NONFINITE_VALUE,
    symptom="nonfinite",
    kernel="linear_codes_few",
    argument="weight",
    also=("scales",),
    source="vllm#47303",
    plant=plant,
    twin=twin,
)
