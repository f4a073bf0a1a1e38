"""A comparison that fails where no program comes, and others that fail for another reason."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

pytest.importorskip("triton")
from recorded.failed_comparison import with_failed_comparison
from recorded.program_launch import Launch

from hypocenter.base.dtypes import Array
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.events import Launched, UnwrittenRead

DOUBLED = """
def doubled_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)
"""
#: Rows and blocks of columns.
TILED = """
def tiled_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0) * n + i
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=i < n) * 2, mask=i < n)
"""
#: Either axis reaches what is left, by other programs.
EITHER = DOUBLED.replace("tl.program_id(0) *", "(tl.program_id(0) + 4 * tl.program_id(1)) *")
X = np.arange(1, 41, dtype=np.float32)
WANT = 2 * X


def examined(
    grid: tuple[int, ...],
    gave: Array,
    *,
    text: str = DOUBLED,
    n: int = 40,
    want: Array = WANT,
    first: int | None = None,
    **constants: int,
) -> Diagnosis:
    """Of a program that doubles X in blocks of 8, and compares what it gave."""
    shape = gave.shape
    launch = Launch(
        text,
        {"x_ptr": ("F32", shape), "y_ptr": ("F32", shape)},
        {"n": n} | ({} if first is None else {"first": first}),
        grid=grid,
        constants={"BLOCK": 8} | constants,
        held={"x_ptr": X[: gave.size].reshape(shape), "y_ptr": np.zeros(shape, np.float32)},
    )
    bundle = launch.bundle(gave={"y_ptr": gave})
    if first is not None:  # and a launch before it that was alike
        [launched] = (event for event in bundle.events if isinstance(event, Launched))
        before = msgspec.structs.replace(launched, seq=launched.seq - 1)
        bundle = msgspec.structs.replace(bundle, events=(before, *bundle.events))
    bundle = with_failed_comparison(bundle, gave, want.reshape(shape))
    return diagnose(bundle, allow_source=True)


def zeros_from(first: int, shape: tuple[int, ...] = (40,)) -> Array:
    gave: Array = WANT[: np.prod(shape)].reshape(shape).copy()
    gave[..., first:] = 0
    return gave


@pytest.mark.parametrize("num_blocks", [4, 2, 1])
def test_a_grid_that_ends_too_early_is_named_over_zeros(num_blocks: int) -> None:
    [root] = examined((num_blocks,), zeros_from(8 * num_blocks)).roots
    assert (root.cause, root.kernel, root.argument) == (Cause.GRID_TOO_SMALL, "doubled", "y_ptr")
    rounding = ": round up as `triton.cdiv` does" if num_blocks == 4 else ""
    assert root.fix == f"Launch 5 along x and not {num_blocks}{rounding}"
    num_missing = 40 - 8 * num_blocks
    assert f"no program of the grid reaches {num_missing} of 40 elements" in root.sentence
    assert not root.alternatives


#: As many programs as there are processors take turns.
IN_TURNS = """
def turns_kernel(x_ptr, y_ptr, n, NUM: tl.constexpr, BLOCK: tl.constexpr):
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), NUM):
        i = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)
"""


def test_what_each_program_does_may_be_what_is_too_little() -> None:
    """A block of 8 where the grid counts with 16, and steps of 4 among 2 programs."""
    [root] = examined((2,), zeros_from(16, (32,)), n=32, want=WANT[:32]).roots
    assert root.cause is Cause.GRID_TOO_SMALL
    assert [one.fix for one in root.alternatives] == [
        "Launch 4 along x and not 2", "Pass BLOCK = 16 and not 8",
    ]  # fmt: skip
    gave = zeros_from(16, (32,))
    [root] = examined((2,), gave, text=IN_TURNS, n=32, want=WANT[:32], NUM=4).roots
    assert [one.fix for one in root.alternatives] == [
        "Launch 4 along x and not 2", "Pass BLOCK = 16 and not 8", "Pass NUM = 2 and not 4",
    ]  # fmt: skip


#: What --suspect fills memory with that nobody has written.
NOBODY = np.full(32, 0xFFFFFFFF, np.uint32).view(np.float32)


def over_empty_memory(grid: int, text: str = DOUBLED, **constants: int) -> Diagnosis:
    """Of 32 elements in blocks of 8, which torch has read where not all were written."""
    launch = Launch(
        text,
        {"x_ptr": ("F32", (32,)), "y_ptr": ("F32", (32,))},
        {"n": 32},
        grid=(grid,),
        constants={"BLOCK": 8} | constants,
        held={"x_ptr": X[:32], "y_ptr": NOBODY},
    )
    bundle = launch.bundle()
    [y] = (tensor for tensor in bundle.tensors if tensor.name == "y_ptr")
    read = UnwrittenRead(
        seq=max(event.seq for event in bundle.events) + 1, step=2, tensor=y.id, operation="sum",
        site="program.py:50", num_unwritten=32 - 8 * grid, num_elements=32, first=(8 * grid,),
        last=(31,), is_decided=True,
    )  # fmt: skip
    bundle = msgspec.structs.replace(
        bundle, events=(*bundle.events, read), sees_reads=True, environment={"HYPO_TRACE": "1"}
    )
    return diagnose(bundle, allow_source=True)


@pytest.mark.parametrize(
    ("text", "constants", "others"),
    [
        (DOUBLED, {}, ["Pass BLOCK = 16 and not 8"]),
        (IN_TURNS, {"NUM": 4}, ["Pass BLOCK = 16 and not 8", "Pass NUM = 2 and not 4"]),
        (DOUBLED.replace("* BLOCK +", "* 8 +"), {}, []),  # a larger block leaves the same out
    ],
)
def test_over_empty_memory_what_each_program_does_may_be_too_little(
    text: str, constants: dict[str, int], others: list[str]
) -> None:
    [root] = over_empty_memory(2, text, **constants).roots
    assert (root.cause, root.argument) == (Cause.GRID_TOO_SMALL, "y_ptr")
    assert root.fix == "Launch 4 along x and not 2"
    told = [root.fix, *others] if others else []
    assert [one.fix for one in root.alternatives] == told


def test_a_grid_that_lacks_one_is_rounded_up_unless_something_else_does_as_well() -> None:
    """A step that is larger than the grid leaves one block out, and so does half a block."""
    fix = "Launch 4 along x and not 3: round up as `triton.cdiv` does"
    [root] = over_empty_memory(3).roots
    assert root.fix == fix
    assert not root.alternatives
    one_of = [fix, "Pass NUM = 3 and not 4"]
    [root] = over_empty_memory(3, IN_TURNS, NUM=4).roots
    assert [one.fix for one in root.alternatives] == one_of
    gave = zeros_from(24, (32,))
    [root] = examined((3,), gave, text=IN_TURNS, n=32, want=WANT[:32], NUM=4).roots
    assert [one.fix for one in root.alternatives] == one_of
    [root] = examined((1,), zeros_from(8, (16,)), n=16, want=WANT[:16]).roots
    assert [one.fix for one in root.alternatives] == [
        "Launch 2 along x and not 1: round up as `triton.cdiv` does", "Pass BLOCK = 16 and not 8",
    ]  # fmt: skip


#: Several launches share the blocks.
FROM_FIRST = """
def from_first_kernel(x_ptr, y_ptr, n, first, BLOCK: tl.constexpr):
    i = (first + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)
"""


def test_a_launch_that_begins_where_an_earlier_one_did_may_be_meant_to_go_on() -> None:
    gave = zeros_from(16, (32,))
    [root] = examined((2,), gave, text=FROM_FIRST, n=32, want=WANT[:32], first=0).roots
    assert [one.fix for one in root.alternatives] == [
        "Launch 4 along x and not 2", "Pass BLOCK = 16 and not 8", "Pass first = 2 and not 0",
    ]  # fmt: skip


def test_the_launch_of_a_rest_that_begins_elsewhere_is_not_too_small() -> None:
    """What it leaves out was written by the launch of whole blocks, but for the rest."""
    assert not examined((1,), zeros_from(32)).roots


def test_the_axis_that_is_short_is_named() -> None:
    [root] = examined((2, 2), zeros_from(16, (2, 20)), text=TILED, n=20).roots
    assert root.fix.startswith("Launch 3 along y and not 2")


def test_other_comparisons_that_fail_are_not_the_grids() -> None:
    wrong_too = zeros_from(32)
    wrong_too[3] += 1  # that one a program stored
    elsewhere = zeros_from(32)
    other_want = WANT.copy()
    other_want[39] += 1  # what one more program stores is wrong as well
    behind = zeros_from(16, (2, 20))
    behind[1, 3] += 1  # stored as well, and not what the replay stores
    for found in (
        examined((4,), wrong_too),
        examined((2, 2), behind, text=TILED, n=20),
        examined((4,), elsewhere, want=other_want),
        examined((5,), zeros_from(32), n=32),  # the mask ends there, not the grid
        examined((4, 1), zeros_from(32), text=EITHER),  # either axis would do
    ):
        assert not found.roots
        told = [one.cause for one in found.hypotheses if one.verdict is Verdict.CONFIRMED]
        assert Cause.GRID_TOO_SMALL not in told
