"""What ROCm offers to a command that may fault: which variables have it tell more, and where.

Sources: ROCm's documentation, pages "HIP environment variables" (AMD_*, HIP_*), "ROCR environment
variables" (HSA_*) and "ROCdebug-agent user guide"; `flag.h` and `amd_core_dump.cpp` of the ROCr
runtime for core dumps, `flags.cpp` of CLR for the names of its log files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hypocenter.coredump.amd_dump import PATTERNS

DRIVER = "dev/kfd"
#: ROCm loads the library of the first variable beside a program; its debug agent is one, and its
#: guide asks for the second.
_TOOLS, AGENT, _DEBUG = "HSA_TOOLS_LIB", "librocm-debug-agent.so.2", "HSA_ENABLE_DEBUG"
#: 1 logs errors alone, 4 what is asked of a queue as well; the mask is of calls (1), packets (8)
#: and kernels with their arguments (0x80).
_LEVEL, _MASK, _FILE, _SIZE = (
    "AMD_LOG_LEVEL",
    "AMD_LOG_MASK",
    "AMD_LOG_LEVEL_FILE",
    "AMD_LOG_LEVEL_SIZE",
)
_SERIAL = {"AMD_SERIALIZE_KERNEL": "3", "AMD_SERIALIZE_COPY": "3"}
_FRAGMENTS = "HSA_DISABLE_FRAGMENT_ALLOCATOR"
#: MiB of a log, which then begins anew; the process's number stands behind its name.
MAX_LOG_MIB, LOG = 64, "rocm-log"


@dataclass(frozen=True, slots=True)
class ArmedVariable:
    """A variable that is set for a command, and what that is for, to be told."""

    name: str
    value: str
    purpose: str


def has_driver(root: Path = Path("/")) -> bool:
    """Whether AMD's driver for computing is there; no GPU is asked."""
    return (root / DRIVER).exists()


def variables_at_fault(
    environment: Mapping[str, str], root: Path = Path("/")
) -> tuple[ArmedVariable, ...]:
    """What costs nothing until a fault: ROCm's debug agent where it is installed, and the runtime's
    errors.

    Nothing where AMD's driver is not there; what the environment sets by itself stays.
    """
    if not has_driver(root):
        return ()
    armed = []
    agent = _agent(environment, root)
    if agent is not None and _TOOLS not in environment:
        armed.append(ArmedVariable(_TOOLS, str(agent), "ROCm tells where waves stood"))
        if _DEBUG not in environment:
            armed.append(ArmedVariable(_DEBUG, "1", "its debug agent sees faults"))
    if _LEVEL not in environment:
        armed.append(ArmedVariable(_LEVEL, "1", "HIP's runtime tells its errors"))
    return tuple(armed)


def variables_of_waiting(
    environment: Mapping[str, str], runs: Path, root: Path = Path("/")
) -> tuple[ArmedVariable, ...]:
    """What has each launch and copy waited for and logged below `runs`: the log then ends in the
    launch that was under way.

    A log that somebody asked for by himself stays as it is, and none is written here.
    """
    if not has_driver(root):
        return ()
    armed = [
        ArmedVariable(name, value, "each launch and copy is waited for")
        for name, value in _SERIAL.items()
        if name not in environment
    ]
    if _FRAGMENTS not in environment:
        armed.append(ArmedVariable(_FRAGMENTS, "1", "freed memory is not kept"))
    if not {_LEVEL, _MASK, _FILE} & environment.keys():
        told = "HIP's runtime logs each launch"
        armed += [
            ArmedVariable(_LEVEL, "4", told),
            ArmedVariable(_MASK, "0x89", told),
            ArmedVariable(_FILE, str(runs / LOG), told),
            ArmedVariable(_SIZE, str(MAX_LOG_MIB), told),
        ]
    return tuple(armed)


def as_environment(armed: tuple[ArmedVariable, ...]) -> dict[str, str]:
    """The variables alone."""
    return {variable.name: variable.value for variable in armed}


def _agent(environment: Mapping[str, str], root: Path) -> Path | None:
    places = (environment.get("ROCM_PATH", ""), *sorted(map(str, root.glob("opt/rocm*"))))
    files = (Path(place) / "lib" / AGENT for place in places if place)
    return next((file for file in files if file.is_file()), None)


def dump_places(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Patterns of files that ROCm's runtime writes core dumps of the GPU to: it does so by itself,
    where the limit of core files allows it. They hold all memory of the GPU, so none is asked for
    here."""
    given = [environment[name] for name in PATTERNS if environment.get(name)]
    if given:
        return tuple(any_of(pattern) for pattern in given if not pattern.startswith("|"))
    return ("gpucore.*", "core*.gpu")


def any_of(pattern: str) -> str:
    """A pattern of names for any process."""
    return re.sub(r"%[a-zA-Z]", "*", pattern)
