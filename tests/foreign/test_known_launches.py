"""Launches that are told in short read back as if they had been told in full."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended.fake_gpu_tensors import JIT, FakeTensor, Launching, Storage
from repository import SUPPORT

from hypocenter.foreign import known_launches
from hypocenter.foreign.recorder import ForeignRecorder, LaunchPlace
from hypocenter.record import ring
from hypocenter.record.events import Launched, LaunchRecord, Repeated

Recorders = tuple[ForeignRecorder, ForeignRecorder]


@pytest.fixture
def both(tmp_path: Path) -> Recorders:
    """One as it is, and one that tells every launch in full."""
    return ForeignRecorder(tmp_path / "short"), ForeignRecorder(tmp_path / "full", is_guarded=True)


def launches(recorder: ForeignRecorder) -> list[tuple[int, LaunchRecord]]:
    run = ring.read_run(recorder.folder)
    return [(event.step, event.launch) for event in run.events if isinstance(event, Launched)]


def num_short(recorder: ForeignRecorder, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many launches were written in short."""
    found: list[Any] = []
    monkeypatch.setattr(ring, "full_launch", lambda event, known: found.append(event))
    ring.read_run(recorder.folder)
    monkeypatch.undo()
    return len(found)


def test_a_storage_that_comes_back_to_its_place_is_another_allocation(both: Recorders) -> None:
    """As sharded training resizes its weights to nothing, and back."""
    weight, other = Storage(0x1000, 256), Storage(0x1000, 256)
    allocations: list[list[int]] = []
    for recorder in both:
        launch = Launching(recorder)
        for _ in range(3):
            launch[(1,)](FakeTensor(weight, (64,)), None, 1)
        weight.address = 0
        launch[(1,)](FakeTensor(other, (64,)), None, 1)
        other.address, weight.address = 0, 0x1000
        for _ in range(3):
            launch[(1,)](FakeTensor(weight, (64,)), None, 1)
        other.address = 0x1000
        of = {tensor.id: tensor.allocation for tensor in ring.read_run(recorder.folder).tensors}
        made = [launched.arguments[0].tensor for _, launched in launches(recorder)]
        allocations.append([of[tensor] for tensor in made if tensor is not None])
    assert allocations[0] == allocations[1]
    first, between, last = (allocations[0][at] for at in (0, 3, 4))
    assert len({first, between, last}) == 3


def test_what_changes_from_launch_to_launch_is_told(
    both: Recorders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grid, numbers, their types, constants, types and places of tensors, lines: all as in full."""
    storages = [Storage(0x1000, 256), Storage(0x2000, 256)]
    chosen = random.Random(29)
    usual: Any = 0, (64,), torch.float32, 0, {"BLOCK": 1}, "a.py:1", "", False
    others: Any = (
        1, (8, 8), torch.int32, 4, {"BLOCK": True}, "a.py:2", "0x10", True
    )  # fmt: skip
    ways = [(*usual[:at], others[at], *usual[at + 1 :]) for at in range(8)]
    ways += [usual, (*usual[:4], {"BLOCK": torch.half, "num_warps": 8}, *usual[5:])]
    for _ in range(1000):
        if chosen.random() < 0.02:  # other memory at an address of before
            at = chosen.randrange(2)
            storages[at] = Storage(storages[at].address, 256)
        place, shape, dtype, offset, constants, line, stream, is_named = chosen.choice(ways)
        x = FakeTensor(storages[place], shape, dtype, offset)
        out = chosen.choice([None, FakeTensor(storages[0], (64,))])
        n = chosen.choice([1, 2, True, 1.0, 0, 2**63, 2**64, -(2**63) - 1, None, "text"])
        grid = chosen.choice([(4,), (5, 2), 7])
        args, named = ((x,), {"n": n, "out_ptr": out}) if is_named else ((x, out, n), {})
        for recorder in both:
            place = LaunchPlace("cuda:0", stream, line)
            recorder.record_launch(JIT, args, {**constants, **named}, grid, place)
    short, full = both
    assert launches(short) == launches(full)
    assert [repr(one) for one in launches(short)] == [repr(one) for one in launches(full)]
    assert ring.read_run(short.folder).tensors == ring.read_run(full.folder).tensors
    assert num_short(short, monkeypatch) > 50
    assert num_short(full, monkeypatch) == 0


def test_a_launch_may_leave_an_argument_to_its_default(both: Recorders) -> None:
    x = FakeTensor(Storage(0x1000, 256), (64,))
    for recorder in both:
        launch = Launching(recorder)[(1,)]
        for number in range(12):
            launch(x, x, number) if number % 3 else launch(x, x)
    short, full = both
    assert launches(short) == launches(full)


def test_a_launch_like_others_takes_a_few_bytes(
    both: Recorders, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = FakeTensor(Storage(0x1000, 256), (64,))
    for recorder in both:
        launch = Launching(recorder)[(1,)]
        for number in range(12_000):
            launch(x, x, number)
    monkeypatch.setattr(ring, "MAX_REPEATED", 100_000)
    assert len(launches(both[0])) == 12_000
    assert len(launches(both[1])) < 11_000
    # The first has a new tensor, the next a type of tensors that is new, and two make a kind known.
    assert num_short(both[0], monkeypatch) == 12_000 - 3


def test_of_launches_in_short_the_newest_are_read(
    both: Recorders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a doctor would look at ten times as many as before. None is missing between two."""
    monkeypatch.setattr(ring, "MAX_REPEATED", 5)
    x = FakeTensor(Storage(0x1000, 256), (64,))
    graph = torch.nn.Identity()  # stands for one; its launch is kept, since it may be replayed yet
    both[0].record_capture(graph)
    both[0].record_launch(JIT, (x, x, 99), {"BLOCK": 1}, (1,), LaunchPlace("cuda:0"), graph)
    both[0].record_captured(graph, [], "a.py:1")
    for number in range(20):
        Launching(both[0])[(1,)](x, x, number)
    given = [launch.arguments[2].value for _, launch in launches(both[0])]
    assert given == [99, 15, 16, 17, 18, 19]


def test_a_log_that_begins_anew_learns_anew(tmp_path: Path) -> None:
    recorder = ForeignRecorder(tmp_path / "runs", static_bytes=20_000)
    known = FakeTensor(Storage(0x1000, 256), (64,))
    for number in range(300):
        launch = Launching(recorder)[(number,)]
        launch(known, known, number)
        launch(known, FakeTensor(Storage(0x2000 + 512 * number, 256), (64,)), number)
    Launching(recorder)[(300,)](known, known, 300)  # where a tensor had no room, it begins anew
    told = launches(recorder)
    assert len(told) < 601
    assert all(launch.grid == ((step - 1) // 2,) for step, launch in told)
    tensors = {tensor.id for tensor in ring.read_run(recorder.folder).tensors}
    assert {argument.tensor for _, launch in told for argument in launch.arguments[:2]} <= tensors


def test_kinds_that_are_too_many_are_told_in_full(
    both: Recorders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_launches, "MAX_KINDS", 4)
    tensors = [FakeTensor(Storage(0x1000 * number, 256), (64,)) for number in range(1, 8)]
    for recorder in both:
        launch = Launching(recorder)[(1,)]
        for number in range(60):
            x = tensors[number % (7 if number < 30 else 2)]
            launch(x, x, number)
    assert launches(both[0]) == launches(both[1])
    assert num_short(both[0], monkeypatch) > 10


def test_memory_that_moved_is_not_taken_for_that_of_before(both: Recorders) -> None:
    """Torch resizes a storage; what it had goes to another one of the same size."""
    first, second = Storage(0x1000, 256), Storage(0x2000, 256)
    for recorder in both:
        launch = Launching(recorder)[(1,)]
        for at, other in ((0x1000, 0x2000), (0x3000, 0x1000), (0x1000, 0x3000)):
            first.address, second.address = at, other
            for storage in (first, second) * 4:
                launch(FakeTensor(storage, (64,)), FakeTensor(storage, (64,)), 64)
    assert launches(both[0]) == launches(both[1])


def test_a_view_with_other_strides_is_told(both: Recorders) -> None:
    storage = Storage(0x1000, 256)
    plain, turned = FakeTensor(storage, (8, 8)), FakeTensor(storage, (8, 8))
    turned.stride = lambda: (1, 8)  # type: ignore[method-assign]
    for recorder in both:
        for x in (plain, turned) * 5:
            Launching(recorder)[(1,)](x, None, 64)
    assert launches(both[0]) == launches(both[1])
    assert len({launch.arguments[0].tensor for _, launch in launches(both[0])}) == 2


def test_what_launches_were_is_missed_when_that_record_is_damaged(tmp_path: Path) -> None:
    recorder = ForeignRecorder(tmp_path / "runs")
    x = FakeTensor(Storage(0x1000, 256), (64,))
    for _ in range(10):
        Launching(recorder)[(1,)](x, x, 64)
    recorder.close()
    static = recorder.folder / "static"
    data = bytearray(static.read_bytes())
    data[-3] ^= 1  # the last record there, which is the kind of the launches
    static.write_bytes(data)
    run = ring.read_run(recorder.folder)
    assert len([event for event in run.events if isinstance(event, Launched)]) == 3
    assert not any(isinstance(event, Repeated) for event in run.events)
    assert "it is not known what 7 launches were" in [gap.reason for gap in run.missing]


CHILD = """
import os, signal, sys
from pathlib import Path
from pretended.fake_gpu_tensors import FakeTensor, Launching, Storage
from hypocenter.foreign.recorder import ForeignRecorder, LaunchPlace
recorder = ForeignRecorder(Path(sys.argv[1]))
x = FakeTensor(Storage(0x1000, 256), (64,))
for number in range(1000):
    Launching(recorder)[(1,)](x, x, number)
os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_process_that_is_killed_leaves_every_launch(
    tmp_path: Path, number: signal.Signals
) -> None:
    path = os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), str(int(number))], check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": path}, capture_output=True,
    )  # fmt: skip
    assert ended.returncode == -number
    [folder] = ring.run_folders(tmp_path)
    made = [event for event in ring.read_run(folder).events if isinstance(event, Launched)]
    assert [event.launch.arguments[2].value for event in made] == [*range(1000)]


def test_a_function_that_is_no_tensor_is_told_in_full(both: Recorders) -> None:
    def other() -> Callable[..., None]:
        return other  # type: ignore[return-value]

    for recorder in both:
        for _ in range(5):
            Launching(recorder)[(1,)](other, (1, 2), 64)
    assert launches(both[0]) == launches(both[1])
