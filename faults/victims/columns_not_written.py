"""The last columns of each row are left as they were: undefined."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.doctor.causes import Cause
from hypocenter.model.layers.activations import Activations

OLD = """inside = column < num_columns
    token = as_offset(tl.load(token_ids_ptr + row), WIDE)
    num_units"""


def plant(lab: Lab) -> None:
    lab.leave_undefined(Activations)
    lab.edit("embedding_gpu", (OLD, OLD.replace("< num_columns", "< num_columns - 8")))


def twin(lab: Lab) -> None:
    lab.leave_undefined(Activations)


VICTIM = Victim(
    name="columns_not_written",
    title="lookup leaves 8 of 64 columns unwritten in a fresh buffer",
    truth=Truth(
        causes=(Cause.OUTPUT_NOT_WRITTEN,),
        kernels=("lookup_float",),
        arguments=("out",),
        lines=("inside = column < num_columns - 8",),
    ),
    symptom="nonfinite",
    source="vllm-ascend#17003",
    plant=plant,
    twin=twin,
)
