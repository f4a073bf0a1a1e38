"""What a GPU allows and holds: ten architectures as a table, the present GPU, one launch check.

Holds no code that compiles or launches; the table serves GPUs that are not there. Terms are those
of the vendors' common ground: a *wave* is AMD's wavefront or NVIDIA's warp, a *processor* is what
both drivers count as multiprocessors: an SM, a CU of CDNA, a pair of CUs (WGP) of RDNA.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

from hypocenter.base.errors import HypoError, LaunchRejected, UsageError
from hypocenter.base.refusals import (
    AnyRefusal,
    BlockThreads,
    GridAxisTooLong,
    GridEmpty,
    GridNotWhole,
    GridProduct,
    GridRank,
    GridThreads,
    SharedMemory,
)

log = logging.getLogger("hypocenter.limits")

KIB, GIB = 1 << 10, 1 << 30


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Limits of one GPU; counts are numbers of things, sizes are bytes.

    `registers_per_simd` counts 32-bit registers of one lane that the resident waves of a SIMD
    share, in steps of `register_step`; with it the two vendors' occupancy is one arithmetic.
    """

    arch: str
    vendor: str  # "amd" or "nvidia"
    product: str
    wavefront: int
    max_threads_per_block: int
    max_block_dims: tuple[int, int, int]
    max_grid_dims: tuple[int, int, int]
    #: Most programs of a launch, all dimensions multiplied.
    max_programs: int
    #: Most threads along one grid dimension; Triton's blocks have theirs along the first.
    max_threads_per_dim: int
    #: Without asking for more, and after asking for more (cudaFuncSetAttribute).
    shared_default_bytes: int
    shared_limit_bytes: int
    shared_per_processor_bytes: int
    shared_step_bytes: int
    #: What the system takes from each block's shared memory.
    shared_reserved_bytes: int
    max_registers_per_thread: int
    registers_per_simd: int
    register_step: int
    #: The same for scalar registers, with what each wave gives to the trap handler; 0: no limit.
    scalars_per_simd: int
    scalar_step: int
    scalars_reserved: int
    num_simds: int
    max_waves_per_simd: int
    max_blocks_per_processor: int
    num_processors: int
    memory_bytes: int

    @property
    def backend(self) -> str:
        """What Triton calls the vendor's compiler."""
        return "hip" if self.vendor == "amd" else "cuda"

    @property
    def overlaps(self) -> bool:
        """Whether a launch can begin while the one before it ends; see `kernels/shared_gpu.py`.

        Compute capability 9.0 and up: CUDA C++ Programming Guide, "Programmatic Dependent Launch".
        """
        return self.vendor == "nvidia" and int(self.arch.removeprefix("sm_")) >= 90

    @property
    def has_wide_tiles(self) -> bool:
        """Whether products and attention take the tiles that were measured on an H100, which need
        the shared memory of compute capability 9.0 and its matrix units, which read operands there
        (PTX ISA, "wgmma")."""
        return self.arch == "sm_90"

    @property
    def launched_as(self) -> tuple[str, ...]:
        """Whose GPUs' forms are launched on it, as specimens name them."""
        return ("", self.vendor, "hopper") if self.has_wide_tiles else ("", self.vendor)


# Triton multiplies the three grid dimensions in a C int and skips the launch without a word when
# the product is not positive (backends/nvidia/driver.c) or is 0 (backends/amd/driver.c).
_MAX_PROGRAMS = (1 << 31) - 1

# AMD. Sources:
# - block and grid: hipGetDeviceProperties (clr, hip_device.cpp). The y and z limits were 2^32 - 1
#   before ROCm 6.3 and are 65535 or 65536 since: the smallest stands here.
# - threads per grid dimension: the grid size of an HSA AQL packet is a uint32 of work-items.
# - registers, waves, LDS steps: LLVM's AMDGPUBaseInfo.cpp, which a test holds against the
#   compiler's own `; Occupancy:`. Scalar registers bound the waves on gfx9 only (same file; LLVM
#   before 2026 had a coarser table there that allowed a wave more from 82 registers on).
# - LDS sizes, processors, memory: "AMD GPU specifications" of the ROCm documentation.
# - 16 blocks per CU: one hardware barrier each (getMaxWorkGroupsPerCU); a WGP has two CUs.
_AMD: dict[str, Any] = {
    "vendor": "amd",
    "max_threads_per_block": 1024,
    "max_block_dims": (1024, 1024, 1024),
    "max_grid_dims": ((1 << 31) - 1, 65535, 65535),
    "max_programs": _MAX_PROGRAMS,
    "max_threads_per_dim": (1 << 32) - 1,
    "shared_default_bytes": 64 * KIB,
    "shared_limit_bytes": 64 * KIB,
    "shared_reserved_bytes": 0,
    "num_simds": 4,
}
_CDNA: dict[str, Any] = _AMD | {
    "wavefront": 64,
    "shared_per_processor_bytes": 64 * KIB,
    "shared_step_bytes": 512,
    # 256 vector and 256 accumulation registers out of one file.
    "max_registers_per_thread": 512,
    "registers_per_simd": 512,
    "register_step": 8,
    "scalars_per_simd": 800,
    "scalar_step": 16,
    "scalars_reserved": 16,
    "max_waves_per_simd": 8,
    "max_blocks_per_processor": 16,
}
_RDNA: dict[str, Any] = _AMD | {
    "wavefront": 32,
    # Two CUs share 128 KiB in WGP mode, Triton's default; one block gets at most 64 KiB.
    "shared_per_processor_bytes": 128 * KIB,
    "shared_step_bytes": 1024,  # Mesa's ac_gpu_info.c, GFX10.3 and later
    "max_registers_per_thread": 256,
    # The parts with the larger register file: gfx1100, 1101, 1151, 1200, 1201.
    "registers_per_simd": 1536,
    "register_step": 24,
    "scalars_per_simd": 0,
    "scalar_step": 1,
    "scalars_reserved": 0,
    "max_waves_per_simd": 16,
    "max_blocks_per_processor": 32,
}
# NVIDIA. Sources: the tables "Technical Specifications per Compute Capability" and "Shared Memory
# Capacity" of the CUDA programming guide (each block's 1 KiB for the system is stated there too);
# register and shared-memory steps: CUDA's occupancy calculator (256 registers per warp, 128 bytes).
# 65536 registers per SM are 512 per lane in each of four partitions.
_NVIDIA: dict[str, Any] = {
    "vendor": "nvidia",
    "wavefront": 32,
    "max_threads_per_block": 1024,
    "max_block_dims": (1024, 1024, 64),
    "max_grid_dims": ((1 << 31) - 1, 65535, 65535),
    "max_programs": _MAX_PROGRAMS,
    "max_threads_per_dim": ((1 << 31) - 1) * 1024,
    "shared_default_bytes": 48 * KIB,
    "shared_step_bytes": 128,
    "shared_reserved_bytes": 1 * KIB,
    "max_registers_per_thread": 255,
    "registers_per_simd": 512,
    "register_step": 8,
    "scalars_per_simd": 0,
    "scalar_step": 1,
    "scalars_reserved": 0,
    "num_simds": 4,
}
_SM_LARGE: dict[str, Any] = _NVIDIA | {"max_waves_per_simd": 16, "max_blocks_per_processor": 32}
_SM_SMALL: dict[str, Any] = _NVIDIA | {
    "max_waves_per_simd": 12,
    # Certain for 8.9; for 12.0 from the guide's table alone.
    "max_blocks_per_processor": 24,
    "shared_per_processor_bytes": 100 * KIB,
    "shared_limit_bytes": 99 * KIB,
}

# `num_processors` and `memory_bytes` are facts of a product, not of an architecture: those of the
# named product, in its vendor's words ("141 GB" is 141e9 bytes), so of the order of what a driver
# reports. The 180 GB of the B200 are what its systems offer of 192 fitted.
TABLE: Mapping[str, GpuLimits] = {
    limits.arch: limits
    for limits in (
        GpuLimits(  # one of the two dies, which are two devices
            arch="gfx90a", product="MI250X", num_processors=110, memory_bytes=64 * GIB, **_CDNA
        ),
        GpuLimits(
            arch="gfx942", product="MI300X", num_processors=304, memory_bytes=192 * GIB, **_CDNA
        ),
        GpuLimits(
            arch="gfx950",
            product="MI355X",
            num_processors=256,
            memory_bytes=288 * GIB,
            **_CDNA
            | {
                "shared_default_bytes": 160 * KIB,
                "shared_limit_bytes": 160 * KIB,
                "shared_per_processor_bytes": 160 * KIB,
                "shared_step_bytes": 1280,
            },
        ),
        GpuLimits(
            arch="gfx1100", product="RX 7900 XTX", num_processors=48, memory_bytes=24 * GIB, **_RDNA
        ),
        GpuLimits(
            arch="gfx1201", product="RX 9070 XT", num_processors=32, memory_bytes=16 * GIB, **_RDNA
        ),
        GpuLimits(
            arch="sm_80",
            product="A100",
            num_processors=108,
            memory_bytes=80 * 10**9,
            shared_per_processor_bytes=164 * KIB,
            shared_limit_bytes=163 * KIB,
            **_SM_LARGE,
        ),
        GpuLimits(
            arch="sm_89", product="RTX 4090", num_processors=128, memory_bytes=24 * GIB, **_SM_SMALL
        ),
        GpuLimits(
            arch="sm_90",
            product="H200",
            num_processors=132,
            memory_bytes=141 * 10**9,
            shared_per_processor_bytes=228 * KIB,
            shared_limit_bytes=227 * KIB,
            **_SM_LARGE,
        ),
        GpuLimits(
            arch="sm_100",
            product="B200",
            num_processors=148,
            memory_bytes=180 * 10**9,
            shared_per_processor_bytes=228 * KIB,
            shared_limit_bytes=227 * KIB,
            **_SM_LARGE,
        ),
        GpuLimits(
            arch="sm_120",
            product="RTX 5090",
            num_processors=170,
            memory_bytes=32 * GIB,
            **_SM_SMALL,
        ),
    )
}

#: Names of GPUs that `sim:` can stand for, to architecture.
PRODUCTS: Mapping[str, str] = {
    limits.product.lower().replace(" ", ""): limits.arch for limits in TABLE.values()
}


#: The GPUs that `sim.py` can be.
SIMULATED = ("sim:mi300x", "sim:h200", "sim:rx7900xtx")
#: The GPUs whose machine code `amd/` executes.
EXECUTED = ("emu:mi300x", "emu:mi355x", "emu:rx7900xtx", "emu:rx9070xt")


def simulated_name(name: str) -> str:
    """A name of SIMULATED or EXECUTED, written as there; raises UsageError for any other."""
    key, names = name.lower(), (*SIMULATED, *EXECUTED)
    if key not in names:
        near = difflib.get_close_matches(key, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"no simulated GPU {name!r}; {hint}known are {', '.join(names)}")
    return key


def named_gpu(name: str) -> GpuLimits:
    """The limits of an architecture (`gfx942`, `sm_90`) or a product (`mi300x`, `H200`).

    Raises UsageError, with the nearest name where there is one.
    """
    key = name.lower().replace(" ", "").replace("-", "")
    if found := TABLE.get(PRODUCTS.get(key, key)):
        return found
    near = difflib.get_close_matches(key, [*TABLE, *PRODUCTS], n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join([*TABLE, *PRODUCTS])}"
    raise UsageError(f"no GPU architecture or product {name!r}; {hint}")


def named_archs(text: str) -> list[str]:
    """Architectures of a comma-separated list of names or products; `all` is every one.

    Raises UsageError.
    """
    if text.strip().lower() == "all":
        return list(TABLE)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--arch is {text!r}; give names between commas, or all")
    return list(dict.fromkeys(named_gpu(name).arch for name in names))


@functools.cache
def present_gpu() -> GpuLimits | None:
    """The limits of the GPU that torch would use, asked once; None without a GPU or torch.

    Raises HypoError for a GPU whose architecture is not in the table.
    """
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.current_device()
    ask = None if torch.version.hip else _cuda_attribute(device)
    return from_driver(torch.cuda.get_device_properties(device), ask)


# What torch's device properties call our fields. HIP's build of torch has fewer of them.
_PROPERTIES = {
    "wavefront": "warp_size",
    "max_threads_per_block": "max_threads_per_block",
    "shared_default_bytes": "shared_memory_per_block",
    "shared_limit_bytes": "shared_memory_per_block_optin",
    "shared_per_processor_bytes": "shared_memory_per_multiprocessor",
    "num_processors": "multi_processor_count",
    "memory_bytes": "total_memory",
}
# CUdevice_attribute of cuda.h; the numbers are part of the driver's ABI. HIP numbers its own by
# alphabet and has renumbered them, so there the table speaks.
_CUDA_ATTRIBUTES = {
    "max_threads_per_block": (1,),
    "max_block_dims": (2, 3, 4),
    "max_grid_dims": (5, 6, 7),
    "shared_reserved_bytes": (111,),
    "max_blocks_per_processor": (106,),
}


def from_driver(properties: Any, ask: Callable[[int], int | None] | None = None) -> GpuLimits:
    """The table's entry of the GPU, with what the driver says about the GPU at hand in its place.

    `properties` is torch's object, `ask` gives a CUDA device attribute, or None where the driver
    does not know it. A limit of 0 is 'not reported': one warning for all of them, and the table's
    value. Raises HypoError for an architecture that is not in the table.
    """
    arch = _arch_of(properties)
    if arch not in TABLE:
        raise HypoError(
            f"{properties.name} is {arch}, but kernels are built for {', '.join(TABLE)}; "
            "use device cpu or another GPU (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES)"
        )
    known = TABLE[arch]
    said: dict[str, Any] = {
        field: getattr(properties, name, None) for field, name in _PROPERTIES.items()
    }
    for field, numbers in _CUDA_ATTRIBUTES.items() if ask else ():
        values = [ask(number) for number in numbers] if ask else []
        said[field] = None if None in values else values[0] if len(values) == 1 else tuple(values)
    zero = sorted(field for field, value in said.items() if value is not None and _has_zero(value))
    if zero:
        shown = ", ".join(f"{field} (taking {getattr(known, field)})" for field in zero)
        log.warning("%s: the driver reports 0 for %s", properties.name, shown)
    good = {f: value for f, value in said.items() if value is not None and f not in zero}
    return replace(known, product=str(properties.name), **good)


def _has_zero(value: int | tuple[int, ...]) -> bool:
    return 0 in value if isinstance(value, tuple) else value == 0


def _arch_of(properties: Any) -> str:
    # NVIDIA's build of torch has the attribute too, and fills it with the product's name.
    name = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    return name if name.startswith("gfx") else f"sm_{properties.major}{properties.minor}"


def _cuda_attribute(number: int) -> Callable[[int], int | None]:
    """A function that asks the driver for an attribute of device `number`; None: not known."""
    driver = ctypes.CDLL("libcuda.so.1")
    device = ctypes.c_int()
    status = driver.cuDeviceGet(ctypes.byref(device), number)
    if status:
        raise HypoError(f"cuDeviceGet({number}) failed with CUDA error {status}")

    def ask(attribute: int) -> int | None:
        value = ctypes.c_int()
        failed = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        return None if failed else value.value

    return ask


LaunchCheck = Callable[[str, Sequence[int], int, int], None]


def launch_check(limits: GpuLimits) -> LaunchCheck:
    """A function `check(kernel, grid, num_warps, shared_bytes)` with the limits worked in.

    The function raises LaunchRejected for what the GPU, or Triton without a word, would not launch:
    a grid dimension out of range, a product of them that overflows, too many threads or too much
    shared memory. `grid` has one to three entries.
    """
    max_x, max_y, max_z = limits.max_grid_dims
    max_programs, shared_limit = limits.max_programs, limits.shared_limit_bytes
    max_warps = min(limits.max_threads_per_block, limits.max_block_dims[0]) // limits.wavefront
    max_warps_x = limits.max_threads_per_dim // limits.wavefront

    def check(kernel: str, grid: Sequence[int], num_warps: int, shared_bytes: int) -> None:
        try:
            # `index` refuses fractions and turns numpy's integers, which wrap, into Python's.
            x, y, z = map(index, grid if len(grid) == 3 else (*grid, 1, 1)[:3])
            if (
                0 < x <= max_x
                and 0 < y <= max_y
                and 0 < z <= max_z
                and x * y * z <= max_programs
                and 0 < num_warps <= max_warps
                and x * num_warps <= max_warps_x
                and 0 <= shared_bytes <= shared_limit
                and 0 < len(grid) <= 3
            ):
                return
        except (TypeError, ValueError):
            pass  # not numbers: _refusal names the one that is none
        raise LaunchRejected(kernel, _refusal(limits, grid, num_warps, shared_bytes))

    return check


def check_launch(
    limits: GpuLimits, kernel: str, grid: Sequence[int], num_warps: int, shared_bytes: int
) -> None:
    """`launch_check` for one launch; raises LaunchRejected."""
    launch_check(limits)(kernel, grid, num_warps, shared_bytes)


def _refusal(
    limits: GpuLimits, grid: Sequence[int], num_warps: int, shared_bytes: int
) -> AnyRefusal:
    """The first thing that is wrong."""
    gpu = f"{limits.product} ({limits.arch})"
    if not 1 <= len(grid) <= 3:
        return GridRank(grid=tuple(map(int, grid)))
    for axis, (size, limit) in enumerate(zip(grid, limits.max_grid_dims, strict=False)):
        if not hasattr(size, "__index__"):
            return GridNotWhole(axis=axis, shown=repr(size))
        if size < 1:
            way_out = "do not launch for an empty batch"
            return GridEmpty(axis=axis, size=int(size), limit=limit, way_out=way_out)
        if size > limit:
            way_out = (
                "use grid[0] or more work per program" if axis else "give each program more work"
            )
            return GridAxisTooLong(axis=axis, size=int(size), limit=limit, gpu=gpu, way_out=way_out)
    sizes = tuple(map(int, grid))
    if (num_programs := math.prod(sizes)) > limits.max_programs:
        return GridProduct(
            grid=sizes,
            num_programs=num_programs,
            limit=limits.max_programs,
            way_out="split the launch",
        )
    num_threads = num_warps * limits.wavefront
    if not 0 < num_threads <= limits.max_threads_per_block:
        return BlockThreads(
            num_threads=num_threads,
            limit=limits.max_threads_per_block,
            gpu=gpu,
            from_one=True,
            shown=f" ({num_warps} warps x {limits.wavefront})",
            way_out="change num_warps",
        )
    if sizes[0] * num_threads > limits.max_threads_per_dim:
        return GridThreads(
            num_threads=sizes[0] * num_threads,
            limit=limits.max_threads_per_dim,
            gpu=gpu,
            way_out="use grid[1] too or fewer warps",
        )
    return SharedMemory(
        num_bytes=shared_bytes,
        limit=limits.shared_limit_bytes,
        gpu=gpu,
        way_out="use smaller tiles or fewer stages",
    )
