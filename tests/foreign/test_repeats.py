"""A run with `--suspect`: small launches are made again, on copies of what they were given."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from pretended.fake_gpu_tensors import constexpr

from hypocenter.foreign import hooks, repeats
from hypocenter.foreign.closed_kernels import is_closed
from hypocenter.foreign.recorder import ForeignRecorder, LaunchPlace
from hypocenter.foreign.repeats import MAX_LAUNCH_BYTES, NUM_AGAIN, NUM_OF_FORM
from hypocenter.foreign.seen_memory import SeenMemory
from hypocenter.record.contents import LaunchOutcome
from hypocenter.record.events import SourceRecord
from hypocenter.record.trace_log import read_trace

#: Where the launches are made.
PLACE = LaunchPlace("interpreter")


def add_one(x, out, n, BLOCK: constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Stands for a Triton kernel, which adds 1."""


def take_listed(x, out, n, BLOCK: constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Stands for one that has addresses from memory."""
    tl.store(out, tl.load(tl.load(x).to(tl.pointer_type(tl.float32))))


@dataclass(eq=False)
class Jit:
    """A kernel of Triton's, as far as it is asked."""

    fn: Any


class Running:
    """Launches `act` as Triton would, recorded, and made again as `hooks.py` does it."""

    def __init__(self, folder: Path, act: Callable[..., None], kernel: Any = add_one) -> None:
        self.recorder = ForeignRecorder(folder, looks_closely=True)
        self.act = act
        self.jit: Any = Jit(fn=kernel)
        self.answer: Any = None

    def launch(self, *args: Any, **options: Any) -> None:
        made = self.recorder.record_launch(self.jit, args, options, (1,), PLACE)
        repeat = self.recorder.repeat
        self.act(*args, **options)
        if repeat is not None and made is not None:
            self.recorder.record_outcome(made, repeat, self.act, self.answer)

    @property
    def outcomes(self) -> tuple[LaunchOutcome, ...]:
        return read_trace(self.recorder.folder).outcomes


def plus_one(x: torch.Tensor, out: torch.Tensor, n: int, BLOCK: int) -> None:
    out.copy_(x + 1)


def two_in_one_memory() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Two storages of torch's that share bytes."""
    whole = bytearray(32)
    x = torch.frombuffer(whole, dtype=torch.float32, count=4)
    return x, torch.frombuffer(whole, dtype=torch.float32, count=4, offset=8), 4


def floats(data: bytes) -> list[float]:
    return torch.frombuffer(bytearray(data), dtype=torch.float32).tolist()


def test_all_that_a_launch_was_given_and_gave_is_kept(tmp_path: Path) -> None:
    run = Running(tmp_path, plus_one)
    x, out = torch.arange(4.0), torch.zeros(4)
    run.launch(x, out, 4, BLOCK=16)
    [outcome] = run.outcomes
    assert [floats(values.data) for values in outcome.given] == [[0, 1, 2, 3], [0, 0, 0, 0]]
    assert [floats(values.data) for values in outcome.gave] == [[1, 2, 3, 4]]
    assert (outcome.num_again, outcome.num_other, outcome.others) == (NUM_AGAIN, 0, ())
    assert out.tolist() == [1, 2, 3, 4]


def test_made_again_it_finds_what_it_was_given_and_leaves_the_programs_memory_alone(
    tmp_path: Path,
) -> None:
    def accumulate(x: torch.Tensor, out: torch.Tensor, n: int, BLOCK: int) -> None:
        out.add_(x.clone())

    run = Running(tmp_path, accumulate)
    whole = torch.ones(8)
    run.launch(whole[:4], whole[2:6], 4, BLOCK=16)  # two tensors in one memory
    [outcome] = run.outcomes
    assert outcome.num_other == 0
    assert whole.tolist() == [1, 1, 2, 2, 2, 2, 1, 1]


def test_other_bits_are_told_with_the_first_element(tmp_path: Path) -> None:
    calls: list[None] = []

    def unsteady(x: torch.Tensor, out: torch.Tensor, n: int, BLOCK: int) -> None:
        calls.append(None)
        out.copy_(x)
        out[2] += len(calls) // 4

    run = Running(tmp_path, unsteady)
    run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=16)
    [outcome] = run.outcomes
    assert (outcome.num_again, outcome.num_other) == (3, 2)
    [other] = outcome.others
    assert (other.element, other.num_elements) == (2, 1)
    assert floats(bytes.fromhex(other.first)) == [0.0]
    assert floats(bytes.fromhex(other.again)) == [1.0]
    assert not outcome.problem()


def test_what_others_do_with_the_programs_memory_meanwhile_says_nothing(tmp_path: Path) -> None:
    out = torch.zeros(4)

    def meanwhile(x: torch.Tensor, target: torch.Tensor, n: int, BLOCK: int) -> None:
        target[:2] = x[:2] + 1
        out[3] += 1  # another thread, in another part of it

    run = Running(tmp_path, meanwhile)
    run.launch(torch.arange(4.0), out, 4, BLOCK=16)
    [outcome] = run.outcomes
    assert outcome.num_other == 0
    assert [floats(values.data) for values in outcome.gave] == [[1, 2, 0, 0]]


def test_a_launch_that_took_long_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "MAX_SECONDS", 0.0)
    run = Running(tmp_path, plus_one)
    run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=16)
    assert run.outcomes == ()


@pytest.mark.parametrize("is_blocking", [False, True])
def test_what_compiled_a_kernel_before_the_launch_is_no_part_of_it(
    is_blocking: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1" if is_blocking else "0")
    monkeypatch.setattr(repeats, "MAX_SECONDS", 30.0)
    clock = time.monotonic

    def compile_first(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 100.0)
        plus_one(*args, **options)

    run = Running(tmp_path, compile_first)
    run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=16)
    # Where the launch itself waits for the GPU nobody knows what of it was compiling.
    assert len(run.outcomes) == (0 if is_blocking else 1)


def test_the_recorder_keeps_no_tensor_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = ForeignRecorder(tmp_path, looks_closely=True)
    monkeypatch.setattr(hooks._State, "recorder", recorder)
    launch = hooks._Launch(
        SimpleNamespace(fn=add_one), (torch.zeros(4), torch.zeros(4), 4), {"BLOCK": 16}, (1,), True
    )
    launch.looked_at(None)
    assert launch.repeat is not None
    assert recorder.repeat is None


@pytest.mark.parametrize(
    "given",
    [
        lambda: (torch.zeros(MAX_LAUNCH_BYTES // 4 + 1), torch.zeros(4), 4),
        lambda: (torch.zeros(4), SimpleNamespace(base=torch.zeros(4)), 4),
        lambda: (torch.zeros(4), torch.zeros(4, dtype=torch.complex64), 4),
        lambda: two_in_one_memory(),
    ],
    ids=["too much memory", "an argument of another kind", "a type that is not kept", "shared"],
)
def test_what_cannot_be_made_again_runs_once(tmp_path: Path, given: Callable[[], Any]) -> None:
    calls: list[None] = []
    run = Running(tmp_path, lambda *args, **options: calls.append(None))
    run.launch(*given(), BLOCK=16)
    assert (len(calls), run.outcomes) == (1, ())


def test_a_kernel_that_may_reach_beyond_its_arguments_runs_once(tmp_path: Path) -> None:
    run = Running(tmp_path, plus_one, kernel=take_listed)
    run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=16)
    assert run.outcomes == ()


def test_whoever_is_told_of_launches_is_told_of_none_twice(tmp_path: Path) -> None:
    run = Running(tmp_path, plus_one)
    run.jit.pre_run_hooks = [lambda *args, **options: None]
    run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=16)
    assert run.outcomes == ()


def test_a_hook_of_tritons_is_called_once_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    hook = SimpleNamespace(calls=[lambda metadata: None])
    monkeypatch.setattr(triton, "knobs", SimpleNamespace(
        runtime=SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=hook)
    ))  # fmt: skip
    run = Running(tmp_path, plus_one)
    run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=16)
    assert run.outcomes == ()
    hook.calls.clear()
    run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=16)
    assert len(run.outcomes) == 1


def test_there_is_room_around_a_copy(tmp_path: Path) -> None:
    """An access near a tensor must not land in memory of others."""
    seen = []

    def note(x: torch.Tensor, out: torch.Tensor, n: int, BLOCK: int) -> None:
        before = x.storage_offset() * x.element_size()
        seen.append((before, x.untyped_storage().nbytes() - before - 16))

    run = Running(tmp_path, note)
    run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=16)
    own, *copies = seen
    assert own == (0, 0)
    assert len(copies) == 1 + NUM_AGAIN
    assert all(min(room) >= 1 << 20 for room in copies)


def test_all_that_is_made_again_takes_so_long_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "MAX_ALL_SECONDS", 0.0)
    run = Running(tmp_path, plus_one)
    for block in (16, 32):
        run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=block)
    assert len(run.outcomes) == 1


def test_where_another_thread_has_launched_meanwhile_nothing_is_kept(tmp_path: Path) -> None:
    run = Running(tmp_path, plus_one)
    given = torch.zeros(4), torch.zeros(4), 4
    mine = run.recorder.record_launch(run.jit, given, {"BLOCK": 16}, (1,), PLACE)
    run.recorder.record_launch(run.jit, given, {"BLOCK": 16}, (1,), PLACE)
    assert mine is not None
    assert run.recorder.repeat is not None
    run.recorder.record_outcome(mine, run.recorder.repeat, run.act, None)
    assert run.outcomes == ()


@pytest.mark.parametrize("is_interpreted", [True, False])
def test_a_launch_of_tritons_is_made_again_where_a_gpu_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_interpreted: bool
) -> None:
    recorder, order = ForeignRecorder(tmp_path, looks_closely=True), []
    monkeypatch.setattr(hooks._State, "recorder", recorder)
    monkeypatch.setattr(hooks, "device_and_stream", lambda torch: ("cuda:0", ""))
    monkeypatch.setattr(hooks, "_limits", lambda: None)
    monkeypatch.setattr(hooks, "_over", lambda: order.append("over"))

    class Kernel(SimpleNamespace):
        def run(self, x: Any, out: Any, n: int, *, grid: Any, warmup: bool, BLOCK: int) -> None:
            grid({}) if callable(grid) else grid
            order.append("launch")
            out.copy_(x + 1)

    hooks._watch_launches(Kernel, is_interpreted=is_interpreted)
    tensors = torch.zeros(4), torch.zeros(4)
    kept = weakref.ref(tensors[1])
    Kernel(fn=add_one).run(*tensors, 4, grid=(1,), warmup=False, BLOCK=16)
    num_again = 0 if is_interpreted else 1 + NUM_AGAIN
    # What the deadline counts is over before it is made again.
    assert order == ["launch", "over", *["launch"] * num_again, "over"]
    [outcome] = read_trace(recorder.folder).outcomes
    assert outcome.num_again == max(0, num_again - 1)
    del tensors
    assert kept() is None


@pytest.mark.parametrize(
    ("line", "closed"),
    [
        ("tl.store(out, tl.sum(x.to(tl.float32)))", True),
        ("tl.store(out, x.to(out.dtype.element_ty))", True),
        ("tl.store(out, helper(tl.load(x)))", True),
        ("tl.atomic_add(out, tl.dot(x, x).sum())", True),
        ("tl.store(out, tl.load(tl.load(x).to(out.dtype)))", False),
        ("tl.store(out, tl.load(tl.load(x).to(P(tl.float32))))", False),
        ("tl.store(out, tl.load(x, volatile=True))", False),
        ("tl.atomic_cas(out, 0, 1)", False),
        ("tl.device_print('x', x)", False),
        ("print('x', x)", False),
        ("bump(out, 1)", False),
        ("while tl.load(x) == 0: pass", False),
        ("tl.store(out, tl.cast(x, out.dtype))", False),
        ("def (", False),
    ],
)
def test_which_kernels_touch_nothing_but_what_they_are_given(line: str, closed: bool) -> None:
    text = f"@triton.jit\ndef kernel(x, out):\n    {line}\n"
    helper = "@triton.jit\ndef helper(x):\n    return x * 2\n"
    sources = [
        SourceRecord(id=name, function=name, file="k.py", first_line=1, text=source)
        for name, source in (("kernel", text), ("helper", helper))
    ]
    assert is_closed(sources) == closed


def test_of_each_form_of_a_kernel_the_first_launches(tmp_path: Path) -> None:
    run = Running(tmp_path, plus_one)
    for _ in range(NUM_OF_FORM + 3):
        run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=16)
    run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=32)
    assert len(run.outcomes) == NUM_OF_FORM + 1


def test_what_the_compiler_made_is_kept_with_the_hash_of_what_ran(tmp_path: Path) -> None:
    run = Running(tmp_path, plus_one)
    asm = {"ttir": "module {}", "ptx": "x" * (1 << 19), "cubin": b"\x7fELF", "llir": "define"}
    run.answer = SimpleNamespace(asm=asm)
    run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=16)
    [outcome] = run.outcomes
    assert outcome.code.texts == {"ttir": "module {}"}  # the other is too long
    assert outcome.code.binary.startswith("3bdbb4fe")


def test_without_suspect_nothing_is_made_again(tmp_path: Path) -> None:
    run = Running(tmp_path, plus_one)
    run.recorder = ForeignRecorder(tmp_path / "other")
    run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=16)
    assert run.outcomes == ()


def test_a_launch_is_recorded_though_nothing_can_be_read_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a GPU that has failed, of which torch refuses every copy."""

    def refuse(self: Any, *_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(SeenMemory, "_look_into", refuse)
    recorder = ForeignRecorder(tmp_path, looks_closely=True)
    args = (torch.zeros(4), torch.zeros(4), 4)
    made = recorder.record_launch(SimpleNamespace(fn=add_one), args, {"BLOCK": 16}, (1,), PLACE)
    assert made is not None
    assert [argument.name for argument in made.launch.arguments][:2] == ["x", "out"]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_memory_of_the_host_that_a_gpu_reads_is_not_launched_with_copies(
    is_pinned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: is_pinned)
    run = Running(tmp_path, plus_one)
    run.launch(torch.zeros(4), torch.zeros(4), 4, BLOCK=16)
    assert len(run.outcomes) == (not is_pinned)
