"""Kills decoding processes at random moments, and reads what each has left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from faults.report import environment_of
from hypocenter.record import ring
from hypocenter.record.events import Allocated, Stepped


def kill_at_random(runs: Path, num_kills: int, seed: int) -> list[ring.Run]:
    """What was readable after each kill; raises AssertionError for a record that is not whole."""
    found, moments = [], random.Random(seed)
    environment = {**environment_of(), "HYPO_RUN_DIR": str(runs)}
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("recorder_child.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
    ) as child:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        for _ in range(num_kills):
            child.stdin.write("\n")
            child.stdin.flush()
            pid, folder = child.stdout.readline().split()
            time.sleep(moments.random() * 0.05)
            os.kill(int(pid), signal.SIGKILL)
            assert child.stdout.readline() == "dead\n"
            run = ring.read_run(Path(folder))
            examine(run, int(pid))
            found.append(run)
        child.stdin.close()
    return found


def examine(run: ring.Run, pid: int) -> None:
    """Whatever moment it was, all of this holds."""
    assert run.missing == ()
    assert (run.pid, run.is_alive, run.is_clean) == (pid, False, False)
    plans = {plan.id: plan for plan in run.plans}
    tensors = {tensor.id for tensor in run.tensors}
    steps = [event for event in run.events if isinstance(event, Stepped)]
    submitted = run.progress.submitted
    assert submitted is not None
    assert 0 <= submitted.launch < len(plans[submitted.plan].launches)
    # The event of a step is there before its first launch.
    assert steps[-1].step - submitted.step in (0, 1)
    assert (submitted.step, submitted.plan) in {(event.step, event.plan) for event in steps[-2:]}
    seqs = [event.seq for event in run.events]
    assert seqs == sorted(set(seqs))
    allocations = {e.allocation.id for e in run.events if isinstance(e, Allocated)}
    assert {tensor.allocation for tensor in run.tensors} <= allocations
    for event in steps:
        assert event.plan in plans
        assert {values.tensor for values in event.inputs} <= tensors
        assert len(event.inputs) == 7
        assert [request.row for request in event.requests] == list(range(len(event.requests)))
    for plan in run.plans:
        for launch in plan.launches:
            named = {one.tensor for one in (*launch.arguments, *launch.facts)} - {None}
            assert named <= tensors


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        runs = kill_at_random(Path(folder), int(sys.argv[1]), seed=int(sys.argv[2]))
        steps = [run.progress.submitted.step for run in runs if run.progress.submitted]
        launches = {run.progress.submitted.launch for run in runs if run.progress.submitted}
        print(
            f"{len(runs)} processes killed, every ring readable; steps {min(steps)} to "
            f"{max(steps)}, {len(launches)} different launches, "
            f"{time.perf_counter() - started:.0f} s"
        )
