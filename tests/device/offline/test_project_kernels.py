"""The project's GPU kernels against the limits of GPUs that are not there; all: `tests/targets`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from specimens.project_kernels import first_specimens

from hypocenter.base.package import module_command
from hypocenter.check.compile_pool import Worker, compile_all
from hypocenter.check.compile_worker import Job
from hypocenter.cli.verbs.kernels import OWN_KERNELS
from hypocenter.device.limits import TABLE
from hypocenter.device.offline.compile import compile_specimen
from hypocenter.device.offline.compiled import CompiledKernel

OWN = module_command(OWN_KERNELS)
#: Wide waves, narrow waves, NVIDIA: each kernel is compiled for these.
MAIN = ("gfx942", "gfx1100", "sm_90")
#: Most forms of a kernel that are compiled here; `tests/targets` compiles all.
FORMS = 3
OTHERS = [arch for arch in TABLE if arch not in MAIN]


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Worker, Worker]]:
    with Worker(OWN) as first, Worker(OWN) as second:
        first.start()
        yield first, second


def _assert_launchable(records: list[CompiledKernel]) -> None:
    names = [f"{record.kernel} {record.label} {record.arch}" for record in records]
    bad = {name: r.problems for name, r in zip(names, records, strict=True) if not r.ok}
    spilled = {name: r.spills for name, r in zip(names, records, strict=True) if r.spills}
    assert (bad, spilled) == ({}, {})


@pytest.mark.parametrize("arch", MAIN)
@pytest.mark.tier("targets")
def test_every_kernel_would_launch_without_spills(
    workers: tuple[Worker, Worker], arch: str
) -> None:
    jobs = [Job(index, arch, guarded=False) for index in _of_each_kernel(workers[0], arch)]
    _assert_launchable(compile_all(workers[0], jobs, workers[1], lambda _: None))


def _of_each_kernel(worker: Worker, arch: str) -> list[int]:
    """Specimens of every kernel, at most FORMS evenly spread ones of each."""
    forms: dict[str, list[int]] = {}
    for index in _launched_on(worker, arch):
        one = worker.listed[index]
        forms.setdefault(one.kernel, []).append(index)
    return [
        same[at * len(same) // min(FORMS, len(same))]
        for same in forms.values()
        for at in range(min(FORMS, len(same)))
    ]


def _launched_on(worker: Worker, arch: str) -> list[int]:
    return [index for index, one in enumerate(worker.listed) if one.runs_on(arch)]


@pytest.mark.parametrize("at", range(len(OTHERS)), ids=OTHERS)
def test_each_other_target_builds_a_kernel(at: int) -> None:
    """A different one for each, so that together they see more than the first kernel."""
    specimens = [*first_specimens().values()]
    _assert_launchable(
        [compile_specimen(specimens[at * len(specimens) // len(OTHERS)], OTHERS[at])]
    )
