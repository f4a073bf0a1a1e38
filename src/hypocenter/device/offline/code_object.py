"""What compiled machine code says of itself: registers, spills, width of its memory instructions.

Reads AMD code objects with their assembly, and NVIDIA cubins through the vendor's own tools;
compiles nothing and judges nothing.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hypocenter.base.errors import HypoError
from hypocenter.base.own_folder import own_folder
from hypocenter.device.amd.code_object import CodeObject

_TOOL_SECONDS = 60


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """Resources of one kernel. `spills` counts 32-bit registers per lane, `*_bytes` are per lane.

    `loads` and `stores` map the width in bits of a lane's access to global memory to the number of
    such instructions in the code; copies from global to shared memory count as loads.
    """

    registers: int
    scalar_registers: int | None
    accumulators: int | None
    spills: int
    scratch_bytes: int
    static_shared_bytes: int
    #: What the compiler promised itself; None where the code does not say.
    max_threads: int | None
    num_instructions: int
    loads: dict[int, int]
    stores: dict[int, int]


def read_hsaco(elf: bytes, assembly: str) -> CodeFacts:
    """Facts of an AMD code object with one kernel, and of its assembly as LLVM prints it.

    Raises BadCodeObject when the object cannot be read, HypoError when it holds several kernels.
    """
    kernels = list(CodeObject(elf, "AMD code object").kernels.values())
    if len(kernels) != 1:
        raise HypoError(f"AMD code object: {len(kernels)} kernels, but one was compiled")
    kernel = kernels[0]
    names = [
        line.split(None, 1)[0] for line in assembly.splitlines() if _AMD_INSTRUCTION.match(line)
    ]
    return CodeFacts(
        registers=kernel.vector_registers,
        scalar_registers=kernel.scalar_registers,
        accumulators=kernel.accumulators,
        spills=kernel.vector_spills + kernel.scalar_spills,
        scratch_bytes=kernel.descriptor.private_bytes,
        static_shared_bytes=kernel.descriptor.group_bytes,
        max_threads=kernel.max_threads,
        num_instructions=len(names),
        loads=_amd_widths(names, "load"),
        stores=_amd_widths(names, "store"),
    )


_AMD_INSTRUCTION = re.compile(r"\t(?:v|s|ds|global|buffer|flat|scratch|image)_\w+")
#: Access to global memory; `lds` or `async` goes to shared memory, `tr` transposes on the way.
_AMD_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_(?:lds_|async_to_lds_|tr_)?(\w+)")


def _amd_widths(names: Iterable[str], access: str) -> dict[int, int]:
    found = (_AMD_ACCESS.match(name) for name in names)
    kinds = Counter(match[2] for match in found if match and match[1] == access)
    widths: Counter[int] = Counter()
    for kind, count in kinds.items():
        widths[_amd_width(kind)] += count
    return dict(sorted(widths.items(), reverse=True))


def _amd_width(kind: str) -> int:
    """Bits of `dwordx4`, `ushort`, `sbyte_d16_hi` (gfx9) or of `b128`, `u16`, `d16_hi_b16`."""
    if found := re.match(r"dwordx?(\d?)$", kind):
        return 32 * int(found[1] or 1)
    if "short" in kind or "byte" in kind:
        return 16 if "short" in kind else 8
    found = re.match(r"(?:d16_)?(?:hi_)?[bui](\d+)$", kind)
    if not found:
        raise HypoError(f"AMD assembly: the width of memory access {kind!r} is not known here")
    return int(found[1])


def read_cubin(cubin: bytes, cuobjdump: str, nvdisasm: str) -> CodeFacts:
    """Facts of an NVIDIA cubin with one kernel, as the two tools of the CUDA toolkit see it.

    `spills` is what Triton calls n_spills: 4-byte words of stack. Raises HypoError when a tool
    fails or says something else than expected.
    """
    with own_folder("hypo-cubin-") as folder:
        path = folder / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _tool_output(cuobjdump, "-res-usage", str(path))
        listing = _tool_output(nvdisasm, "-c", "-ndf", str(path))
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if len(found) != 1:
        raise HypoError(f"{cuobjdump}: {len(found)} kernels in a cubin that holds one")
    registers, stack, local = map(int, found[0])
    instructions = _SASS_INSTRUCTION.findall(listing)
    if not instructions:
        raise HypoError(f"{nvdisasm}: no instruction in a cubin that holds a kernel")
    return CodeFacts(
        registers=registers,
        scalar_registers=None,
        accumulators=None,
        spills=(stack + local) // 4,
        scratch_bytes=stack + local,
        static_shared_bytes=0,  # Triton's is dynamic; the figure shown is the system's own share
        max_threads=None,
        num_instructions=len(instructions),
        loads=_sass_widths(instructions, ("LDG", "LD", "LDGSTS")),
        stores=_sass_widths(instructions, ("STG", "ST")),
    )


# An instruction follows its address; a predicate may stand before it.
_SASS_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.M)


def _sass_widths(instructions: Iterable[str], names: tuple[str, ...]) -> dict[int, int]:
    widths: Counter[int] = Counter()
    for instruction in instructions:
        name, *modifiers = instruction.split(".")
        if name in names:
            sizes = [
                m.lstrip("US") for m in modifiers if re.fullmatch(r"[US]?(8|16|64|128|256)", m)
            ]
            widths[int(sizes[0]) if sizes else 32] += 1
    return dict(sorted(widths.items(), reverse=True))


def _tool_output(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [tool, *arguments], capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False
    )
    if done.returncode:
        raise HypoError(f"{tool} failed with exit code {done.returncode}: {done.stderr[:200]}")
    return done.stdout
