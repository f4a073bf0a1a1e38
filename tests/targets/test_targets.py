"""Every kernel of the project, plain and guarded, for every architecture: minutes of compiling.

Each form is compiled plain for all architectures, and guarded for one: the guard's own code is the
same for all, so the forms of a kernel take turns. A kernel of few forms is guarded for all.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from specimens.project_kernels import all_specimens

from hypocenter.base.package import module_command
from hypocenter.check.compile_pool import Worker, compile_all
from hypocenter.check.compile_worker import Job
from hypocenter.cli.verbs.kernels import OWN_KERNELS
from hypocenter.device.limits import TABLE

OWN = module_command(OWN_KERNELS)
#: Of so many parts the one whose forms are compiled.
PART, PARTS = map(int, os.environ.get("TARGETS_PART", "1/1").split("/"))
SPECIMENS = all_specimens()
INDICES = range(PART - 1, len(SPECIMENS), PARTS)


def _turns() -> list[tuple[int, int]]:
    """Of each form: how many of its kernel come before it, and how many there are."""
    counts = Counter(specimen.name for specimen in SPECIMENS)
    before: Counter[str] = Counter()
    turns = []
    for specimen in SPECIMENS:
        turns.append((before[specimen.name], counts[specimen.name]))
        before[specimen.name] += 1
    return turns


TURNS = _turns()


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Worker, Worker]]:
    with Worker(OWN) as first, Worker(OWN) as second:
        first.start()
        yield first, second


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize(
    "index", INDICES, ids=[f"{SPECIMENS[at].name}-{SPECIMENS[at].label}" for at in INDICES]
)
def test_a_kernel_would_launch_on_every_target(
    workers: tuple[Worker, Worker], index: int, guarded: bool
) -> None:
    vendor = SPECIMENS[index].vendor
    archs = [arch for arch in TABLE if vendor in TABLE[arch].launched_as]
    turn, num_forms = TURNS[index]
    if guarded and num_forms >= len(archs):
        archs = [archs[turn % len(archs)]]
    jobs = [Job(index, arch, guarded) for arch in archs]
    records = compile_all(workers[0], jobs, workers[1], lambda _: None)
    assert {record.arch: record.problems for record in records if not record.ok} == {}
    assert [record.arch for record in records] == archs
    if not guarded:
        # A guarded kernel may spill; nobody measures its speed.
        assert {record.arch: record.spills for record in records if record.spills} == {}
