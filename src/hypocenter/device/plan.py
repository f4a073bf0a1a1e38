"""A plan: the prepared launches of one step over static buffers, made once per shape bucket.

The decoder's plain Python runs against a PlanBuilder; what remains is a list to walk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.device import launch
from hypocenter.device.lang import CpuKernel
from hypocenter.device.launch import Demands
from hypocenter.tensor import Tensor

#: Multiply-adds below which a kernel is done on one thread before others would have begun.
MIN_PARALLEL_WORK = 1 << 20


class PlanBuilder:
    """Collects the launches that ops ask for. `num_rows` is the bucket: the most rows of a step."""

    def __init__(self, num_rows: int, device: str = "cpu") -> None:
        self.num_rows, self.device = num_rows, device
        self.launches: list[launch.Launch] = []

    def launch(
        self,
        kernel: CpuKernel,
        *args: Any,
        contract: Demands,
        facts: Mapping[str, Any],
        work_per_row: int,
    ) -> None:
        """Append a launch whose `facts` meet its contract; raises LaunchRejected if they do not.

        `work_per_row`, about the multiply-adds per row, decides between one thread and many.
        """
        parallel = self.num_rows * work_per_row >= MIN_PARALLEL_WORK
        self.launches.append(launch.prepare(kernel, args, contract, facts, parallel=parallel))

    def launch_gpu(
        self,
        jit: Any,
        *args: Any,
        grid: tuple[int, ...],
        contract: Demands,
        facts: Mapping[str, Any],
        num_warps: int = 4,
        **constants: Any,
    ) -> None:
        """Append a launch of a Triton kernel; `constants` are its tl.constexpr parameters."""
        # Triton is about to change what it does when nobody says.
        fused = {"enable_fp_fusion": True}
        options = {"grid": grid, "num_warps": num_warps, **fused, **constants}
        self.launches.append(launch.prepare_gpu(jit, args, options, contract, facts, self.device))


class Plan:
    """The launches of one step, and the tensor that holds its result."""

    def __init__(self, builder: PlanBuilder, result: Tensor) -> None:
        self.launches = tuple(builder.launches)
        self.result = result
        self._guarded_device: str | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that this plan runs, each once, in order of first use."""
        return tuple(dict.fromkeys(item.kernel for item in self.launches))

    def compile(self, progress: launch.Progress | None = None) -> None:
        launch.compile_all(self.launches, progress)

    def set_mode(self, mode: str) -> None:
        """Run every launch in this mode from now on; see `Launch.set_mode`."""
        for item in self.launches:
            item.set_mode(mode)
        self._guarded_device = self.launches[0].device if mode == "guarded" else None

    def run(self) -> None:
        """Run the launches; in guarded mode raises AccessRefused when one left its tensors."""
        launch.run(self.launches)
        if self._guarded_device is not None:
            from hypocenter.device.guarded import settle  # needs Triton

            settle(self._guarded_device)


def bucket(num_rows: int, max_rows: int) -> int:
    """The smallest power of two that holds `num_rows`, but at most `max_rows`."""
    return min(1 << max(num_rows - 1, 0).bit_length(), max_rows)
