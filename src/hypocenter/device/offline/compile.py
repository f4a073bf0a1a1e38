"""Compiles a Triton kernel for a GPU that is not there and reads what it would need.

Never launches. A kernel that does not compile or would not launch is a record, not an exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from hypocenter.base.errors import HypoError, Unguardable, UsageError
from hypocenter.base.refusals import AnyRefusal, BlockThreads, Refused, SharedMemory
from hypocenter.device.interpret.block_pointers import compile_problem
from hypocenter.device.limits import GpuLimits, named_gpu
from hypocenter.device.offline.code_object import CodeFacts, read_cubin, read_hsaco
from hypocenter.device.offline.compiled import CompiledKernel
from hypocenter.device.offline.occupancy import occupancy
from hypocenter.device.offline.specimen import HUGE_BYTES, Specimen, of_device
from hypocenter.device.triton_lang import triton

_MAX_PROBLEM_CHARS = 300


def compile_for(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    arch: str,
    *,
    divisible: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> CompiledKernel:
    """`compile_specimen` for loose facts; see `Specimen` for what they mean."""
    specimen = Specimen(kernel, signature, constants, tuple(divisible), options or {})
    return compile_specimen(specimen, arch)


def compile_specimen(specimen: Specimen, arch: str, *, guarded: bool = False) -> CompiledKernel:
    """Compile for `arch` (or a product's name) and hold the result against that GPU's limits.

    `guarded` compiles the variant whose accesses are checked. Raises UsageError for an unknown
    architecture and for a specimen that does not match its kernel's parameters.
    """
    limits = named_gpu(arch)
    num_warps = int(specimen.options.get("num_warps", 4))
    blank = CompiledKernel(
        kernel=specimen.name,
        label=specimen.label,
        arch=limits.arch,
        guarded=guarded,
        ok=False,
        problems=(),
        threads=num_warps * limits.wavefront,
        shared_limit=limits.shared_limit_bytes,
    )
    source = triton_source(specimen, limits)
    try:
        if guarded:
            source = triton_source(_guarded_specimen(specimen), limits)
        compiled = compile_source(source, limits, specimen.options)
        facts = _facts(compiled, limits)
    # Triton and its passes raise whatever they like, and each of them means the same here.
    except Exception as error:
        return msgspec.structs.replace(blank, problems=(_problem(error),))
    return _judge(blank, facts, compiled.metadata, limits)


def compile_source(source: Any, limits: GpuLimits, options: Mapping[str, Any]) -> Any:
    """Triton's compiled kernel; raises whatever Triton raises."""
    target = triton.backends.compiler.GPUTarget(
        limits.backend, _triton_arch(limits), limits.wavefront
    )
    # What Triton 3.4 to 3.9 do by themselves; 3.9 warns that the next version will not.
    return triton.compile(source, target=target, options={"enable_fp_fusion": True, **options})


def _triton_arch(limits: GpuLimits) -> str | int:
    return limits.arch if limits.vendor == "amd" else int(limits.arch.removeprefix("sm_"))


def triton_source(specimen: Specimen, limits: GpuLimits) -> Any:
    """Triton's source object: types, constants and facts by the parameter's place.

    Raises UsageError when the specimen and its kernel differ about the parameters.
    """
    kernel = specimen.jit
    names = list(kernel.arg_names)
    given = [*specimen.signature, *specimen.constants]
    if sorted(given) != sorted(names):
        raise UsageError(
            f"specimen of {specimen.name} gives {', '.join(given)}, but the parameters are "
            f"{', '.join(names)}; give each once, in signature or in constants"
        )
    types = {name: specimen.signature.get(name, "constexpr") for name in names}
    values = dict(specimen.constants)
    is_nvidia = limits.vendor == "nvidia"
    values |= of_device(values, is_nvidia=is_nvidia, overlaps=limits.overlaps)
    constants = {(names.index(name),): value for name, value in values.items()}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for place, name in enumerate(names):
        facts: list[list[Any]] = [["tt.divisibility", 16]] if name in specimen.divisible else []
        # What Triton tells AMD's compiler about a tensor of at most 2 GiB: it takes buffer
        # instructions then, with other registers and other widths.
        if limits.vendor == "amd" and types[name].startswith("*") and name not in specimen.huge:
            facts.append(["tt.pointer_range", 32])
        if facts:
            attributes[(place,)] = facts
    return triton.compiler.ASTSource(kernel, types, constants, attributes)


def _facts(compiled: Any, limits: GpuLimits) -> CodeFacts:
    if limits.vendor == "amd":
        return read_hsaco(compiled.asm["hsaco"], compiled.asm["amdgcn"])
    tools = triton.knobs.nvidia
    return read_cubin(compiled.asm["cubin"], tools.cuobjdump.path, tools.nvdisasm.path)


def _judge(
    blank: CompiledKernel, facts: CodeFacts, metadata: Any, limits: GpuLimits
) -> CompiledKernel:
    # Triton may have changed the number of warps: specialised kernels add some of their own.
    num_warps = int(metadata.num_warps)
    threads = num_warps * limits.wavefront
    shared = int(metadata.shared) + facts.static_shared_bytes
    found = occupancy(
        limits,
        num_warps=num_warps,
        registers=facts.registers,
        scalar_registers=facts.scalar_registers or 0,
        shared_bytes=shared,
    )
    problems = tuple(_problems(facts, limits, threads, shared, found.num_blocks))
    return msgspec.structs.replace(
        blank,
        ok=not problems,
        problems=problems,
        threads=threads,
        registers=facts.registers,
        scalar_registers=facts.scalar_registers,
        accumulators=facts.accumulators,
        spills=facts.spills,
        scratch_bytes=facts.scratch_bytes,
        shared_bytes=shared,
        occupancy=round(found.share, 4),
        waves_per_simd=found.waves_per_simd,
        max_waves_per_simd=limits.max_waves_per_simd,
        limited_by=found.limited_by,
        loads=facts.loads,
        stores=facts.stores,
        num_instructions=facts.num_instructions,
    )


def _problems(
    facts: CodeFacts, limits: GpuLimits, threads: int, shared_bytes: int, num_blocks: int
) -> Iterator[AnyRefusal]:
    """What the driver would refuse."""
    arch = limits.arch
    if shared_bytes > limits.shared_limit_bytes:
        yield SharedMemory(
            num_bytes=shared_bytes,
            limit=limits.shared_limit_bytes,
            gpu=arch,
            way_out="use smaller tiles or fewer stages",
        )
    if threads > limits.max_threads_per_block:
        most = limits.max_threads_per_block
        yield BlockThreads(num_threads=threads, limit=most, gpu=arch, way_out="use fewer warps")
    elif facts.max_threads is not None and threads > facts.max_threads:
        made_for = f"the code was made for {facts.max_threads}"
        yield Refused(what=f"a block has {threads} threads, but {made_for}")
    elif facts.registers > limits.max_registers_per_thread:
        most = limits.max_registers_per_thread
        yield Refused(what=f"a thread needs {facts.registers} registers, but {arch} has {most}")
    elif num_blocks == 0 and shared_bytes <= limits.shared_limit_bytes:
        what = (
            f"{threads} threads of {facts.registers} registers do not fit on one processor of "
            f"{arch}"
        )
        yield Refused(what=what, way_out="use fewer warps or smaller tiles")


def _problem(error: Exception) -> Refused:
    """Why a kernel did not compile, in one bounded line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A CompilationError shows the source first and says what is wrong last.
    text = lines[-1] if lines else "no reason given"
    if "Block pointers have been removed" in text:
        text = compile_problem()
    why = "cannot be guarded" if isinstance(error, Unguardable) else "does not compile"
    named = text if isinstance(error, HypoError) else f"{type(error).__name__}: {text}"
    return Refused(what=f"{why}: {named}"[:_MAX_PROBLEM_CHARS])


def _guarded_specimen(specimen: Specimen) -> Specimen:
    """The same launch of the guarded variant: an extent for each pointer, and the slots."""
    from hypocenter.device.guard.guard import SLOTS, guard

    pointers = [name for name, kind in specimen.signature.items() if kind.startswith("*")]
    variant = guard(specimen.jit, pointers)
    added = {name: "i64" for name in variant.fn.arg_names if name not in specimen.jit.arg_names}
    added[SLOTS] = "*i64"
    return replace(specimen, kernel=variant.fn, signature={**specimen.signature, **added})


def specimen_of_launch(
    jit: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> Specimen:
    """What Triton would compile for a launch of `jit` with these arguments.

    Integers of value 1 and None become constants and alignment becomes a fact, as
    `JITFunction.run` does it. Raises UsageError for an argument that has no type of its own.
    """
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible: list[str] = []
    huge: list[str] = []
    for parameter in jit.params:
        name, value = parameter.name, arguments.get(parameter.name, parameter.default)
        kind = "constexpr" if parameter.is_constexpr else _type_of(parameter, value)
        if not isinstance(kind, str):
            raise UsageError(
                f"{jit.__name__}: {name} is a {type(value).__name__}, which is not compiled offline"
            )
        if kind == "constexpr":
            constants[name] = value
            continue
        signature[name] = kind
        is_free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if not is_free and _is_multiple_of_16(value):
            divisible.append(name)
        if hasattr(value, "untyped_storage") and value.untyped_storage().nbytes() >= HUGE_BYTES:
            huge.append(name)
    return Specimen(jit, signature, constants, tuple(divisible), options, huge=tuple(huge))


def _type_of(parameter: Any, value: Any) -> Any:
    if parameter.annotation_type:
        return parameter.annotation_type
    return triton.runtime.jit.mangle_type(value, specialize=not parameter.do_not_specialize)


def _is_multiple_of_16(value: Any) -> bool:
    if hasattr(value, "data_ptr"):
        return int(value.data_ptr()) % 16 == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0
