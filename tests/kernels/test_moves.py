"""Kernels of GPUs that only move values: `join`, `narrow` and `mark`, against plain assignment."""

from __future__ import annotations

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_launch import bits, counts, launch, tensor

from hypocenter.base.tensor import DType
from hypocenter.device import copies, devices, memory
from hypocenter.device.launch import run
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels import mark
from hypocenter.kernels.collective import collectives
from hypocenter.kernels.rowwise import embedding

SIM = "sim:mi300x"
_OLD = np.float32(-7.5)


@pytest.fixture(autouse=True)
def sim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "device", devices.open_device(SIM))


def _values(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    drawn = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    drawn.reshape(-1)[0] = np.nan  # what is moved keeps every bit
    return drawn


@pytest.mark.parametrize("num_live", [0, 1, 3])
@pytest.mark.parametrize("width", [1, 255, 256, 257])
def test_rows_lose_their_padding(width: int, num_live: int) -> None:
    x, old = _values(3, -(-width // 16) * 16 + 16), np.full((3, width), _OLD)
    out = tensor("out", old)
    launch(lambda p: embedding.narrow(p, tensor("x", x), out, counts(9, num_live)), 3)
    wanted = np.concatenate([x[:num_live, :width], old[num_live:]])
    np.testing.assert_array_equal(bits(copies.to_host(out)), bits(wanted))


@pytest.mark.parametrize("num_live", [0, 2, 3])
@pytest.mark.parametrize(("num_parts", "width", "padding"), [(2, 1, 0), (2, 300, 7), (3, 256, 0)])
def test_parts_lie_side_by_side(num_parts: int, width: int, padding: int, num_live: int) -> None:
    parts, old = _values(num_parts * 3, width + padding), np.full((3, num_parts * width), _OLD)
    out = tensor("out", old)
    launch(
        lambda p: collectives.join(
            p, tensor("parts", parts), out, counts(9, num_live), num_columns=width
        ),
        3,
    )
    side = np.concatenate(parts[:, :width].reshape(num_parts, 3, width), axis=1)
    wanted = np.concatenate([side[:num_live], old[num_live:]])
    np.testing.assert_array_equal(bits(copies.to_host(out)), bits(wanted))


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("number", [0, 5, (1 << 31) - 1])
def test_a_mark_says_the_run_and_its_number(number: int, begins: bool) -> None:
    cells = [memory.allocate(name, "test", DType.I64, (1,), device=SIM) for name in "rc"]
    had = 41
    for cell in cells:
        copies.to_device(cell, np.array([had], np.int64))
    plan = PlanBuilder(1, SIM)
    plan.mark_by(mark.MARK, runs=cells[0], cell=cells[1], number=number, begins=begins)
    run([launch for _, launch in plan.marks])  # type: ignore[misc]
    runs, word = (int(copies.to_host(cell)[0]) for cell in cells)
    assert runs == had + begins
    assert word == mark.reference(runs, number)
