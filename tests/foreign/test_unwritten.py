"""Outputs that a launch of a foreign program leaves unwritten: proven where torch reads them."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hypocenter.base.errors import EXIT_FAULT
from hypocenter.check.tensors import fill_undefined
from hypocenter.cli import app
from hypocenter.cli.child_run import environment_of
from hypocenter.foreign.argument_facts import UNDEFINED
from hypocenter.foreign.seen_reads import SeenRead, SeenReads, watch_reads
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import (
    ArgumentRecord,
    Launched,
    LaunchRecord,
    TensorRecord,
    UnwrittenRead,
)
from hypocenter.record.fault_record import FaultRecord

SCRIPT = Path(__file__).parent / "programs" / "tails.py"


def doctor(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str
) -> Any:
    """The roots of `hypo doctor --suspect`, with Triton's interpreter."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    capfd.readouterr()
    with pytest.raises(SystemExit):
        app.main(["doctor", "--suspect", "--json", "--", sys.executable, str(SCRIPT), *words])
    return json.loads(capfd.readouterr().out)["roots"]


def test_an_output_that_torch_reads_unwritten_is_proven(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A launch that is like it, and right, comes later."""
    [root] = doctor(capfd, monkeypatch, tmp_path)
    assert (root["cause"], root["kernel"]) == ("output not written", "double")
    assert (root["argument"], root["tensor"]) == ("out_ptr", "out")
    lines = SCRIPT.read_text().splitlines()
    mask = lines.index("    mask = at < n") + 1
    assert (root["file"], root["line"]) == (str(SCRIPT), mask)
    reader = lines.index('    print("sum", out.sum().item())') + 1
    missing = "6 of 96 elements of shape (96,), from [90] to [95]"
    assert f"{missing}; sum reads it at {SCRIPT}:{reader}" in root["sentence"]
    assert root["proof"]["corrected"] == f"`at < 96` in line {mask}"
    assert root["effect"]["num_filled"] == 6
    assert "no such finding" in root["proof"]["green"]


@pytest.mark.tier("whole")
def test_of_launches_that_add_to_what_nobody_wrote_the_first_is_told(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What they leave is a NaN with the same bits, and the first has written it."""
    monkeypatch.setitem(globals(), "SCRIPT", SCRIPT.with_name("summed.py"))
    [root] = doctor(capfd, monkeypatch, tmp_path)
    assert (root["cause"], root["argument"]) == ("uninitialised read", "w_ptr")
    assert "the replay of launch 1 at" in root["proof"]["red"]


@pytest.mark.tier("whole")
def test_the_command_to_attach_gives_the_result_that_was_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    script = str(SCRIPT.with_name("compared.py"))
    command = ["doctor", "--suspect", "--", sys.executable, script, "assert_close"]
    with pytest.raises(SystemExit):
        app.main(command)
    shown = " ".join(capfd.readouterr().out.split())
    attached = re.findall(r"the output of `hypo (doctor [^`]*)`", shown)
    with pytest.raises(SystemExit) as left:
        app.main(shlex.split(attached[0]))
    assert left.value.code == EXIT_FAULT
    again = " ".join(capfd.readouterr().out.replace("\\", "").split())
    missing = "232 of 1000 elements of shape (1000,), from [768] to [999]"
    for said in ("grid too small", missing, f"{script}:27"):
        assert said in shown
        assert said in again
    assert "none found" not in again
    # And so does the command that replays the launch.
    assert "--run-sources" in re.findall(r"REPLAY (hypo replay [^\n]*?) PROOF", shown)[0]


def test_what_nobody_reads_or_another_launch_writes_is_no_finding(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert doctor(capfd, monkeypatch, tmp_path, "healthy") == []


# -- what is seen of torch's operations -----------------------------------------------------------


@pytest.fixture
def reads() -> list[SeenRead]:
    """All that was told."""
    return []


@pytest.fixture
def told() -> list[tuple[int, str]]:
    """What one number came of: tensor and operation."""
    return []


@pytest.fixture
def seen(
    reads: list[SeenRead], told: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Looks at torch's operations for the time of a test."""

    def tell(read: SeenRead) -> None:
        reads.append(read)
        if read.is_decided:
            told.append((read.tensor, read.operation))

    looking = SeenReads(tell)
    for method in ("__repr__", "tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, method, getattr(torch.Tensor, method))
    modes: list[Any] = []

    class Kept(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __enter__(self) -> Any:
            modes.append(self)
            return super().__enter__()  # type: ignore[no-untyped-call]

    monkeypatch.setattr("torch.utils._python_dispatch.TorchDispatchMode", Kept)
    watch_reads(torch, lambda: looking, lambda do, *args: do(*args))
    yield looking
    modes[0].__exit__(None, None, None)


def half(seen: SeenReads) -> torch.Tensor:
    """A tensor of 8 numbers of which a launch has written 4."""
    tensor = torch.zeros(8)
    tensor.view(torch.uint8).fill_(UNDEFINED)
    seen.look_at(tensor, 7)
    tensor[:4] = 1.0
    return tensor


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda x: x.sum(), "sum"),
        (lambda x: x.reshape(2, 4)[1].max(), "max"),
        (lambda x: x.dot(torch.ones(8)), "dot"),
        (lambda x: torch.equal(x, torch.ones(8)), "equal"),
        (lambda x: torch.var_mean(x), "var_mean"),
        (lambda x: x[4:].item() if x[4:].numel() == 1 else x[7].item(), "_local_scalar_dense"),
        (lambda x: x[::2].mean(), "mean"),
    ],
)
def test_a_read_of_what_was_not_written_is_told_once(
    seen: SeenReads, told: list[tuple[int, str]], read: Any, name: str
) -> None:
    x = half(seen)
    read(x)
    read(x)
    assert told == [(7, name)]


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[:4].sum(),
        lambda x: (x.shape, x.view(2, 4), x.numel(), x.stride()),
        lambda x: torch.zeros_like(x),
        lambda x: x.new_zeros(3),
        lambda x: x.zero_().sum(),
        lambda x: x.copy_(torch.ones(8)).sum(),
        lambda x: (x[4:].fill_(2.0), x.sum()),
        lambda x: x[torch.tensor([0, 3])],
        lambda x: x.clone()[:4].sum(),
        lambda x: torch.where(torch.arange(8) < 4, x, 0.0).sum(),
        lambda x: x.masked_fill(torch.arange(8) >= 4, 0.0).sum(),
        lambda x: x.reshape(2, 4).sum(1)[0].item(),
        lambda x: torch.linalg.inv_ex(x[4:].reshape(2, 2)),  # of which one result is a number
        lambda x: (x.reshape(2, 4) @ torch.ones(4))[0].item(),
        lambda x: x[torch.tensor([0])],
        lambda x: torch.ones(8).sum(),
        # What was not written is masked, cut off or chosen away behind an operation.
        lambda x: (x - 1.0)[:4].abs().max(),
        lambda x: (x * 2 * (torch.arange(8) < 4)).sum(),
        lambda x: ((x == 1.0) & (torch.arange(8) < 4)).sum(),
        lambda x: ((x == 1.0) | (torch.arange(8) >= 4)).all(),
        lambda x: (x + torch.where(torch.arange(8) < 4, 0.0, -torch.inf)).max(),
        lambda x: torch.where(torch.arange(8) < 4, x - 1.0, 0.0).max(),
        lambda x: x.clone().mul_(torch.arange(8) < 4).sum(),
        lambda x: x.mul_((torch.arange(8) < 4).float()).sum(),
        lambda x: (x.reshape(2, 4) * 3).sum(1)[0].item(),
        lambda x: (x - 1.0)[torch.arange(8) < 4].sum(),
        lambda x: torch.cat([x, x])[torch.tensor([0, 9])].sum(),
        lambda x: x.reshape(2, 4).softmax(1)[0].sum(),
        lambda x: (x - 1.0).fill_(3.0).sum(),
        lambda x: torch.nn.functional.cross_entropy(
            x.reshape(2, 4), torch.tensor([1, -100]), ignore_index=-100
        ),
        lambda x: (print(x), x.tolist(), x.numpy().sum()),
    ],
)
def test_what_reads_nothing_unwritten_is_not_told(
    seen: SeenReads, told: list[tuple[int, str]], use: Any
) -> None:
    use(half(seen))
    assert told == []


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda x: (x - torch.ones(8)).abs().max(), "max"),
        (lambda x: (x == torch.ones(8)).all(), "all"),
        (lambda x: torch.allclose(x, torch.ones(8)), "allclose"),
        (lambda x: torch.sub(x, 1.0).pow(2).mean(), "mean"),
        (lambda x: torch.isclose(x, torch.ones(8)).sum(), "sum"),
        (lambda x: x.clone().sub_(1.0).abs_().max().item(), "max"),
        (lambda x: (x.reshape(2, 4) * 3).sum(1)[1].item(), "_local_scalar_dense"),
        (lambda x: (x.reshape(2, 4) @ torch.ones(4, 4))[1].sum(), "sum"),
        (lambda x: torch.nn.functional.mse_loss(x, torch.ones(8)), "mse_loss"),
        (lambda x: torch.cat([torch.ones(8), x])[12:].sum(), "sum"),
        (lambda x: x.double().to(torch.float32).sum(), "sum"),
    ],
)
def test_what_comes_to_one_number_by_way_of_others_is_told_once(
    seen: SeenReads, told: list[tuple[int, str]], read: Any, name: str
) -> None:
    x = half(seen)
    read(x)
    read(x)
    assert told == [(7, name)]


def test_assert_close_is_a_comparison(seen: SeenReads, told: list[tuple[int, str]]) -> None:
    with pytest.raises(AssertionError):
        torch.testing.assert_close(half(seen), torch.ones(8))
    assert told == [(7, "all")]


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda x: x * 2, "mul"),
        (lambda x: x[4:] + 1, "add"),
        (lambda x: x == 1.0, "eq"),
        (lambda x: x.reshape(2, 4).sum(1), "sum"),
        (lambda x: x.to(torch.float64), "_to_copy"),
        (lambda x: x.sort(), "sort"),
        (lambda x: x[torch.tensor([3, 4])], "index"),
        (lambda x: f"{x}", "print"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.numpy(), "numpy"),
    ],
)
def test_any_other_read_is_told_with_what_was_not_written_and_decides_nothing(
    seen: SeenReads, reads: list[SeenRead], read: Any, name: str
) -> None:
    x = half(seen)
    read(x)
    read(x)
    [found] = reads
    assert (found.operation, found.is_decided) == (name, False)
    assert (found.num_unwritten, found.num_elements) == (4, 8)
    assert (found.first, found.last) == ((4,), (7,))
    assert found.site.startswith(f"{__file__}:")


def test_indices_are_those_of_the_tensor_that_the_launch_was_given(
    seen: SeenReads, reads: list[SeenRead]
) -> None:
    rows = torch.zeros(4, 8)
    rows.view(torch.uint8).fill_(UNDEFINED)
    rows[:, :6] = 1.0
    seen.look_at(rows, 3)
    rows[1:3].mul(2.0)
    [found] = reads
    assert (found.num_unwritten, found.num_elements) == (4, 32)
    assert (found.first, found.last) == ((1, 6), (2, 7))


def test_what_a_launch_is_given_is_followed_no_further(
    seen: SeenReads, told: list[tuple[int, str]]
) -> None:
    twice = half(seen) * 2
    seen.forget(twice)
    twice.sum()
    assert told == []


def test_what_is_read_in_a_launch_is_not_torchs(
    seen: SeenReads, told: list[tuple[int, str]]
) -> None:
    x = half(seen)
    seen.is_in_launch = True
    x.sum()
    assert told == []
    seen.is_in_launch = False
    x.sum()
    assert told == [(7, "sum")]


def test_a_read_is_that_of_the_launch_that_was_given_the_tensor_last() -> None:
    tensors = tuple(
        TensorRecord(
            id=number, name="out", owner="", dtype="F32", shape=(8,), strides=(1,), offset=0,
            allocation=number, address=4096 * number, extent_bytes=32,
        )
        for number in (1, 2)
    )  # fmt: skip

    def launched(seq: int, tensor: int) -> Launched:
        launch = LaunchRecord(
            kernel="k", function="k", device="interpreter",
            arguments=(ArgumentRecord("out_ptr", tensor), ArgumentRecord("n", None, 3)),
        )  # fmt: skip
        return Launched(seq=seq, step=seq, launch=launch)

    def read(seq: int, tensor: int) -> UnwrittenRead:
        return UnwrittenRead(seq=seq, step=0, tensor=tensor, operation="sum", site=f"a.py:{seq}")

    index = BundleIndex(
        Bundle(
            kind="suspect", fault=FaultRecord(kind="none", message=""), tensors=tensors,
            events=(read(1, 1), launched(2, 1), launched(3, 1), launched(4, 2), read(5, 1),
                    read(6, 1), read(7, 9)),
        )
    )  # fmt: skip
    assert {seq: event.site for seq, event in index.unwritten_reads.items()} == {3: "a.py:5"}


def test_a_program_is_compiled_as_it_is_without(seen: SeenReads) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(4))
    assert len(graphs) == 1


@pytest.mark.tier("whole")
def test_the_compiler_is_loaded_and_used_as_without(tmp_path: Path) -> None:
    """To load it takes longer than all else that a small program does."""
    environment = environment_of(tmp_path, suspect=True, is_own=False)
    ran = subprocess.run(
        [sys.executable, str(SCRIPT.with_name("compiling.py"))],
        env=environment | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    is_loaded, watched, alone = ran.stdout.split()
    assert is_loaded == "False"
    assert watched == alone


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int8, torch.int64, torch.bool]
)
def test_what_nobody_wrote_is_tried_as_the_largest_number_of_its_type(
    dtype: torch.dtype, sign: int
) -> None:
    """A maximum of large numbers takes it, where a number of any type's would be below them."""
    held = torch.ones(3, dtype=dtype)
    data = held.view(torch.uint8).numpy()
    written = np.ones(data.size, bool)
    written[-dtype.itemsize :] = False
    fill_undefined(data, dtype, written, sign * math.inf)
    limits = (
        None
        if dtype == torch.bool
        else (torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype))
    )
    wanted = 1 if limits is None else limits.max if sign > 0 else limits.min
    assert held.tolist() == [1, 1, wanted]
