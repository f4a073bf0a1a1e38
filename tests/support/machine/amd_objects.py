"""Objects of the project's own kernels for AMD's targets, and the names in LLVM's text of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

from repository import ROOT

from hypocenter.device.amd.code_object import Kernel, read_code_object
from hypocenter.device.amd.decode import Instruction, decode
from hypocenter.device.limits import named_gpu
from hypocenter.device.offline.compile import compile_source, triton_source
from hypocenter.device.offline.specimen import Specimen
from hypocenter.model.offline.specimens import form_of, vendor_specimens
from hypocenter.verify.machine.memory_gpu import look_kernel, write_kernel
from hypocenter.verify.machine.multiprocessors import SIDE
from hypocenter.verify.machine.multiprocessors_gpu import probe_kernel
from hypocenter.verify.machine.words import _BLOCK

TARGETS = ("gfx942", "gfx1100", "gfx1201", "gfx950")
#: Names of LLVM's that AMD's tables of CDNA, by which we decode, have otherwise; the last two in
#: some versions of LLVM.
SYNONYMS = {f"v_fma_mix{which}": f"v_mad_mix{which}" for which in ("_f32", "lo_f16", "hi_f16")} | {
    f"v_accvgpr_{which}_b32": f"v_accvgpr_{which}" for which in ("read", "write")
}
_ENCODINGS = re.compile(r"(_e64_dpp|_e64|_e32|_dpp|_dpp8|_sdwa)$")
#: What fills up to an alignment; LLVM's text has it as a directive.
_FILLERS = ("s_nop", "s_code_end")
_ALIGN = "align"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A form of a kernel for one target: its kernel, its instructions, and LLVM's text."""

    kernel: Kernel
    instructions: list[Instruction]
    text: str


@cache
def kernel_folders() -> dict[str, str]:
    """The package's kernels by their sources, with the folder of `kernels` that has them; to plan
    every form only to name them takes 3 s."""
    pattern = re.compile(r"@triton\.jit(?:\([^)]*\))?\n(?:@.*\n)*def (\w+_kernel)\(")
    sources = (ROOT / "src" / "hypocenter").rglob("*.py")
    return {
        name: path.parent.name for path in sources for name in pattern.findall(path.read_text())
    }


def kernel_names() -> list[str]:
    """The package's kernels."""
    return sorted(kernel_folders())


@cache
def amd_forms() -> tuple[Specimen, ...]:
    """Each kernel in each form in which AMD's GPUs are launched, once."""
    found: dict[tuple[object, ...], Specimen] = {}
    for specimen in (*vendor_specimens("amd"), *_of_verify()):
        found.setdefault(form_of(specimen), specimen)
    return tuple(found.values())


def _of_verify() -> tuple[Specimen, ...]:
    """The kernels that look at a machine, as `verify` launches them; no plan has them."""
    words = {"words_ptr": "*i32"}
    numbers = dict.fromkeys(("num_words", "start", "kind", "constant"), "i32")
    squares = {"start_ptr": "*fp32", "out_ptr": "*fp32", "where_ptr": "*i32"}
    block = {"BLOCK": _BLOCK}
    return (
        Specimen(write_kernel, words | numbers, block, tuple(words)),
        Specimen(
            look_kernel,
            words | {"found_ptr": "*i32"} | numbers,
            block,
            (*words, "found_ptr"),
        ),
        Specimen(
            probe_kernel,
            squares | {"rounds": "i32"},
            {"SIDE": SIDE, "ON_NVIDIA": False},
            tuple(squares),
        ),
    )


@cache
def first_forms() -> dict[str, Specimen]:
    """One form of each kernel, by name."""
    found: dict[str, Specimen] = {}
    for specimen in amd_forms():
        found.setdefault(specimen.name, specimen)
    return found


def compiled(specimen: Specimen, arch: str) -> Compiled:
    """Compile for a target, and decode."""
    limits = named_gpu(arch)
    made = compile_source(triton_source(specimen, limits), limits, specimen.options)
    code = read_code_object(made.asm["hsaco"], specimen.name)
    kernel = code.kernel(None)
    image = bytes(code.memory_image(0))[kernel.entry : kernel.entry + kernel.code_bytes]
    return Compiled(kernel, decode(image, arch, kernel.entry), made.asm["amdgcn"])


def differing(given: Compiled) -> list[tuple[str, str]]:
    """Names that are not LLVM's: ours and its, by place."""
    ours = [each.name.lower() for each in given.instructions]
    theirs = list(_written(given.text))
    place, wanted = 0, []
    for number, name in enumerate(theirs):
        if name != _ALIGN:
            wanted.append(name)
            place += 1
            continue
        # As many fillers as are there, but those that the text itself has next.
        rest = theirs[number + 1 :]
        num_own = next((i for i, each in enumerate(rest) if each not in _FILLERS), len(rest))
        num_there = 0
        while place + num_there < len(ours) and ours[place + num_there] in _FILLERS:
            num_there += 1
        fillers = ours[place : place + max(num_there - num_own, 0)]
        wanted += fillers
        place += len(fillers)
    return [
        (own, other)
        for own, other in zip_longest(ours, wanted, fillvalue="")
        if own not in (other, SYNONYMS.get(other))
    ]


def _written(text: str) -> Iterator[str]:
    """Names of instructions without their encodings, and where something is aligned."""
    is_code = False
    for line in text.splitlines():
        words = line.split(";")[0].strip()
        if re.match(r"[A-Za-z_]\w*:", words):
            is_code = True
        elif words.startswith(".Lfunc_end"):
            return
        elif is_code and words.startswith((".p2align", ".fill")):
            yield _ALIGN
        elif is_code and words and words[0] != "." and not words.endswith(":"):
            yield "::".join(_plain(part.split()[0]) for part in words.split("::"))


def _plain(name: str) -> str:
    return _ENCODINGS.sub("", name)
