"""The last columns of each row are left as they were: undefined."""

from __future__ import annotations

from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim
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
    cause=Cause.OUTPUT_NOT_WRITTEN,
    symptom="nonfinite",
    kernel="lookup_float",
    argument="out",
    line="inside = column < num_columns - 8",
    source="vllm-ascend#17003",
    plant=plant,
    twin=twin,
)
