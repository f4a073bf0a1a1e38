"""`hypo doctor --self-test`: plants a fault on this machine, and says what of it could be seen.

The planted program goes the way of any other: run, watched, collected, saved, examined.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from hypocenter.base.errors import EXIT_GATE, MissingPackage, UsageError
from hypocenter.base.own_folder import own_folder
from hypocenter.base.package import module_command
from hypocenter.base.wording import count_text
from hypocenter.cli.child_run import environment_of
from hypocenter.cli.output import say, show, show_json
from hypocenter.cli.tool_options import DoctorOptions
from hypocenter.doctor.diagnosis import Diagnosis, RootCause
from hypocenter.doctor.doctor import diagnose
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle
from hypocenter.record.gap import GapKind
from hypocenter.settings.environment import Environment
from hypocenter.watch import collect, dead_runs, foreign_runs, gpu_dumps
from hypocenter.watch.child import Deadlines, watch

_PROGRAM = "hypocenter.foreign.planted_gpu"
_KERNEL, _ARGUMENT, _LINE = "take_rows", "ids_ptr", "tl.load(table_ptr + index * WIDTH + column)"
#: PyTorch's import and a compiler's first kernel take most of it.
_SECONDS = 300.0
_INTERPRETED = "TRITON_INTERPRET"


class Source(msgspec.Struct, frozen=True):
    """A source of evidence: whether it gave any here, and what, or why not."""

    name: str
    works: bool
    detail: str


class SelfTest(msgspec.Struct, frozen=True):
    """`runs_on`: a GPU's name, or that Triton's interpreter ran it. `found`: what was proven."""

    runs_on: str
    is_proven: bool
    found: str
    sources: tuple[Source, ...]
    seconds: float


def self_test(words: Sequence[str], options: DoctorOptions, *, as_json: bool) -> None:
    """Print the table; leaves with EXIT_GATE when the planted fault is not proven.

    Raises UsageError for what else was asked for, MissingPackage without Triton and torch.
    """
    if words or options != DoctorOptions(self_test=True):
        raise UsageError("--self-test examines a program of its own; give it alone, or with --json")
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(
                "--self-test, which plants a fault into a Triton program,", package
            )
    say("running a small program with one wrong index; its fault is wanted")
    bundle = _break_program()
    diagnosis = diagnose(bundle, allow_source=True)  # the text is ours
    result = SelfTest(
        runs_on=_device_of(bundle),
        is_proven=any(map(_is_planted, diagnosis.roots)),
        found=diagnosis.roots[0].sentence if diagnosis.roots else "no root cause is proven",
        sources=tuple(_sources(bundle, diagnosis)),
        seconds=diagnosis.seconds,
    )
    if as_json:
        show_json(result)
    else:
        show(_table(result))
    if not result.is_proven:
        sys.exit(EXIT_GATE)


def _break_program() -> Bundle:
    """What the planted program left, saved and read again as a user's would be."""
    with (
        dead_runs.watched_runs(Environment.read().run_dir) as runs,
        own_folder("hypo-self-test-") as folder,
    ):
        environment = environment_of(runs, is_own=False)
        if not _has_gpu():
            environment[_INTERPRETED] = "1"
        deadlines = Deadlines(_SECONDS, _SECONDS, start=_SECONDS, idle=_SECONDS)
        with open(os.devnull, "wb") as nowhere:
            ended = watch(
                module_command(_PROGRAM), environment, runs, _ignore, deadlines, nowhere.fileno()
            )
        bundle = collect.collect(runs, ended, suspect=True)
        assert bundle is not None  # of what is suspected there is always one
        bundles.save(bundle, folder / "bundle")
        return bundles.load(folder / "bundle")


def _has_gpu() -> bool:
    """Asked of the driver's files: a context of our own would be one more on the GPU."""
    return gpu_dumps.has_driver() or Path("/dev/kfd").exists()


def _ignore(data: bytes) -> None:
    """The traceback of a planted fault is no news."""


def _device_of(bundle: Bundle) -> str:
    if bundle.device == "interpreter":
        return "Triton's interpreter, for there is no GPU"
    name = bundle.limits.get("name") if bundle.limits else None
    return str(name or bundle.device or "no device was recorded")


def _is_planted(root: RootCause) -> bool:
    return (
        root.kernel == _KERNEL
        and root.argument == _ARGUMENT
        # A core dump tells the whole statement, and no line where it has none.
        and _LINE in (root.expression or _LINE)
    )


def _sources(bundle: Bundle, diagnosis: Diagnosis) -> Iterator[Source]:
    launches = foreign_runs.launches(bundle.events)
    yield Source(
        "launches",
        bool(launches),
        f"{count_text(len(launches), 'launch', 'launches')} recorded"
        if launches
        else _why_unrecorded(bundle),
    )
    fault = bundle.fault
    yield Source(
        "fault",
        fault.kind != "none",
        fault.message.splitlines()[0][:200] if fault.message else "the program ended as if well",
    )
    yield Source(
        "fault address",
        fault.address is not None,
        f"{fault.address:#x}"
        if fault.address is not None
        else "neither runtime nor kernel reported it",
    )
    yield Source("stack", bool(fault.stack), "of Python" if fault.stack else "none on stderr")
    reasons = {gap.what: gap.reason for gap in bundle.missing}
    yield Source(
        "core dump of the GPU",
        bool(diagnosis.sights),
        count_text(len(diagnosis.sights), "stop") + " read"
        if diagnosis.sights
        else reasons.get(gpu_dumps.WHAT, "there is no driver of NVIDIA's that writes one"),
    )
    yield Source(
        "log of the kernel",
        collect.KERNEL_LOG not in reasons,
        reasons.get(collect.KERNEL_LOG, "readable"),
    )
    refused = [gap for gap in diagnosis.unseen if gap.kind is GapKind.NOT_REPLAYED]
    yield Source(
        "replay on the CPU",
        not refused and bool(launches),
        str(refused[0]) if refused else f"{diagnosis.seconds:.1f} s for the whole diagnosis",
    )


def _why_unrecorded(bundle: Bundle) -> str:
    lost = [gap for gap in bundle.missing if gap.what.startswith("the launches of process")]
    return str(lost[0]) if lost else "none was recorded"


def _table(result: SelfTest) -> str:
    width = max(len(source.name) for source in result.sources)
    lines = [f"RUNS ON    {result.runs_on}", ""]
    lines += [
        f"{source.name:<{width}}  {'works' if source.works else '-    '}  {source.detail}"
        for source in result.sources
    ]
    verdict = "proven" if result.is_proven else "NOT PROVEN"
    lines += ["", f"PLANTED    one index of {_ARGUMENT} in {_KERNEL}: {verdict}"]
    lines += [f"           {result.found}"]
    return "\n".join(lines)
