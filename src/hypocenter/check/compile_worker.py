"""The process in which kernels are compiled: reads jobs on stdin, writes records on stdout.

A compiler may end its process with a signal; then only this one is gone. Started by
`compile_pool.py` as `python -m hypocenter.check.compile_worker [FILE.py ARCH]`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from hypocenter.device.limits import TABLE
from hypocenter.device.offline.specimen import Specimen, told_apart
from hypocenter.errors import HypoError


class Listed(msgspec.Struct, frozen=True):
    """A specimen as the parent sees it."""

    kernel: str
    label: str
    num_warps: int
    vendor: str = ""

    def runs_on(self, arch: str) -> bool:
        """Whether GPUs of an architecture of the table are launched so."""
        return self.vendor in TABLE[arch].launched_as


class Hello(msgspec.Struct, frozen=True):
    """A worker's first line: what it can compile, or why it cannot."""

    specimens: list[Listed] = []
    #: Why a file that was run for its launches ended early.
    note: str = ""
    error: str = ""
    exit_code: int = 0


class Job(msgspec.Struct, frozen=True):
    """A parent's line: compile this."""

    index: int
    arch: str
    guarded: bool


def main(argv: Sequence[str]) -> None:
    """Serve until stdin ends."""
    # Whatever else writes to stdout, LLVM or a user's file, must not stand between the records.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        found, note = collect(*argv)
    except HypoError as error:
        _write(answers, Hello(error=str(error), exit_code=error.exit_code))
        return
    specimens = told_apart(found)
    listed = [
        Listed(
            specimen.name,
            specimen.label,
            int(specimen.options.get("num_warps", 4)),
            specimen.vendor,
        )
        for specimen in specimens
    ]
    _write(answers, Hello(listed, note))
    _serve(specimens, answers)


def collect(file: str | None = None, arch: str = "sm_90") -> tuple[Sequence[Specimen], str]:
    """The project's specimens, or one for each kind of launch that `file` makes when it runs.

    The file sees a GPU of `arch`. The second value says why it ended early, if it did.
    """
    if file is not None:
        from hypocenter.check.specimens_of_file import record

        return record(file, arch)
    from hypocenter.model.offline.specimens import project_specimens

    return project_specimens(), ""


def _serve(specimens: Sequence[Specimen], answers: BinaryIO) -> None:
    from hypocenter.device.offline.compile import compile_specimen

    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        _write(answers, compile_specimen(specimens[job.index], job.arch, guarded=job.guarded))


def _write(answers: BinaryIO, record: msgspec.Struct) -> None:
    answers.write(msgspec.json.encode(record) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
