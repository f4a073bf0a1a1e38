"""What kernels are compiled for: the processor and its features, as LLVM spells them.

LLVM is asked once for a machine; later processes find the answer among the files of the cache and
load neither LLVM nor numba for it. `numba_target.py` takes from numba what is not to be used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

import msgspec

from hypocenter.base import package
from hypocenter.device.cpu import instructions, kept_files
from hypocenter.device.cpu.instructions import asked_for
from hypocenter.device.cpu.sources import source_hash

_CPUINFO = Path("/proc/cpuinfo")
#: Lines of it that change while a machine runs, or from core to core.
_CHANGING = ("processor", "cpu MHz", "apicid", "initial apicid", "core id", "bogomips")
#: A setting of numba that changes no code.
_NUM_THREADS = "NUMBA_NUM_THREADS"
_COMPILERS = ("llvmlite-", "numba-", "numpy-")
_PACKAGES = (*_COMPILERS, "tbb-")


class _Target(msgspec.Struct, frozen=True):
    """`name` of the processor, and its `features`."""

    name: str
    features: frozenset[str]


def cpu_features() -> frozenset[str]:
    """Names of the instruction-set features that kernels are compiled for, as LLVM spells them.

    As numba's code generator has them, so NUMBA_CPU_NAME and NUMBA_CPU_FEATURES are honoured.
    """
    return _target().features


def cpu_name() -> str:
    """The processor that kernels are compiled for, as LLVM spells it: znver4."""
    return _target().name


def instruction_set() -> str:
    """By which instructions kernels multiply and add: the fastest of those they may use.

    avx512-bf16, avx512-vnni, avx512, avx-vnni, avx2, neon or plain. Sums of codes, and those of
    products of two bf16, are the same on all of them (`vdpbf16ps` was held against that on Intel's
    alone); other floats are where there is a fused step.
    """
    features = cpu_features()  # refuses a path that the processor lacks
    with_bf16 = asked_for() == "avx512-bf16" or instructions.is_fast_in_bf16(cpu_name())
    return instructions.fastest(features, with_bf16=with_bf16)


@cache
def digest() -> str:
    """What machine code depends on besides its source: processor, path, packages, interpreter.

    Empty where that is not known without numba: its settings come from elsewhere, too, or the
    system does not say what the processor is.
    """
    if not (processor := _processor()) or not (versions := _versions()) or _has_settings():
        return ""
    parts = (processor, versions, asked_for(), sys.version, str(package.FOLDER))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@cache
def numba_folder() -> Path | None:
    """Where numba lies, which is not imported for that; None where it does not."""
    found = importlib.util.find_spec("numba")
    return Path(found.origin).parent if found is not None and found.origin else None


@cache
def _target() -> _Target:
    own_text = package.FOLDER / "device" / "cpu" / "target.py"
    name = f"target-{digest()}-{source_hash(own_text)}"
    if digest() and (kept := kept_files.read(name)) is not None:
        return msgspec.msgpack.decode(kept, type=_Target)
    from numba.core.registry import cpu_target

    import hypocenter.device.cpu.numba_target  # noqa: F401  (what it leaves out)

    _, processor, features = cpu_target.target_context.codegen().magic_tuple()
    has = frozenset(word[1:] for word in features.split(",") if word.startswith("+"))
    target = _Target(str(processor), has)
    if digest():
        kept_files.write(name, msgspec.msgpack.encode(target))
    return target


def _processor() -> str:
    """What the system says of the first core."""
    try:
        with open(_CPUINFO, encoding="utf-8", errors="replace") as file:
            first = file.read(1 << 14).partition("\n\n")[0]
    except OSError:
        return ""
    lines = (line for line in first.splitlines() if not line.startswith(_CHANGING))
    return "\n".join(lines) if "flags" in first else ""


def _versions() -> str:
    """The folders that say which versions of the compiler and of its threads are installed; empty
    where a part of the compiler lies elsewhere."""
    if (folder := numba_folder()) is None:
        return ""
    names = (entry.name for entry in os.scandir(folder.parent))
    found = sorted(n for n in names if n.startswith(_PACKAGES) and n.endswith(".dist-info"))
    is_whole = all(any(name.startswith(part) for name in found) for part in _COMPILERS)
    return "\n".join(found) if is_whole else ""


def _has_settings() -> bool:
    """Whether numba is told to do otherwise than by default."""
    is_told = any(name.startswith("NUMBA_") and name != _NUM_THREADS for name in os.environ)
    return is_told or Path(".numba_config.yaml").exists()
