"""A driver of Triton's that has no GPU: kernels are compiled for one, and no launch is made.

`install` puts it in the place of the active one. Whoever wants to see launches, or to do what a
kernel would have done, gives `on_launch` the kernel's name and its arguments.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN204
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

_FACTS = {
    "max_shared_mem": 232448,
    "max_num_regs": 65536,
    "multiprocessor_count": 132,
    "warpSize": 32,
    "sm_clock_rate": 1,
    "mem_clock_rate": 1,
    "mem_bus_width": 1,
}


class PretendDriver:
    """What Triton asks of its active driver."""

    def __init__(self, target: GPUTarget, on_launch: Callable[[str, tuple[Any, ...]], None]):
        class Launcher:
            """Made once for each kernel that is compiled, and called for each launch."""

            def __init__(self, source, metadata):
                self.name = source.fn.fn.__qualname__

            def __call__(self, x, y, z, stream, function, packed, data, enter, leave, *args):
                on_launch(self.name, args)

        self.launcher_cls = Launcher
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: dict(_FACTS),
            load_binary=lambda name, kernel, shared, device: (None, 2, 32, 0, 1024),
            unload_module=lambda module: None,
        )
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device=0: 0
        self.get_active_torch_device = lambda: torch.device("cpu")
        self.map_python_to_cpp_type = lambda kind: kind
        self.get_benchmarker = lambda: lambda function, *args, **options: [1.0, 1.0, 1.0]


def install(on_launch: Callable[[str, tuple[Any, ...]], None]) -> None:
    """From now on kernels of this process are compiled for an H100, and not launched."""
    triton.runtime.driver.set_active(PretendDriver(GPUTarget("cuda", 90, 32), on_launch))
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)
