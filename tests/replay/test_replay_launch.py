"""From a guarded plan's report to the reason: the reported program replayed on copies."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from models.tiny_gguf import write_tiny
from ops import kernel_launch
from ops.kernel_launch import counts, rows_tensor, tensor

from hypocenter.base.errors import EXIT_FAULT, AccessRefused, UsageError
from hypocenter.base.tensor import Tensor
from hypocenter.device import copies, devices
from hypocenter.device.launch import Launch
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.kernels.attention import rope
from hypocenter.record.guard_faults import AccessFault
from hypocenter.replay.live import explain, replay_launch


def _plan(positions: list[int], device: str) -> tuple[Plan, Launch, Tensor]:
    builder, x = PlanBuilder(3, device), rows_tensor("x", np.ones((3, 128), np.float32))
    cos, sin = (tensor(name, np.full((8, 32), 0.5, np.float32)) for name in ("cos", "sin"))
    rope.rotate(
        builder, x, tensor("positions", np.array(positions, np.int32)), (cos, sin), counts(3),
        num_heads=2, head_dim=64, style="neox",
    )  # fmt: skip
    return Plan(builder, x), builder.launches[0], x


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kernel_launch, "device", devices.open_device("sim:mi300x"))
    return "sim:mi300x"


def test_the_guard_says_that_and_the_replay_says_why(device: str) -> None:
    plan, launch, _ = _plan([0, 1, 9], device)
    plan.set_mode("guarded")
    with pytest.raises(AccessRefused) as caught:
        plan.run()
    fault = caught.value.faults[0]
    assert isinstance(fault, AccessFault)
    report = explain(fault, launch)
    assert report.coverage.num_run == 1
    first = report.findings[0]
    assert (first.kind, first.argument, first.program) == (
        "out of bounds",
        "cos_ptr",
        fault.program,
    )
    assert first.values["position"] == 9
    assert first.number == 9 * 32
    assert first.line == fault.site.calls[0].line


def test_right_launches_have_no_findings_and_are_left_alone(device: str) -> None:
    _, launch, x = _plan([0, 1, 7], device)
    report = replay_launch(launch)
    assert report.findings == ()
    assert report.coverage.num_run == 3 * 2
    assert (copies.to_host(x)[:, :128] == 1).all()


def test_a_launch_of_an_nvidia_gpu_is_replayed_without_its_instructions(device: str) -> None:
    _, launch, _ = _plan([0, 1, 9], device)
    launch.options = {**launch.options, "OVERLAPS": True}
    finding = replay_launch(launch).findings[0]
    assert (finding.kind, finding.argument) == ("out of bounds", "cos_ptr")


#: Stands for a scheduler's mistake that the runner's checks do not see.
_PLANTED = """
import sys
from dataclasses import replace
from hypocenter.cli.app import main
from hypocenter.engine import runner, step

def wrong(chunks, cache, made=step.make_batch):
    batch = made(chunks, cache)
    batch.block_tables[0, 0] = 1_000
    return batch

step.make_batch = wrong
runner.Runner._check = lambda self, batch: None
main(sys.argv[1:])
"""


def _refused(tmp_path: Path, program: str) -> list[str]:
    """What the command writes to stderr when its access was refused, but for its progress."""
    words = ("<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a")
    model = write_tiny(tmp_path / "tiny.gguf", num_layers=2, tokens=words)
    done = subprocess.run(
        [sys.executable, "-c", program, "run", str(model), "-p", "ab", "-n", "2", "-c", "64",
         "--device", "sim:h200", "--launch-mode", "guarded"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == EXIT_FAULT, done.stderr
    lines = [line.removeprefix("hypo: ") for line in done.stderr.splitlines()]
    return [line for line in lines if not line.endswith(" ...")]


@pytest.mark.tier("sim")
def test_without_torch_the_command_says_what_it_can(tmp_path: Path) -> None:
    lines = _refused(tmp_path, f"import sys\nsys.modules['torch'] = None\n{_PLANTED}")
    assert re.match(r"attention\w*_kernel: load of byte \d+ of [kv]_cache_ptr, outside", lines[0])
    assert lines[-2] == "not replayed, so no index and no values: that needs torch"
    assert lines[-1].startswith("sim:h200: attention")


@pytest.mark.tier("sim")
def test_the_command_says_why_an_access_was_refused(tmp_path: Path) -> None:
    lines = _refused(tmp_path, _PLANTED)
    text = "\n".join(lines)
    assert re.match(r"attention\w*_kernel: load of byte \d+ of [kv]_cache_ptr, outside", text), text
    assert "k_cache_ptr is k_cache.0 of kv_cache: Tensor(k_cache.0: F16 [4, 1, 10, 16]" in text
    assert re.search(r"replay of program .*\n.*_gpu\.py:\d+: out of bounds: load of k_cache", text)
    assert re.search(r"lane \(.*past the last of shape \(4, 1, 10, 16\)", text), text
    assert "page=1000" in text  # one KV head: the entry of the table itself
    assert "the same in 1 more: launch" in text  # of the second layer
    assert lines[-1].startswith("sim:h200: attention")
    assert "(and 3 more)" in lines[-1]


def test_a_cpu_kernel_is_not_replayed() -> None:
    _, launch, _ = _plan([0, 1, 2], "cpu")
    with pytest.raises(UsageError, match="rope runs on the CPU; replay is for GPU kernels"):
        replay_launch(launch)
