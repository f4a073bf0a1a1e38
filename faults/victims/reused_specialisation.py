"""Code made for an aligned pointer is run with one that is not."""

from __future__ import annotations

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import memory
from hypocenter.doctor.causes import Cause

LOAD = """    inside = column < num_columns
    token = as_offset(tl.load(token_ids_ptr + row), WIDE)
    num_units"""
PAIRS = """    inside = column < num_columns
    pair = tl.load(token_ids_ptr.to(tl.pointer_type(tl.int64)) + row // 2)
    token = as_offset((pair >> (row % 2 * 32)).to(tl.int32), WIDE)
    num_units"""


def shift(max_tokens: int, device: str) -> Tensor:
    longer = memory.allocate("token_ids", "step", DType.I32, (max_tokens + 1,), device=device)
    return memory.rows(longer, 1, max_tokens + 1)


def plant(lab: Lab) -> None:
    lab.edit("embedding_gpu", (LOAD, PAIRS))
    lab.set_apart("token_ids", shift)


def twin(lab: Lab) -> None:
    lab.edit("embedding_gpu", (LOAD, PAIRS))


VICTIM = Victim(
    name="reused_specialisation",
    title="lookup loads token ids in pairs, and gets a view that begins at an odd element",
    truth=Truth(
        causes=(Cause.MISALIGNMENT,),
        kernels=("lookup_float",),
        arguments=("token_ids",),
        lines=("pair = tl.load(token_ids_ptr.to(tl.pointer_type(tl.int64)) + row // 2)",),
    ),
    symptom="crash",
    on_card=True,
    device="sim:h200",
    # AMD's read 8 bytes from where 4 bytes are aligned.
    of_nvidia=True,
    source="vllm#41257",
    plant=plant,
    twin=twin,
)
