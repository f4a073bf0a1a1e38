"""The process in which kernels are compiled: reads jobs on stdin, writes records on stdout.

A compiler may end its process with a signal; then only this one is gone. Started by
`compile_pool.py` as `python -m hypocenter.check.compile_worker FILE.py ARCH`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import BinaryIO

import msgspec

from hypocenter.base.errors import HypoError
from hypocenter.device.limits import TABLE
from hypocenter.device.offline.specimen import Specimen, told_apart


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


def main(file: str, arch: str) -> None:
    """Serve the kernels that `file` launches when it runs as on a GPU of `arch`."""
    from hypocenter.check.specimens_of_file import record

    serve(lambda: record(file, arch))


def serve(collect: Callable[[], tuple[Sequence[Specimen], str]]) -> None:
    """Compile what `collect` gives until stdin ends; its text says why a file ended early."""
    # Whatever else writes to stdout, LLVM or a user's file, must not stand between the records.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        found, note = collect()
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
    _compile(specimens, answers)


def _compile(specimens: Sequence[Specimen], answers: BinaryIO) -> None:
    from hypocenter.device.offline.compile import compile_specimen

    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        _write(answers, compile_specimen(specimens[job.index], job.arch, guarded=job.guarded))


def _write(answers: BinaryIO, record: msgspec.Struct) -> None:
    answers.write(msgspec.json.encode(record) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
