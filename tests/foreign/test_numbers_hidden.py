"""What `--nan` says of numbers that come of operations that it cannot see or look at."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from numbers_seen import events_of, judged, seen_natively

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, RootCause, Verdict
from hypocenter.record.nonfinite import NonFinite, NumbersWatched

torch: Any = pytest.importorskip("torch")
# Machine code takes a compiler: see `test_native_ops.py`.
WAYS = [pytest.param(True, marks=pytest.mark.tier("sim"), id="natively"), False]


@pytest.fixture(autouse=True, params=WAYS)
def is_native(request: pytest.FixtureRequest) -> Iterator[bool]:
    with seen_natively() if request.param else contextlib.nullcontext():
        yield request.param


def proven(program: Callable[[], object]) -> RootCause:
    """What the doctor proves of a run."""
    claim = judged(program)
    assert claim.root is not None, claim
    assert claim.root.cause is Cause.NONFINITE_VALUE
    return claim.root


def said_of(program: Callable[[], object]) -> str:
    """What the doctor says of a run of which it knows too little."""
    claim = judged(program)
    assert claim.hypothesis is not None, claim.root
    assert claim.hypothesis.verdict is Verdict.INCONCLUSIVE
    return sentence_of(claim)


def sentence_of(claim: Claim) -> str:
    assert claim.hypothesis is not None
    return " ".join(claim.hypothesis.evidence)


def modes() -> Any:
    return torch.utils._python_dispatch.TorchDispatchMode


def counting() -> Any:
    """A mode of the program's own, which counts operations."""

    class Counting(modes()):  # type: ignore[misc]
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    return Counting()


@functools.cache
def boxed() -> Any:
    """A class of tensors of the program's own, which hold plain ones."""

    class Boxed(torch.Tensor):  # type: ignore[misc]
        @staticmethod
        def __new__(cls: Any, plain: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)

        def __init__(self, plain: Any) -> None:
            self.plain = plain

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            bare = [a.plain if isinstance(a, Boxed) else a for a in args]
            return Boxed(func(*bare, **(kwargs or {})))

    return Boxed


def test_operations_below_a_mode_of_the_program_are_seen() -> None:
    def program() -> None:
        with counting():
            ratio = torch.zeros(3) / torch.zeros(3)
        ratio.sum().item()

    assert proven(program).kernel == "div"


def test_operations_below_two_modes_are_seen_once() -> None:
    def program() -> None:
        with counting(), counting():
            (torch.ones(3) * 2).sum()

    [watched] = [e for e in events_of(program) if isinstance(e, NumbersWatched)]
    assert watched.num_operations == 3


def test_a_mode_sees_no_operation_of_the_watch(*, is_native: bool) -> None:
    if not is_native:
        pytest.skip("the watch in Python is one more mode, of which torch itself detaches results")
    counts = []

    def program() -> None:
        with counting() as mode:
            x = torch.ones(3)
            x.mul_(2.0)
            x.sum().tolist()
        counts.append(mode.count)

    events_of(program)
    program()
    assert counts[0] == counts[1]


def test_what_tensors_of_the_programs_own_class_made_is_not_said_to_be_data() -> None:
    def program() -> None:
        ratio = boxed()(torch.zeros(3)) / boxed()(torch.zeros(3))
        ratio.plain.sum().item()

    said = said_of(program)
    assert "so it came in" not in said
    assert "whether it came in with the data is not known" in said


@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
def test_what_came_through_a_sparse_tensor_is_not_said_to_be_data(kind: str) -> None:
    def program() -> None:
        weights = getattr(torch.eye(3), kind)()
        with torch.no_grad():
            weights.values().div_(0.0)
        torch.mv(weights, torch.ones(3)).sum().item()

    said_of(program)


def test_a_sparse_result_hides_what_made_its_numbers() -> None:
    def program() -> None:
        ratio = (torch.zeros(3, 3) / torch.zeros(3, 3)).to_sparse()
        torch.mm(ratio, torch.ones(3, 1)).sum().item()

    claim = judged(program)
    assert claim.root is None
    said = sentence_of(claim)
    assert "so it came in" not in said


def test_a_sparse_tensor_is_no_failure() -> None:
    def program() -> None:
        (torch.eye(3).to_sparse() * 2).to_dense().sum().item()

    [watched] = [e for e in events_of(program) if isinstance(e, NumbersWatched)]
    assert not watched.problem


@pytest.mark.parametrize("is_view", [False, True])
def test_what_came_through_complex_numbers_is_not_said_to_be_data(is_view: bool) -> None:
    def program() -> None:
        ratio = torch.zeros(2, 2) / torch.zeros(2, 2)
        turned = torch.view_as_complex(ratio) * torch.tensor(1j)
        del ratio
        (torch.view_as_real(turned) if is_view else turned.abs()).sum().item()

    claim = judged(program)
    assert claim.root is None
    assert "so it came in" not in sentence_of(claim)


def test_what_was_copied_past_torch_is_not_said_to_be_data() -> None:
    def program() -> None:
        ratio = torch.zeros(3) / torch.zeros(3)
        (copy.deepcopy(ratio) * 2).sum().item()

    assert "copied past torch's operations" in said_of(program)


def test_what_another_thread_made_is_not_said_to_be_data() -> None:
    made: list[Any] = []

    def program() -> None:
        work = threading.Thread(target=lambda: made.append(torch.zeros(3) / torch.zeros(3)))
        work.start()
        work.join()
        (made[0] * 2).sum().item()

    assert "some were not looked at" in said_of(program)


def test_what_was_traced_is_not_said_to_be_data() -> None:
    made: list[Any] = []

    def ratio_of(x: Any) -> Any:
        ratio = (x - x) / (x - x)
        made.append(ratio.detach())
        return ratio

    def program() -> None:
        torch.jit.trace(ratio_of, (torch.ones(3),), check_trace=False)
        (made[0] * 2).sum().item()

    claim = judged(program)
    assert claim.root is not None or "so it came in" not in sentence_of(claim)


def test_data_is_still_said_to_be_data() -> None:
    data = torch.tensor([1.0, float("nan")])

    def program() -> None:
        (data * 2).sum().item()

    claim = judged(program)
    assert claim.hypothesis is not None
    assert claim.hypothesis.verdict is Verdict.CONFIRMED
    assert "so it came in with the data" in sentence_of(claim)


def test_memory_that_the_program_gives_back_is_not_read() -> None:
    def program() -> None:
        made = torch.zeros(4096) / torch.ones(4096)
        many = torch.zeros(1 << 19) + 1
        for tensor in (made, many):
            tensor.untyped_storage().resize_(0)
        torch._efficientzerotensor(3)
        (torch.zeros(3) / torch.zeros(3)).sum().item()

    events = events_of(program)
    [watched] = [event for event in events if isinstance(event, NumbersWatched)]
    assert not watched.problem
    assert [event.operation for event in events if isinstance(event, NonFinite)] == ["div"]
