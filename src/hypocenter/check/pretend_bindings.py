"""What torch built for a GPU has below its Python, for programs that take it by name.

A CPU build lacks these names, and operators registered for a GPU get no tensors there. For a
process that does nothing else: nothing is ever put back.
"""

from __future__ import annotations

import dataclasses
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import torch

from hypocenter.device.limits import GpuLimits

#: Clocks that a program may ask for, in kHz, and the width of the bus in bits: of no product.
CLOCK_KHZ, MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS = 1_500_000, 2_000_000, 4096
#: As `torch._C._cuda_getCompiledVersion` tells CUDA 12.8.
_COMPILED_VERSION = 12080


_UUID = uuid.UUID(int=0)


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """The fields of torch's `_CudaDeviceProperties`, for a GPU that is not there."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    warp_size: int
    max_threads_per_block: int
    max_threads_per_multi_processor: int
    regs_per_multiprocessor: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    gcnArchName: str
    L2_cache_size: int = 32 << 20
    is_integrated: bool = False
    is_multi_gpu_board: bool = False
    clock_rate: int = CLOCK_KHZ
    memory_clock_rate: int = MEMORY_CLOCK_KHZ
    memory_bus_width: int = MEMORY_BUS_BITS
    pci_domain_id: int = 0
    pci_bus_id: int = 1
    pci_device_id: int = 0
    uuid: Any = _UUID


def capability(gpu: GpuLimits) -> tuple[int, int]:
    """(9, 0) for sm_90; torch on ROCm says (9, 4) for gfx942."""
    digits = gpu.arch.removeprefix("sm_").removeprefix("gfx")
    if gpu.vendor == "amd":
        return int(digits[:-2]), int(digits[-2], 16)
    return int(digits[:-1]), int(digits[-1])


def properties(gpu: GpuLimits) -> DeviceProperties:
    """What torch.cuda.get_device_properties gives for `gpu`."""
    major, minor = capability(gpu)
    return DeviceProperties(
        name=gpu.product,
        major=major,
        minor=minor,
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.num_processors,
        warp_size=gpu.wavefront,
        max_threads_per_block=gpu.max_threads_per_block,
        max_threads_per_multi_processor=gpu.wavefront * gpu.max_waves_per_simd * gpu.num_simds,
        regs_per_multiprocessor=gpu.registers_per_simd * gpu.num_simds * gpu.wavefront,
        shared_memory_per_block=gpu.shared_default_bytes,
        shared_memory_per_block_optin=gpu.shared_limit_bytes,
        shared_memory_per_multiprocessor=gpu.shared_per_processor_bytes,
        gcnArchName=gpu.arch,
    )


def answering(value: Any) -> Callable[..., Any]:
    """A function that answers `value`, whatever it is asked."""
    return lambda *args, **options: value


def pretend_bindings(gpu: GpuLimits) -> None:
    """Put the names that programs take from `torch._C` there, and send GPU operators to the CPU."""
    names: dict[str, Any] = {
        "_cuda_getCurrentRawStream": answering(0),
        "_cuda_getCurrentStream": answering((0, 0, 1)),
        "_cuda_getDefaultStream": answering((0, 0, 1)),
        "_cuda_setStream": answering(None),
        "_cuda_getDevice": answering(0),
        "_cuda_setDevice": answering(None),
        "_cuda_getDeviceCount": answering(1),
        "_cuda_exchangeDevice": answering(0),
        "_cuda_maybeExchangeDevice": answering(0),
        "_cuda_getCompiledVersion": answering(_COMPILED_VERSION),
        "_cuda_isInBadFork": answering(False),
        "_cuda_synchronize": answering(None),
        "_cuda_emptyCache": answering(None),
        "_cuda_isCurrentStreamCapturing": answering(False),
        "_CudaDeviceProperties": DeviceProperties,
    }
    bindings: Any = torch._C
    for name, value in names.items():
        setattr(bindings, name, value)
    backend: Any = torch.backends.cuda
    backend.is_built = answering(True)
    _operators()


def _operators() -> None:
    """Tensors live on the CPU, so an operator's GPU form is registered for that.

    One that is registered for the CPU too keeps the GPU's form alone, in whatever order they come.
    """
    library: Any = torch.library.Library
    plain_impl = library.impl
    gpu_forms: set[tuple[str, str]] = set()

    def impl(
        self: Any, op_name: Any, fn: Any, dispatch_key: str = "", *rest: Any, **options: Any
    ) -> Any:
        operator = (self.ns, str(op_name))
        if dispatch_key in ("CUDA", "HIP"):
            gpu_forms.add(operator)
            options["allow_override"] = True  # a form for the CPU that was there before it
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                return plain_impl(self, op_name, fn, "CPU", *rest, **options)
        if dispatch_key == "CPU" and operator in gpu_forms:
            return None
        return plain_impl(self, op_name, fn, dispatch_key, *rest, **options)

    library.impl = impl
    definition: Any = torch._library.custom_ops.CustomOpDef
    plain_register = definition.register_kernel

    def register_kernel(self: Any, device_types: Any, *rest: Any, **options: Any) -> Any:
        given = [device_types] if isinstance(device_types, str) else device_types
        mapped = [_on_cpu(kind) for kind in given] if given is not None else None
        return plain_register(self, mapped, *rest, **options)

    definition.register_kernel = register_kernel


def _on_cpu(kind: str) -> str:
    return "cpu" if kind in ("cuda", "hip") else kind
