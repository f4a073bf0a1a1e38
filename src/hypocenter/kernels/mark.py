"""mark: a word that says how far the device has come, for whoever looks after its death.

The word has three parts: 32 bits how many runs of plans have begun on the device, 16 bits the
plan's tag, 16 bits the launch behind which the mark stands. A plan's first mark counts the run.
"""

from __future__ import annotations

from hypocenter.base.tensor import DType
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Scalar
from hypocenter.device.marks import mark_memory, sim_mark
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.settings.config import is_simulated

CONTRACT = Contract(
    "mark",
    Arg("runs", (DType.I64,), "1", "both", alignment_bytes=8),
    Arg("cell", (DType.I64,), "1", "write", alignment_bytes=8),
    Scalar("number", "0 <= number < 1 << 31", "must be from 0 to 2147483647"),
)
MARK = Op(CONTRACT, gpu="mark_gpu.launch")


#: Marks behind layers of one plan. Each is a launch, and takes about 1 us of an H200's time.
MAX_LAYER_MARKS = 4


def reference(num_runs: int, number: int) -> int:
    """The word of a mark whose tag and launch are `number`."""
    return num_runs << 32 | number


def mark(plan: PlanBuilder) -> None:
    """Place a mark behind the launches so far; nothing where nothing is recorded.

    A CPU needs none: each of its launches ends before the next one begins.
    """
    if plan.device == "cpu" or not plan.launches:
        return
    launch = min(len(plan.launches) - 1, 0xFFFF)
    if is_simulated(plan.device):
        plan.mark(sim_mark(plan.device, launch))
        return
    found = mark_memory(plan.device)
    if found is None:
        return
    number = plan.tag << 16 | launch
    plan.mark_by(MARK, runs=found.runs, cell=found.cell, number=number, begins=not plan.marks)


def mark_layer(plan: PlanBuilder, index: int, num_layers: int) -> None:
    """Place a mark behind layer `index` of a model; of a deep one, only behind some layers."""
    every = -(-num_layers // MAX_LAYER_MARKS)
    if (index + 1) % every == 0:
        mark(plan)
