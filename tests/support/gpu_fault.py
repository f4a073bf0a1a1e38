"""Faults on purpose, in a process of its own: prints whether the fault is asynchronous, and what
it says. The argument names the vendor, cuda or hip."""

from __future__ import annotations

import os
import sys

from specimens.gpu_kernels import wild_kernel

from hypocenter.base.errors import DeviceFault
from hypocenter.base.tensor import DType
from hypocenter.device.gpu.torch_gpu import open_gpu


def main() -> int:
    device = open_gpu(sys.argv[1])
    x = device.argument(device.allocate(4096), DType.F32, 1024)
    launch = device.launcher(wild_kernel)
    try:
        launch(x, 1 << 40, grid=(3,), num_warps=1)
        device.synchronise()
    except DeviceFault as fault:
        print(fault.is_asynchronous, fault, flush=True)
        os._exit(0)  # without tearing down a context that is lost
    print("no fault was reported", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
