"""`hypo kernels`: compiles kernels for GPUs that are not there and prints what they would need."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.base.errors import EXIT_GATE, MissingPackage, UsageError
from hypocenter.base.package import module_command
from hypocenter.check.compile_pool import Worker, command_of_file, compile_all
from hypocenter.check.compile_worker import Job, Listed
from hypocenter.cli.output import say, show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.device.limits import named_archs
from hypocenter.device.offline.compiled import CompiledKernel

#: The module whose process compiles the kernels of this package.
OWN_KERNELS = "hypocenter.cli.own_kernels"
#: Below this many builds a second process takes longer to start than it saves.
WORTH_A_SECOND = 6


def kernels(
    file: str | None, archs: str, kernel: str | None, *, guarded: bool, as_json: bool
) -> None:
    """Print a table or JSON; leaves with EXIT_GATE when a kernel would not launch.

    Raises UsageError for an unknown architecture, kernel or file, HypoError without Triton.
    """
    targets = named_archs(archs)
    if file is not None and not Path(file).is_file():
        raise UsageError(f"{file}: no such file")
    for package in ("triton",) if file is None else ("triton", "torch"):
        if find_spec(package) is None:
            raise MissingPackage("compiling GPU kernels", package)
    own = module_command(OWN_KERNELS)
    command = own if file is None else command_of_file(file, targets[0])
    with Worker(command) as first, Worker(own) as second, ProgressDisplay() as progress:
        progress("collecting kernels", 0.0)
        first.start()
        chosen = choose(first.listed, kernel)
        jobs = jobs_of(first.listed, chosen, targets, guarded=guarded)
        # A file that runs has effects: one process runs it, again only after a compiler died.
        is_worth_it = file is None and len(jobs) >= WORTH_A_SECOND
        records = compile_all(
            first,
            jobs,
            second if is_worth_it else None,
            lambda num: progress(f"compiling {num} of {len(jobs)}", num / len(jobs)),
        )
    if as_json:
        show_json(_rows(records))
    else:
        show(table(records))
    if first.note:
        say(f"{file} ended early, so launches may be missing: {first.note}")
    if not as_json:
        say(LEGEND)
    for line in summary(records):
        say(line)
    if not all(record.ok for record in records):
        sys.exit(EXIT_GATE)


def _rows(records: Sequence[CompiledKernel]) -> list[dict[str, Any]]:
    return [
        {**msgspec.to_builtins(record), "problems": [str(problem) for problem in record.problems]}
        for record in records
    ]


def jobs_of(
    listed: Sequence[Listed], chosen: Sequence[int], archs: Sequence[str], *, guarded: bool
) -> list[Job]:
    """The chosen specimens for each architecture whose GPUs are launched so."""
    pairs = ((index, arch) for index in chosen for arch in archs)
    return [Job(index, arch, guarded) for index, arch in pairs if listed[index].runs_on(arch)]


def summary(records: Sequence[CompiledKernel]) -> list[str]:
    """Whether everything would launch, and which kernels not; which of them spill."""
    bad, slow = ([r for r in records if not r.ok], [r for r in records if r.spills])
    num_kernels, num_archs = (len({getattr(r, f) for r in records}) for f in ("kernel", "arch"))
    if bad:
        lines = [f"{len(bad)} of {len(records)} builds would not launch: {_kernels_of(bad)}"]
    else:
        kernels = f"{num_kernels} kernel{'s' * (num_kernels > 1)}"
        archs = f"{num_archs} architecture{'s' * (num_archs > 1)}"
        lines = [f"all {len(records)} builds of {kernels} for {archs} would launch"]
    if slow:
        lines.append(f"{len(slow)} of {len(records)} builds spill registers: {_kernels_of(slow)}")
    return lines


def _kernels_of(records: Iterable[CompiledKernel]) -> str:
    """Each kernel with the architectures at which it is among `records`."""
    archs: dict[str, dict[str, None]] = {}
    for record in records:
        archs.setdefault(record.kernel, {})[record.arch] = None
    return "; ".join(f"{kernel} ({', '.join(found)})" for kernel, found in archs.items())


def choose(listed: Sequence[Listed], kernel: str | None) -> list[int]:
    """Indices of the specimens of `kernel`, or of all; raises UsageError when there is none."""
    if not listed:
        raise UsageError("there are no kernels: the file launches none")
    if kernel is None:
        return list(range(len(listed)))
    # Logs and routes leave the suffix out.
    wanted = kernel.removesuffix("_kernel")
    chosen = [
        i for i, record in enumerate(listed) if record.kernel.removesuffix("_kernel") == wanted
    ]
    if chosen:
        return chosen
    import difflib

    names = sorted({record.kernel for record in listed})
    near = difflib.get_close_matches(kernel, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
    raise UsageError(f"no kernel {kernel!r}; {hint}")


LEGEND = (
    "registers and spills are per thread, shared memory is bytes per block and the limit, 12x128 "
    "means 12 instructions of 128 bits per thread"
)
HEADER = ("arch", "registers", "spills", "shared memory", "occupancy", "loads", "stores")


def table(records: Iterable[CompiledKernel]) -> str:
    """Text: a block for each specimen, a line for each architecture, a line for each remark."""
    lines: list[str] = []
    for (name, label, guarded), group in groupby(
        records, key=lambda record: (record.kernel, record.label, record.guarded)
    ):
        same = list(group)
        title = " ".join([name, *([f"({label})"] if label else []), *(["guarded"] * guarded)])
        rows = [HEADER, *(_cells(record) for record in same)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        lines += ["", title] if lines else [title]
        for index, row in enumerate(rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(f"  {'  '.join(cells)}".rstrip())
            lines += _remarks(same[index - 1]) if index else []
    return "\n".join(lines)


def _remarks(record: CompiledKernel) -> list[str]:
    """`!` before what keeps a kernel from launching, `~` before what only makes it slow."""
    remarks = [f"    ! {text}" for text in record.problems]
    if record.spills:
        remarks.append(
            f"    ~ {record.spills} registers of each thread live in memory; use smaller tiles or "
            "more warps"
        )
    return remarks


def _cells(record: CompiledKernel) -> tuple[str, ...]:
    if record.registers is None or record.occupancy is None:
        return (record.arch, *["-"] * (len(HEADER) - 1))
    limit = f", {record.limited_by}" if record.limited_by else ""
    return (
        record.arch,
        str(record.registers),
        str(record.spills),
        f"{record.shared_bytes}/{record.shared_limit}",
        f"{record.occupancy:.0%}{limit}",
        _widths(record.loads),
        _widths(record.stores),
    )


def _widths(counts: dict[int, int]) -> str:
    """`12x128 3x32`: twelve instructions of 128 bits per thread, three of 32."""
    return " ".join(f"{num}x{bits}" for bits, num in counts.items()) or "-"
