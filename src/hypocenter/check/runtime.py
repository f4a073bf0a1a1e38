"""What runs inside the checked process: the user's file, with every launch replayed on the CPU.

Started by `check.py` as `python -m hypocenter.check.runtime REQUEST`; writes one JSON
record per line as things happen, so that a process that dies has told what it knew.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hypocenter.base.errors import HypoError, MissingPackage
from hypocenter.base.package import is_own_file
from hypocenter.check.report import CheckedLaunch
from hypocenter.replay.findings import Finding, Headroom

#: torch names every backend that it knows when one is missing.
_MAX_CHARS = 300


class CheckRequest(msgspec.Struct, frozen=True):
    """What to run, and where to write."""

    path: str
    arguments: list[str]
    arch: str
    budget_seconds: float
    report: str
    #: Whether each launch is executed as machine code of `arch` too.
    is_executed: bool = False


class End(msgspec.Struct, frozen=True):
    """The last line; `error` is why the program ended early, `exit_code` what it asked for."""

    error: str | None = None
    exit_code: int = 0


#: One line holds exactly one of these.
class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    launch: CheckedLaunch | None = None
    finding: Finding | None = None
    headroom: Headroom | None = None
    end: End | None = None


def main(argument: str) -> None:
    """Run the file of a request; the outcome stands in the report, so the exit code is 0."""
    request = msgspec.json.decode(argument, type=CheckRequest)
    with open(request.report, "ab", buffering=0) as out:

        def write(record: CheckedLaunch | Finding | Headroom) -> None:
            names = {CheckedLaunch: "launch", Finding: "finding", Headroom: "headroom"}
            _line(out, Line(**{names[type(record)]: record}))  # type: ignore[arg-type]

        _line(out, Line(end=_run(request, write)))


def _run(request: CheckRequest, write: Any) -> End:
    os.environ.pop("TRITON_INTERPRET", None)
    # NumPy's BLAS threads make small products many times slower on busy cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from hypocenter.check.pretend_gpu import OnCpu, keep, pretend
        from hypocenter.check.stream_order import StreamOrder
        from hypocenter.device.limits import named_gpu
    except HypoError as error:
        return End(str(error))
    except ImportError as error:
        return End(str(MissingPackage("a check", "torch" if error.name == "torch" else "triton")))
    launches = _launches(request, write)
    order = StreamOrder(launches.write_finding, launches.watch.is_of_host)
    launches.on_launch = order.note_launch
    pretend(named_gpu(request.arch), launches.watch)
    order.install()
    launches.install()
    sys.argv = [request.path, *request.arguments]
    sys.path.insert(0, str(Path(request.path).resolve().parent))
    try:
        mode = OnCpu(launches.watch.note_copy)
        keep(mode, order.functions)
        with mode, order.functions, launches.watch, order.operations:
            runpy.run_path(request.path, run_name="__main__")
    except SystemExit as left:
        return _left(left, launches)
    except HypoError as error:
        return End(str(error))
    except BaseException as error:
        return End(_describe(error))
    launches.watch.finish()
    return End()


def _launches(request: CheckRequest, write: Any) -> Any:
    from hypocenter.check.launches import Launches

    if not request.is_executed:
        return Launches(request.budget_seconds, write)
    from hypocenter.check.machine.triton_launches import MachineLaunches

    return MachineLaunches(request.budget_seconds, write, request.arch)


def _left(left: SystemExit, launches: Any) -> End:
    """sys.exit in the file; a code other than 0 is the file's own verdict and no error of ours."""
    launches.watch.finish()
    code = left.code if isinstance(left.code, int) else (0 if left.code is None else 1)
    return End(None if code == 0 else f"the program left by sys.exit({left.code!r})", code)


def _describe(error: BaseException) -> str:
    """The exception and the user's line that led to it; the traceback goes to stderr."""
    _print_traceback(error)
    lines = [
        f"{frame.f_code.co_filename}:{line}: "
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not _is_ours(frame.f_code.co_filename)
        and "site-packages" not in frame.f_code.co_filename
    ]
    text = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{lines[-1] if lines else ''}{name}{f': {text[0][:_MAX_CHARS]}' if text else ''}"


def _print_traceback(error: BaseException) -> None:
    """As Python would for the file itself: without the frames that ran it."""
    shown = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shown
    while part is not None:
        frames = [frame for frame in part.stack if not _is_ours(frame.filename)]
        part.stack = traceback.StackSummary.from_list(frames)
        part = part.__cause__ or part.__context__
    print("".join(shown.format()), end="", file=sys.stderr)


def _is_ours(file: str) -> bool:
    return file.startswith("<") or is_own_file(file)


def _line(out: BinaryIO, line: Line) -> None:
    out.write(msgspec.json.encode(line) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
