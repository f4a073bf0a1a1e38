"""Takes at import what packages take of a torch that was built for a GPU; prints nothing."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import json
import sys

import torch
import triton
import triton.language as tl
from torch._C import _cuda_getCurrentRawStream as get_raw_stream

PROPERTIES = torch.cuda.get_device_properties(torch.cuda.current_device())
NUM_PROCESSORS = PROPERTIES.multi_processor_count
UTILS = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
FIELDS = (
    "name", "major", "minor", "total_memory", "multi_processor_count", "warp_size", "uuid",
    "max_threads_per_block", "max_threads_per_multi_processor", "regs_per_multiprocessor",
    "shared_memory_per_block", "shared_memory_per_block_optin", "L2_cache_size", "gcnArchName",
    "shared_memory_per_multiprocessor", "is_integrated", "clock_rate", "memory_clock_rate",
)  # fmt: skip


@triton.jit
def scale(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) * 2, mask=offs < n)


@torch.library.custom_op("programs::scaled", mutates_args=(), device_types="cuda")
def scaled(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    with torch.cuda._DeviceGuard(x.device.index):
        torch.cuda.set_device(x.device.index)
        assert get_raw_stream(0) == 0
        scale[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y


LIBRARY = torch.library.Library("programs_lib", "FRAGMENT")
LIBRARY.define("scaled(Tensor x) -> Tensor")
LIBRARY.impl("scaled", lambda x: x * 0, "CPU")
LIBRARY.impl("scaled", scaled, "CUDA")
LIBRARY.define("again(Tensor x) -> Tensor")
LIBRARY.impl("again", scaled, "CUDA")
LIBRARY.impl("again", lambda x: x * 0, "CPU")


def main():
    x = torch.ones(100, device="cuda")
    for y in (scaled(x), torch.ops.programs_lib.scaled(x), torch.ops.programs_lib.again(x)):
        assert y.sum() == 200
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    facts = {
        "fields": [name for name in FIELDS if getattr(PROPERTIES, name, None) is None],
        "is_properties": isinstance(PROPERTIES, torch._C._CudaDeviceProperties),
        "name": PROPERTIES.name,
        "capability": [PROPERTIES.major, PROPERTIES.minor],
        "asked": torch.cuda.get_device_capability("cuda"),
        "processors": [NUM_PROCESSORS, UTILS["multiprocessor_count"]],
        "shared": [PROPERTIES.shared_memory_per_block_optin, UTILS["max_shared_mem"]],
        "has_memory": PROPERTIES.total_memory > 1 << 30,
        "is_built": torch.backends.cuda.is_built(),
        "devices": [torch._C._cuda_getDeviceCount(), torch.cuda._exchange_device(0)],
    }
    with open(sys.argv[1], "w") as stream:
        json.dump(facts, stream)


if __name__ == "__main__":
    main()
