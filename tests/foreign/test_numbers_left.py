"""What machine code looks at under `--nan`: what is left of a run of operations, then each of them.

`test_nonfinite.py` has the programs that it judges. Here they meet the ends of such a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from numbers_seen import events_of, judged, native_ops, seen_natively

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import RootCause
from hypocenter.record.nonfinite import NonFinite

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.tier("sim")  # it takes a compiler: see `test_native_ops.py`
INF = float("inf")


@pytest.fixture(autouse=True)
def natively() -> Iterator[None]:
    with seen_natively():
        yield


def flush() -> None:
    """A run of operations ends here."""
    native = native_ops()
    assert native is not None
    native.code.numbers.flush(False)


def born(program: Callable[[], object]) -> list[NonFinite]:
    """Where the watch saw numbers become NaN or infinite."""
    return [event for event in events_of(program) if isinstance(event, NonFinite)]


def proven(program: Callable[[], object]) -> RootCause:
    """What the doctor proves of a run."""
    claim = judged(program)
    assert claim.root is not None, claim.hypothesis
    assert claim.root.cause is Cause.NONFINITE_VALUE
    return claim.root


def divided() -> Any:
    return torch.ones(3) / torch.tensor([1.0, 0.0, 2.0])


def test_what_nobody_has_any_more_is_not_looked_at() -> None:
    def masked() -> None:
        ratio = divided()
        kept = torch.where(torch.tensor([True, False, True]), ratio, torch.zeros(3))
        del ratio
        flush()
        kept.sum().item()

    assert not born(masked)


def test_what_somebody_still_has_is() -> None:
    def kept() -> None:
        ratio = divided()
        flush()
        del ratio

    [event] = born(kept)
    assert event.operation == "div"


def test_while_a_graph_is_captured_nothing_is_looked_at() -> None:
    native = native_ops()
    assert native is not None
    numbers = native.code.numbers

    def kept() -> None:
        ratio = divided()
        numbers.set_capturing(True)
        flush()
        assert numbers.num_ops() > 0
        numbers.set_capturing(False)
        flush()
        assert numbers.num_ops() == 0
        del ratio

    assert born(kept)


def keep_nothing(ratio: Any) -> list[Any]:
    return [ratio]


def keep_view(ratio: Any) -> list[Any]:
    return [ratio[1:].view(2, 1)]


def keep_gradient(ratio: Any) -> list[Any]:
    """The graph alone has it."""
    weight = torch.ones(3, requires_grad=True)
    return [(weight * ratio.clone()).sum(), weight]


def keep_written(ratio: Any) -> list[Any]:
    """What is written in place, by a view of it."""
    buffer = torch.zeros(4, 3)
    buffer[2].copy_(ratio)
    return [buffer]


@pytest.mark.parametrize("keep", [keep_nothing, keep_view, keep_gradient, keep_written])
def test_it_is_named_though_it_came_out_in_a_later_run(keep: Callable[[Any], list[Any]]) -> None:
    def program() -> None:
        kept = keep(divided())
        flush()
        if len(kept) == 2:
            kept[0].backward()
            kept = [kept[1].grad]
        for _ in range(3):
            kept = [part * 1.0 for part in kept]
            flush()
        kept[0].sum().item()

    assert proven(program).kernel == "div"


def write_whole(buffer: Any) -> None:
    buffer.copy_(divided())


def write_row(buffer: Any) -> None:
    buffer[2].copy_(divided())


def write_list(buffer: Any) -> None:
    torch._foreach_copy_([buffer[1], buffer[2]], [torch.ones(3), divided()])


@pytest.mark.parametrize("write", [write_whole, write_row, write_list])
def test_what_is_written_into_memory_of_an_earlier_run_is_looked_at(
    write: Callable[[Any], None],
) -> None:
    """Only the write has a result that is left."""
    buffer = torch.zeros(4, 3)

    def program() -> None:
        write(buffer)
        flush()
        buffer.sum().item()

    assert proven(program).kernel == "div"


def test_a_parameter_that_is_not_finite_any_more_is_told_of() -> None:
    weight = torch.ones(3, requires_grad=True)

    def program() -> None:
        with torch.no_grad():
            weight.div_(torch.tensor([1.0, 0.0, 2.0]))
        flush()

    assert proven(program).kernel == "div"


def test_what_was_asked_for_is_looked_at_though_it_is_gone() -> None:
    def program() -> None:
        if torch.isnan(divided() * 0).any():
            flush()
            raise ValueError("NaN")

    assert proven(program).kernel == "div"


def test_a_test_of_a_tensor_does_not_pass_for_who_keeps_it() -> None:
    def program() -> None:
        ratio = divided()
        kept = ratio * 2
        torch.isnan(ratio)
        torch.isnan(kept)
        ratio.fill_(1.0)
        flush()
        kept.sum().item()

    assert proven(program).kernel == "div"


def test_a_program_that_ends_by_it_has_all_of_its_last_run_looked_at() -> None:
    def program() -> None:
        divided() * 0
        raise ValueError("the loss is NaN")

    assert born(program)


@pytest.mark.parametrize("num_elements", [3, 1 << 17, (1 << 18) + 3])  # bytes, large, many
def test_of_what_is_written_in_place_the_numbers_of_before_are_known(num_elements: int) -> None:
    def program() -> None:
        x = torch.full((num_elements,), 300.0)
        x.mul_(2.0)
        x[1:].div_(torch.zeros(num_elements - 1))
        x.add_(1.0)
        x.sum().item()

    root = proven(program)
    assert root.kernel == "div"
    assert "self[0] = 600" in root.sentence


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
@pytest.mark.parametrize("place", [0, 4095])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2]
)
def test_of_each_type_what_is_left_is_seen(dtype: Any, place: int, bad: float) -> None:
    def program(made: float) -> None:
        numbers = torch.full((4096,), 448.0, dtype=torch.float32)
        numbers[place] = made
        kept = numbers.to(dtype)
        del numbers
        flush()
        del kept

    assert born(lambda: program(bad))
    assert not born(lambda: program(torch.finfo(dtype).max))
