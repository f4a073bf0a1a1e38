"""host_mixture: a layer's feed-forward of experts, computed by the host's CPU for a GPU.

The CPU's own kernels do it, over rows that come from the GPU and go back (`device/host_work.py`);
what they are is the plan that made `work`.
"""

from __future__ import annotations

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, live_counts
from hypocenter.device.host_work import HostWork
from hypocenter.device.op import BoundPlan, Op
from hypocenter.device.plan import PlanBuilder

HOST_MIXTURE = Contract(
    "host_mixture",
    Arg("x", (DType.F32,), "num_tokens, pitch", "both"),
    live_counts("num_tokens", 0),
)
_HOST_MIXTURE = Op(HOST_MIXTURE, gpu="experts.host_mixture.call")


def host_mixture(plan: PlanBuilder, x: Tensor, counts: Tensor, work: HostWork) -> None:
    """Append x = what `work` makes of it, f32 [num_tokens, pitch], on a GPU."""
    plan.add_host_work(_HOST_MIXTURE, work, x=x, counts=counts)


def call(plan: BoundPlan, work: HostWork) -> None:
    """Append the call of `work`."""
    plan.add_call(work, "x", "counts")
