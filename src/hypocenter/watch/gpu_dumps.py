"""Has the GPU leave a core dump when a program below a command faults, and reads what it left.

NVIDIA's driver writes one by itself where variables of the environment say so (the guide of
cuda-gdb, "GPU core dump support"); until a fault that costs nothing. Ours are light: no memory, but
code, registers and parameters. What is armed of AMD's says `coredump/rocm.py`; its debug agent
writes to stderr, and core dumps that ROCm's runtime wrote meanwhile are read.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hypocenter.base.errors import BadCoreDump
from hypocenter.base.own_folder import own_folder
from hypocenter.coredump import rocm
from hypocenter.coredump.amd_dump import PATTERNS, is_amd_dump, read_amd_dump
from hypocenter.coredump.debug_agent import read_debug_agent
from hypocenter.coredump.nvidia import read_core_dump
from hypocenter.record.gap import Gap
from hypocenter.record.gpu_stop import MAX_STOPS, GpuStop
from hypocenter.watch.fault_text import fault_in
from hypocenter.watch.launcher_lines import without_prefixes

#: How long a dump that was asked for may take; one of an H100 full of warps took some 20 seconds.
DUMP_SECONDS = 40.0
#: Below this much room on the disk none is made.
MIN_FREE_BYTES = 2 << 30
#: A variable with this in its name is the user's own wish; then nothing of it is touched.
_THEIRS = re.compile(r"CUDA_\w*COREDUMP\w*")
#: Has CUPTI watch the driver, which then takes no note of a core dump that is armed: seen on an
#: H100 with driver 580 and CUPTI 13.0, in each of seven runs.
WATCHES_DRIVER = "HYPO_DRIVER"
_SWITCH, _FILE = "CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "CUDA_COREDUMP_FILE"
#: Without `skip_abort` the process would end right after its dump, and not as it would have ended.
_LIGHT = (
    "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory,"
    "skip_constbank_memory,skip_abort"
)
_KERNEL = re.compile(r"\w{1,200}")
_MAX_OBJECTS = 256
#: Programs that attach to a GPU themselves; only one can.
_DEBUGGERS = frozenset({"cuda-gdb", "compute-sanitizer", "cuda-memcheck", "ncu", "nsys"})
#: What clocks of files are behind by.
_CLOCK_SECONDS = 1.0
_DRIVER = ("dev/nvidiactl", "proc/driver/nvidia/version", "dev/dxg")
#: Of what is not known where there is no dump.
WHAT = "where the GPU stood"
#: Lines that are read of source files, and what counts as one.
_SOURCES = frozenset({".py", ".cu", ".cuh", ".hip", ".h", ".hpp", ".c", ".cc", ".cpp", ".cxx"})
_MAX_TEXTS, _MAX_SOURCE_BYTES, _MAX_LINE_CHARS = 64, 4 << 20, 200


@dataclass(slots=True)
class GpuDumps:
    """The dumps of one command: `variables` are for its environment, `folder` is where they go.

    `folder` is None where none is armed, and `why` says why not, "" where there is no driver.
    """

    variables: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    why: str = ""
    #: Patterns of files that somebody else has made, and since when.
    theirs: tuple[str, ...] = ()
    since: float = 0.0
    #: Where Triton keeps what it compiles.
    cache: Path = Path()

    def ask(self) -> int:
        """Have every process that runs on a GPU write a dump now; how many there are."""
        asked = 0
        for pipe in self.folder.glob("pipe.*") if self.folder is not None else ():
            with contextlib.suppress(OSError):  # nobody reads it any more
                fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    os.write(fd, b"1")
                    asked += 1
                finally:
                    os.close(fd)
        return asked

    def num_whole(self) -> int:
        """How many dumps are written to their end."""
        return sum(isinstance(found, GpuStop) for found in self._read())

    def stops(self, stderr: str) -> tuple[tuple[GpuStop, ...], tuple[Gap, ...]]:
        """What the dumps say, those with an exception first, and what is not known and why."""
        found = list(self._read(fault_in(stderr, None, None).address))
        stops = [stop for stop in found if isinstance(stop, GpuStop)]
        gaps = [
            Gap.damage("a core dump of the GPU", str(bad))
            for bad in found
            if isinstance(bad, BadCoreDump)
        ]
        if (told := read_debug_agent(without_prefixes(stderr))) is not None:
            stops.append(told)
        if self.why and not stops:
            gaps.append(Gap.not_recorded(WHAT, self.why))
        stops.sort(key=lambda stop: not stop.exception)
        return tuple(map(_with_texts, stops[:MAX_STOPS])), tuple(gaps)

    def _read(self, page: int | None = None) -> Iterator[GpuStop | BadCoreDump]:
        for path in self._files()[:MAX_STOPS]:
            try:
                if is_amd_dump(path):
                    yield read_amd_dump(path, self.objects, page)
                else:
                    yield read_core_dump(path)
            except BadCoreDump as error:
                yield error

    def _files(self) -> list[Path]:
        if self.folder is not None:
            return sorted(self.folder.glob("*.nvcudmp"))
        return [path for pattern in self.theirs for path in self._since(Path(pattern))]

    def _since(self, place: Path) -> Iterator[Path]:
        """Files that a pattern matches and that are newer than the command."""
        with contextlib.suppress(OSError, ValueError):
            for path in sorted(place.parent.glob(place.name)):
                if path.stat().st_mtime >= self.since - _CLOCK_SECONDS:
                    yield path

    def objects(self, kernel: str) -> list[Path]:
        """What Triton made of a kernel for AMD, the newest first: there the lines are."""
        if not _KERNEL.fullmatch(kernel):  # a name of a dump
            return []
        with contextlib.suppress(OSError):
            found = [(path.stat().st_mtime, path) for path in self.cache.glob(f"*/{kernel}.hsaco")]
            return [path for _, path in sorted(found, reverse=True)[:_MAX_OBJECTS]]
        return []


def _with_texts(stop: GpuStop) -> GpuStop:
    """The stop with what stands in the lines of its frames, while the files are there."""
    known: dict[tuple[str, int], str] = {}
    warps = []
    for warp in stop.warps:
        for frame in warp.frames:
            if (frame.file, frame.line) not in known and len(known) < _MAX_TEXTS:
                known[frame.file, frame.line] = _line(frame.file, frame.line)
        texts = [(frame, known.get((frame.file, frame.line), "")) for frame in warp.frames]
        frames = tuple(msgspec.structs.replace(frame, text=text) for frame, text in texts)
        warps.append(msgspec.structs.replace(warp, frames=frames))
    return msgspec.structs.replace(stop, warps=tuple(warps))


def _line(file: str, line: int) -> str:
    """A line of a source file; nothing of what is no such, whatever a dump names."""
    path = Path(file)
    with contextlib.suppress(OSError, ValueError):
        status = path.stat()
        is_source = path.suffix in _SOURCES and stat.S_ISREG(status.st_mode)
        if is_source and status.st_size <= _MAX_SOURCE_BYTES:
            lines = path.read_text(errors="replace").splitlines()
            return lines[line - 1].strip()[:_MAX_LINE_CHARS] if 0 < line <= len(lines) else ""
    return ""


def has_driver(root: Path = Path("/")) -> bool:
    """Whether NVIDIA's driver is there; no GPU is asked."""
    return any((root / name).exists() for name in _DRIVER)


def watches_driver(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a command that gets `environment` has CUPTI record its launches."""
    return environment.get(WATCHES_DRIVER, "0") not in ("", "0")


def _triton_cache(environment: Mapping[str, str]) -> Path:
    if given := environment.get("TRITON_CACHE_DIR"):
        return Path(given)
    return Path(environment.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


@contextlib.contextmanager
def gpu_dumps(
    environment: Mapping[str, str], command: Sequence[str] = (), root: Path = Path("/")
) -> Iterator[GpuDumps]:
    """Arm dumps for a command that gets `environment`; their folder is removed at the end.

    Nothing is armed where there is no driver of NVIDIA's below `root`, for a command that debugs
    GPUs itself or whose driver is watched, and where the environment says anything of dumps: one
    that the user has made so is read, and stays.
    """
    if not has_driver(root):
        if not rocm.has_driver(root) and not any(n in environment for n in PATTERNS):
            yield GpuDumps()
            return
        yield GpuDumps(
            rocm.as_environment(rocm.variables_at_fault(environment, root)),
            theirs=rocm.dump_places(environment),
            since=time.time(),
            cache=_triton_cache(environment),
        )
        return
    if watches_driver(environment):
        yield GpuDumps(why="CUPTI watches the driver, and beside it the driver writes no core dump")
        return
    if (debugger := Path(command[0]).name if command else "") in _DEBUGGERS:
        yield GpuDumps(why=f"{debugger} looks at the GPU itself, so no core dump was armed")
        return
    theirs = [name for name in environment if _THEIRS.fullmatch(name)]
    if theirs:
        pattern = environment.get(_FILE) or "core_*.nvcudmp"
        is_on = environment.get(_SWITCH, "") not in ("", "0")
        yield GpuDumps(
            why=f"{theirs[0]} is set, so the doctor armed no core dump of its own",
            theirs=(rocm.any_of(pattern),) if is_on else (),
            since=time.time(),
        )
        return
    with own_folder("hypo-gpu-") as folder:
        free = shutil.disk_usage(folder).free
        if free < MIN_FREE_BYTES:
            yield GpuDumps(why=f"{folder.parent} has {free} bytes left, too few for a core dump")
            return
        variables = {
            _SWITCH: "1",
            _FILE: f"{folder}/%p.nvcudmp",
            "CUDA_COREDUMP_GENERATION_FLAGS": _LIGHT,
            "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
            "CUDA_COREDUMP_PIPE": f"{folder}/pipe.%p",
        }
        yield GpuDumps(variables, folder)
