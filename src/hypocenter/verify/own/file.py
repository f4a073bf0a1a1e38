"""`hypo verify FILE.py`: runs a file in a process of its own; a failing launch becomes a test."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hypocenter.base import package
from hypocenter.base.errors import HypoError, UsageError
from hypocenter.base.own_folder import own_folder
from hypocenter.verify.outcome import Verification
from hypocenter.verify.own.runtime import OwnReport, OwnRequest

_MAX_REPORT_BYTES = 64 << 20
_TEST = '''"""The smallest launch of {kernel} that was found wrong, written by `hypo verify`."""

from hypocenter.verify.own.file import require_right


def test_{kernel}() -> None:
    require_right({path!r}, {kernel!r}, {numbers!r})
'''


def verify_file(path: Path, arch: str, budget_seconds: float) -> tuple[Verification, OwnReport]:
    """Execute `path`, whose launches run on the CPU as on a GPU of `arch`, and what its references
    draw. The file's own output goes to stderr.

    Raises UsageError for no file, HypoError where it ended early or has no reference.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    started = time.perf_counter()
    report = _run(OwnRequest(str(path), arch, budget_seconds, ""))
    if report.error is not None:
        raise HypoError(f"{path} ended early: {report.error}")
    if not any(stage.num_covered or stage.findings for stage in report.stages):
        whys = "; ".join(item.why for stage in report.stages for item in stage.uncovered[:1])
        raise HypoError(
            f"{path}: no launch could be held against a reference ({whys or 'none was made'}); "
            "put @hypocenter.reference(kernel) beside a kernel"
        )
    outcome = Verification(
        model=str(path),
        device="cpu",
        hardware=f"launches on this processor, every access checked, as on {arch}",
        effort="file",
        budget_seconds=budget_seconds,
        stages=report.stages,
        seconds=time.perf_counter() - started,
    )
    return outcome, report


def write_tests(path: Path, report: OwnReport, folder: Path) -> Iterator[Path]:
    """Write a test for each kernel that was wrong on drawn inputs; each new file as it is written.

    Raises FileExistsError where one is there.
    """
    for kernel, numbers in report.smallest.items():
        place = folder / f"test_{kernel}_fails.py"
        with place.open("x") as file:
            file.write(_TEST.format(kernel=kernel, path=str(path.resolve()), numbers=numbers))
        yield place


def require_right(path: str, kernel: str, numbers: dict[str, int], arch: str = "sm_90") -> None:
    """Run one launch of a file's kernel in a process of its own; raises AssertionError with what
    is wrong."""
    report = _run(OwnRequest(path, arch, 60.0, "", kernel, numbers))
    assert report.error is None, report.error
    stages = [stage for stage in report.stages if stage.name == kernel]
    assert stages, f"{path} has no reference of {kernel} with a schema"
    for stage in stages:
        assert not stage.findings, "; ".join(f"{f.where}: {f.what}" for f in stage.findings)
        assert stage.num_covered, "; ".join(item.why for item in stage.uncovered)


def _run(asked: OwnRequest) -> OwnReport:
    with own_folder("hypo-verify-") as folder:
        place = folder / "report.json"
        request = msgspec.structs.replace(asked, report=str(place))
        done = subprocess.run(
            [
                *package.module_command("hypocenter.verify.own.runtime"),
                msgspec.json.encode(request),
            ],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            check=False,
        )
        if not place.is_file() or place.stat().st_size > _MAX_REPORT_BYTES:
            return OwnReport(error=f"its process ended with code {done.returncode} and no report")
        return msgspec.json.decode(place.read_bytes(), type=OwnReport)
