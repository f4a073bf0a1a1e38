"""Makes a program believe that it has a GPU: `device="cuda"` is mapped to the CPU.

Tensors live on the CPU and say that they are on cuda:0; torch.cuda, torch.version and Triton's
driver answer for a named GPU. For a process that does nothing else: nothing is ever put back.
"""

from __future__ import annotations

import collections
import contextlib
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from hypocenter.check.pretend_autocast import pretend_autocast
from hypocenter.check.pretend_bindings import (
    CLOCK_KHZ,
    MEMORY_BUS_BITS,
    MEMORY_CLOCK_KHZ,
    answering,
    capability,
    pretend_bindings,
    properties,
)
from hypocenter.device.limits import GpuLimits
from hypocenter.device.triton_lang import tl, triton

_GPU = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_GPU_TYPES = ("cuda", "hip")

#: What `torch.version` says; programs choose code paths by it.
_CUDA_VERSION, _HIP_VERSION = "12.8", "7.0.0"


class OnCpu(TorchFunctionMode):
    """Sends every torch call that names a GPU to the CPU, and answers for tensors' devices.

    A copy to or from the GPU stays a copy, and so does one into pinned memory:
    `on_copy(source, copy)` is told of each.
    """

    def __init__(self, on_copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self._on_copy = on_copy
        self._pinned: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:  # a name is no place
            return func(*args, **kwargs)
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return self._copy_tensor(args[0])
        if func is torch.Tensor.pin_memory:
            return self._pin(self._copy_tensor(args[0]))
        if func is torch.Tensor.is_pinned:
            return any(args[0] is tensor for tensor in self._pinned)
        device = kwargs.get("device")
        names_device = _names_device(args) or isinstance(device, int) or _is_device(device)
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args, names_device = (args[0], _GPU, *args[2:]), True
        if kwargs.get("pin_memory"):
            return self._pin(func(*args, **{**kwargs, "pin_memory": False}))
        if not names_device:
            return func(*args, **kwargs)
        args = tuple(_on_cpu(value) for value in args)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"], is_device=True)
        result = func(*args, **kwargs)
        if func is torch.Tensor.to and result is args[0]:
            return self._copy_tensor(result)
        return result

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned.add(tensor)
        return tensor

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        self._on_copy(tensor, copy)
        return copy


_tensor: Any = torch.Tensor
_ANSWERS: dict[Any, Any] = {
    _tensor.device.__get__: _GPU,
    _tensor.is_cuda.__get__: True,
    _tensor.is_cpu.__get__: False,
    _tensor.get_device: 0,
}


def _is_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return True
    return isinstance(value, str) and value.split(":")[0] in (*_GPU_TYPES, "cpu")


def _names_device(args: tuple[Any, ...]) -> bool:
    return any(_is_device(value) for value in args[:3])


def _on_cpu(value: Any, *, is_device: bool = False) -> Any:
    if isinstance(value, torch.device):
        return _CPU if value.type in _GPU_TYPES else value
    if isinstance(value, str) and value.split(":")[0] in _GPU_TYPES:
        return "cpu"
    return "cpu" if is_device and isinstance(value, int) else value


class _Runtime:
    """Stands in for `torch.cuda.cudart()`: kernels may use host memory that is registered."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self._memory.note_host(int(address), int(num_bytes))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._memory.forget_host(int(address))
        return 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0


class HostMemory(Protocol):
    """Who is told of memory of the host that kernels may read and write."""

    def note_host(self, address: int, num_bytes: int) -> None: ...
    def forget_host(self, address: int) -> None: ...


def pretend(gpu: GpuLimits, memory: HostMemory) -> None:
    """From now on torch and Triton answer as on a machine with one `gpu`.

    `memory` is told of what a program registers of the host's own memory.
    """
    anything: Any = torch.cuda
    runtime = _Runtime(memory)
    anything.cudart = lambda *args, **kwargs: runtime
    _torch_version(gpu)
    pretend_bindings(gpu)
    _torch_cuda(gpu)
    _torch_devices()
    pretend_autocast()
    _triton_driver(gpu)


def keep(*modes: TorchFunctionMode) -> None:
    """Two places run without the modes of who asked: a backward pass, which runs user's code with
    those of a torch function off, and the thread that pins what a DataLoader has loaded."""

    def within(plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(mode)
                return plain(*args, **kwargs)

        return run

    from torch.utils.data._utils import pin_memory

    for module, name in (
        (torch.autograd, "_engine_run_backward"),
        (pin_memory, "_pin_memory_loop"),
    ):
        setattr(module, name, within(getattr(module, name)))


def _torch_version(gpu: GpuLimits) -> None:
    is_amd = gpu.vendor == "amd"
    version: Any = torch.version
    version.cuda = None if is_amd else _CUDA_VERSION
    version.hip = _HIP_VERSION if is_amd else None


class Nothing:
    """Stands in for what only orders work; `stream_order.py` knows more of streams."""

    cuda_stream = 0
    device = _GPU
    device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def query(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _torch_cuda(gpu: GpuLimits) -> None:
    cuda: Any = torch.cuda
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": gpu.product,
        "get_device_capability": capability(gpu),
        "get_device_properties": properties(gpu),
        "is_bf16_supported": True,
        "is_tf32_supported": gpu.vendor == "nvidia",
        "get_arch_list": [gpu.arch],
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (gpu.memory_bytes, gpu.memory_bytes),
        "memory_stats": collections.defaultdict(int),
        "memory_summary": "",
        "memory_snapshot": [],
        "utilization": 0,
        "clock_rate": CLOCK_KHZ // 1000,
        "graph_pool_handle": (0, 0),
        "_is_compiled": True,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "is_current_stream_capturing": False,
        "can_device_access_peer": False,
        "_is_in_bad_fork": False,
        "initial_seed": 0,
    }
    for name, value in answers.items():
        setattr(cuda, name, answering(value))
    for name in (
        "init",
        "_lazy_init",
        "synchronize",
        "set_device",
        "empty_cache",
        "ipc_collect",
        "reset_accumulated_memory_stats",
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "manual_seed",
        "manual_seed_all",
        "seed",
        "seed_all",
        "set_stream",
        "set_per_process_memory_fraction",
    ):
        setattr(cuda, name, answering(None))
    # A captured launch runs, and is checked, once; replaying its graph does nothing more.
    for name in (
        "Event",
        "Stream",
        "stream",
        "device",
        "device_of",
        "StreamContext",
        "CUDAGraph",
        "graph",
    ):
        setattr(cuda, name, type(name, (Nothing,), {}))
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: Nothing()
    cuda._device_t = Any
    cuda.default_generators = (torch.default_generator,)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.set_rng_state_all = lambda states: torch.set_rng_state(states[0])
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(cuda.nvtx, name, answering(None))


def _torch_devices() -> None:
    from torch.utils import _device

    context: Any = _device.DeviceContext
    plain = context.__init__

    def on_cpu(self: Any, device: Any) -> None:
        plain(self, _on_cpu(device, is_device=True))

    # `with torch.device("cuda")` and set_default_device stand below every other mode.
    context.__init__ = on_cpu
    anything: Any = torch

    class Generator(torch.Generator):
        def __new__(cls, device: Any = None) -> Any:
            return super().__new__(cls, device="cpu")  # type: ignore[call-arg]

    anything.Generator = Generator
    # Compiling for the CPU what is meant for a GPU would check other code than the file's.
    anything.compile = lambda model=None, **options: (lambda f: f) if model is None else model
    _torch_accelerator()
    _torch_files_and_checkpoints()


#: Names of torch.accelerator, for a GPU of any maker, and the names that torch.cuda has for them.
_OF_ANY_MAKER = {
    "current_device_idx": "current_device",
    "current_device_index": "current_device",
    "current_stream": "current_stream",
    "device_count": "device_count",
    "device_index": "device",
    "empty_cache": "empty_cache",
    "empty_host_cache": "empty_cache",
    "get_memory_info": "mem_get_info",
    "is_available": "is_available",
    "max_memory_allocated": "max_memory_allocated",
    "max_memory_reserved": "max_memory_reserved",
    "memory_allocated": "memory_allocated",
    "memory_reserved": "memory_reserved",
    "memory_stats": "memory_stats",
    "reset_accumulated_memory_stats": "reset_accumulated_memory_stats",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "set_device_idx": "set_device",
    "set_device_index": "set_device",
    "set_stream": "set_stream",
    "synchronize": "synchronize",
}


def _torch_accelerator() -> None:
    """A program that asks for no maker's GPU is answered as torch.cuda answers then."""

    def as_cuda(name: str) -> Callable[..., Any]:
        return lambda *args, **options: getattr(torch.cuda, name)(*args, **options)

    accelerator: Any = torch.accelerator
    for name, in_cuda in _OF_ANY_MAKER.items():
        setattr(accelerator, name, as_cuda(in_cuda))
    accelerator.current_accelerator = answering(torch.device("cuda"))
    types = {"supported_dtypes": {t for t in vars(torch).values() if isinstance(t, torch.dtype)}}
    accelerator.get_device_capability = answering(types)


def _torch_files_and_checkpoints() -> None:
    """Tensors of a GPU are loaded, shared with workers and made anew in memory of the CPU."""

    def stay(storage: Any, location: str) -> Any:
        return storage if location.split(":")[0] in _GPU_TYPES else None

    anything: Any = torch
    anything.serialization.register_package(0, answering(None), stay)
    storage, plain = anything.UntypedStorage, anything.UntypedStorage._new_shared

    def new_shared(_: Any, size: int, *, device: Any = "cpu") -> Any:
        return plain(size, device=_on_cpu(device, is_device=True))

    storage._new_shared = classmethod(new_shared)
    # What autograd keeps is kept below every mode, and says there that it is the CPU's.
    from torch.utils import checkpoint

    compared: Any = getattr(checkpoint, "_allowed_determinism_checks_to_fns", {})
    compared["default"] = lambda tensor: {"shape": tensor.shape, "dtype": tensor.dtype}


class _Driver:
    """What Triton asks its active driver, answered for a GPU that is not there."""

    def __init__(self, gpu: GpuLimits) -> None:
        is_amd = gpu.vendor == "amd"
        arch: Any = gpu.arch if is_amd else int(gpu.arch.removeprefix("sm_"))
        target = triton.backends.compiler.GPUTarget
        self._target = target("hip" if is_amd else "cuda", arch, gpu.wavefront)
        registers = properties(gpu).regs_per_multiprocessor
        facts = {
            "max_shared_mem": gpu.shared_limit_bytes,
            "max_num_regs": registers,
            "multiprocessor_count": gpu.num_processors,
            "warpSize": gpu.wavefront,
            "sm_clock_rate": CLOCK_KHZ,
            "mem_clock_rate": MEMORY_CLOCK_KHZ,
            "mem_bus_width": MEMORY_BUS_BITS,
            "arch": gpu.arch,
            "wavefront": gpu.wavefront,
        }
        self.utils = types.SimpleNamespace(get_device_properties=lambda device=0: dict(facts))
        self.get_device_capability = lambda *args: capability(gpu)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Any]:
        return bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: Any) -> None:
        pass


def bench(fn: Callable[[], Any], *args: Any, **options: Any) -> Any:
    """Stands in for Triton's benchmarks: runs `fn` once and gives one millisecond."""
    fn()
    quantiles = options.get("quantiles")
    if quantiles is not None:
        return [1.0] * len(quantiles) if len(quantiles) > 1 else 1.0
    return [1.0] if options.get("return_mode") == "all" else 1.0


def _triton_driver(gpu: GpuLimits) -> None:
    triton.runtime.driver.set_active(_Driver(gpu))
    if not hasattr(tl, "advance"):  # as of Triton 3.9; a file may import it by name
        tl.advance = tl.core.advance
    triton.testing.do_bench = bench
    triton.testing.do_bench_cudagraph = bench
