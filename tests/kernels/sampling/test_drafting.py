"""What makes the next step of a draft model on a device, beside plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("triton")

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.kernels.sampling.drafting import (
    ChainState,
    StepTensors,
    advance_drafts,
    place_drafts,
    take_masks,
)

DEVICE = "sim:h200"
MOST, ROWS, BLOCK_SIZE = 4, 5, 4
WANTED = [3, 3, 2, 1]
FIRST = [6, 3, 0, 11]
Ints = npt.NDArray[np.int32]


@pytest.fixture(autouse=True)
def gpu() -> None:
    devices.open_device(DEVICE)


def on_device(name: str, values: Any, dtype: DType = DType.I32) -> Tensor:
    array = np.array(values, np.int64 if dtype is DType.I64 else np.int32)
    tensor = memory.allocate(name, "test", dtype, array.shape, device=DEVICE)
    copies.to_device(tensor, array)
    return tensor


def plan_of(builder: PlanBuilder, result: Tensor) -> Plan:
    plan = Plan(builder, result)
    plan.compile()
    return plan


@pytest.mark.parametrize("is_greedy", [True, False])
def test_each_link_makes_the_step_behind_it(is_greedy: bool) -> None:
    """Rows that have enough keep what they had; the last link leaves a step of no row."""
    random = np.random.default_rng(0)
    numbers = random.random((MOST, ROWS))
    state = ChainState(
        link=on_device("link", [0]),
        num_wanted=on_device("num_wanted", [*WANTED, 0]),
        first_positions=on_device("first_positions", [*FIRST, 0]),
        uniforms=on_device("uniforms", numbers.view(np.int32).reshape(MOST, 2 * ROWS)),
        drafts=on_device("drafts", np.full((MOST, ROWS), -9)),
    )
    tables: Ints = np.array([[7, 2, 9], [1, 4, 5], [8, 0, 0], [3, 6, 10]], np.int32)
    settings = random.integers(0, 99, (ROWS, 8))
    step = StepTensors(
        token_ids=on_device("token_ids", [0] * 8),
        **{
            name: on_device(name, [-5] * 8)
            for name in ("positions", "slots", "sequence_rows", "logit_rows")
        },
        counts=on_device("counts", [9, 9]),
        block_tables=on_device("block_tables", tables),
        settings=None if is_greedy else on_device("settings", settings, DType.I64),
        hidden_rows=on_device("hidden_rows", [-5] * 8) if is_greedy else None,
    )
    builder, sizes = PlanBuilder(len(WANTED), DEVICE), {"block_size": BLOCK_SIZE}
    advance_drafts(builder, state, step, num_rows=len(WANTED), first_hidden=90, **sizes)
    plan = plan_of(builder, state.drafts)
    positions: Ints = np.full(8, -5, np.int32)
    slots, rows, drafts = positions.copy(), positions.copy(), np.full((MOST, ROWS), -9)
    hidden_rows = positions.copy()
    for link in range(3):
        chosen = random.integers(0, 50, 4).astype(np.int32)
        copies.to_device(step.token_ids, chosen)
        plan.run()
        num = sum(wanted > link + 1 for wanted in WANTED)
        drafts[link, :4] = chosen
        for row in range(num):
            positions[row] = at = FIRST[row] + link
            slots[row] = tables[row, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            rows[row], hidden_rows[row] = row, 90 + row
            settings[row, 7] = numbers[link + 1, row : row + 1].view(np.int64)[0]
        assert copies.to_host(step.counts).tolist() == [num, num]
        assert copies.to_host(state.link).tolist() == [link + 1]
        for tensor, values in (
            (step.positions, positions), (step.slots, slots), (step.sequence_rows, rows),
            (step.logit_rows, rows), (state.drafts, drafts),
        ):  # fmt: skip
            assert copies.to_host(tensor).tolist() == values.tolist(), tensor.name
        if step.hidden_rows is not None:
            assert copies.to_host(step.hidden_rows).tolist() == hidden_rows.tolist()
        if step.settings is not None:
            assert copies.to_host(step.settings).tolist() == settings.tolist()


def test_a_chain_that_is_run_too_often_writes_nowhere() -> None:
    """Graphs are captured over whatever lies there."""
    state = ChainState(
        link=on_device("link", [MOST]),
        num_wanted=on_device("num_wanted", [99] * ROWS),
        first_positions=on_device("first_positions", [0] * ROWS),
        uniforms=on_device("uniforms", np.zeros((MOST, 2 * ROWS))),
        drafts=on_device("drafts", np.full((MOST, ROWS), -9)),
    )
    names = ("token_ids", "positions", "slots", "sequence_rows", "logit_rows")
    step = StepTensors(
        **{name: on_device(name, [-5] * ROWS) for name in names},
        counts=on_device("counts", [9, 9]),
        block_tables=on_device("block_tables", [[1]] * ROWS),
        settings=None,
    )
    builder = PlanBuilder(ROWS, DEVICE)
    advance_drafts(builder, state, step, num_rows=ROWS, block_size=BLOCK_SIZE)
    plan_of(builder, state.drafts).run()
    assert (copies.to_host(state.drafts) == -9).all()
    assert (copies.to_host(step.slots) == -5).all()
    assert copies.to_host(step.counts).tolist() == [0, 0]


def test_drafts_are_put_among_the_tokens_of_a_step() -> None:
    """One that is no token of the model counts as the first; the others stay."""
    token_ids = on_device("token_ids", [11, 0, 0, 12, 0, 13])
    drafts = on_device("drafts", [[1, 2, 3], [40, 5, -1]])
    targets, sources = [1, 2, 4, -1], [1, 4, 3, -1]
    builder = PlanBuilder(1, DEVICE)
    tensors = on_device("targets", targets), on_device("sources", sources)
    place_drafts(builder, token_ids, drafts, *tensors, num_ids=40)
    plan_of(builder, token_ids).run()
    assert copies.to_host(token_ids).tolist() == [11, 2, 5, 12, 0, 13]


@pytest.mark.parametrize("link", [1, 2])
def test_each_link_has_its_masks(link: int) -> None:
    of_links = np.arange(3 * 2 * 5, dtype=np.int32).reshape(6, 5)
    masks = on_device("masks", np.full((2, 5), -1))
    builder = PlanBuilder(2, DEVICE)
    take_masks(builder, on_device("link", [link]), on_device("masks_of_links", of_links), masks)
    plan_of(builder, masks).run()
    assert copies.to_host(masks).tolist() == of_links[2 * link : 2 * link + 2].tolist()
