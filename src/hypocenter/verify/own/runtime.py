"""What runs in the process of `hypo verify FILE.py`: the file, and then launches that are drawn.

Started as `python -m hypocenter.verify.own.runtime REQUEST`; writes one JSON object at its end.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.base.errors import HypoError, MissingPackage
from hypocenter.verify.outcome import (
    Mistake,
    PlantedError,
    Stage,
    StageVerdict,
    Uncovered,
    verdict_of,
)

_ASKS = "does the kernel compute what its reference does?"


class OwnRequest(msgspec.Struct, frozen=True):
    """What to run, and where to write. `only`: this kernel with these numbers, and no other."""

    path: str
    arch: str
    budget_seconds: float
    report: str
    only: str = ""
    numbers: dict[str, int] | None = None


class OwnReport(msgspec.Struct, frozen=True):
    """A stage for each kernel; `error`: why the file ended early. `smallest`: of kernels that were
    wrong on drawn inputs, the smallest numbers that still are."""

    stages: tuple[Stage, ...] = ()
    error: str | None = None
    smallest: dict[str, dict[str, int]] = {}


def main(argument: str) -> None:
    """Run the file of a request; the outcome stands in the report, so the exit code is 0."""
    request = msgspec.json.decode(argument, type=OwnRequest)
    report = _run(request)
    Path(request.report).write_bytes(msgspec.json.encode(report))


def _run(request: OwnRequest) -> OwnReport:
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        from hypocenter.verify.own.launches import HeldLaunches
    except ImportError as error:
        missing = "torch" if error.name == "torch" else "triton"
        return OwnReport(error=str(MissingPackage("a verification of kernels", missing)))
    launches, problem = HeldLaunches(request.budget_seconds), None
    smallest: dict[str, dict[str, int]] = {}
    sys.argv = [request.path]
    sys.path.insert(0, str(Path(request.path).resolve().parent))
    with on_pretended_gpu(launches, request.arch):
        try:
            name = "__main__" if request.numbers is None else "__verify__"
            runpy.run_path(request.path, run_name=name)
        except SystemExit as left:
            if left.code:
                problem = f"the file left by sys.exit({left.code!r})"
        except HypoError as error:
            problem = str(error)
        except BaseException as error:  # the file's own; whatever it is, it ended the file
            traceback.print_exception(error)
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            smallest = _run_schemas(launches, request)
        launches.watch.finish()
    return OwnReport(tuple(map(_stage, launches.kernels.values())), problem, smallest)


@contextlib.contextmanager
def on_pretended_gpu(launches: Any, arch: str) -> Iterator[None]:
    """Every launch goes through `launches`, on the CPU, as on a GPU of `arch`.

    For a process that does nothing else: Triton is not put back.
    """
    from hypocenter.check.pretend_gpu import OnCpu, pretend
    from hypocenter.device.limits import named_gpu

    pretend(named_gpu(arch), launches.watch)
    launches.install()
    with OnCpu(launches.watch.note_copy), launches.watch:
        yield


def _run_schemas(launches: Any, request: OwnRequest) -> dict[str, dict[str, int]]:
    """Make the launches of each schema; the smallest numbers of those that were wrong."""
    from hypocenter.verify.own import schema
    from hypocenter.verify.own.numbers import BadReference
    from hypocenter.verify.own.reference import references

    smallest = {}
    for reference in references():
        name = schema.name_of(reference)
        if reference.draw is None or request.only not in ("", name):
            continue
        try:
            found = _first_wrong(launches, reference, request.numbers)
        except BadReference as error:
            launches.kernel(name).leave(f"its schema cannot be used: {error}")
        else:
            if found is not None:
                smallest[name] = found
    return smallest


def _first_wrong(
    launches: Any, reference: Any, numbers: dict[str, int] | None
) -> dict[str, int] | None:
    """The numbers of a launch that is wrong: of those that were asked for, or the smallest."""
    from hypocenter.verify.own import schema
    from hypocenter.verify.own.launches import shrink

    def is_wrong(numbers: dict[str, int]) -> bool:
        before = launches.num_wrong
        schema.launch(reference, numbers)
        return bool(launches.num_wrong > before)

    if numbers is not None:
        return numbers if is_wrong(numbers) else None
    first = next((drawn for drawn in schema.numbers_of(reference) if is_wrong(drawn)), None)
    return None if first is None else shrink(first, schema.constants_of(reference), is_wrong)


def _stage(kernel: Any) -> Stage:
    canary = PlantedError(
        "one number off by more than twice its bound", kernel.num_planted, kernel.num_seen
    )
    findings: list[Mistake] = kernel.findings or []
    verdict = verdict_of(findings, canary, kernel.num_held)
    if findings and verdict is StageVerdict.NOT_RUN:
        verdict = StageVerdict.WRONG
    return Stage(
        name=kernel.name,
        asks=_ASKS,
        verdict=verdict,
        things="launches",
        num_covered=kernel.num_held,
        num_all=kernel.num_launches,
        num_checks=kernel.num_held,
        canary=canary,
        findings=tuple(findings),
        uncovered=tuple(Uncovered("launches", why) for why in kernel.why_not or ()),
        details={"largest_share_of_a_bound": kernel.worst},
    )


if __name__ == "__main__":
    main(sys.argv[1])
