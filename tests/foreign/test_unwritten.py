"""Outputs that a launch of a foreign program leaves unwritten: proven where torch reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hypocenter.cli import app
from hypocenter.cli.child_run import environment_of
from hypocenter.foreign.argument_facts import UNDEFINED
from hypocenter.foreign.seen_reads import SeenReads, watch_reads
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


def test_what_nobody_reads_or_another_launch_writes_is_no_finding(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert doctor(capfd, monkeypatch, tmp_path, "healthy") == []


# -- what is seen of torch's operations -----------------------------------------------------------


@pytest.fixture
def told(request: pytest.FixtureRequest) -> list[tuple[int, str]]:
    return []


@pytest.fixture
def seen(told: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Looks at torch's operations for the time of a test."""
    looking = SeenReads(lambda number, name, site: told.append((number, name)))
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
    ],
)
def test_what_reads_nothing_unwritten_is_not_told(
    seen: SeenReads, told: list[tuple[int, str]], use: Any
) -> None:
    use(half(seen))
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
