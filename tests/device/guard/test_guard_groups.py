"""The two ways in which a guarded kernel checks a tile: a word for each lane, or for each group."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-call"
# ruff: noqa: C408 (the arguments of a launch read like its call)
from typing import Any

import numpy as np
import pytest
from specimens import guard_kernels as K
from test_guard import CASES, arrays_of, run, run_guarded, steps, tensor, zeros, zones_intact

from hypocenter.device.guard import ops_gpu

LANES = 1 << 30  # of so many threads none owns a group
FAR = 1 << 40


def bytes_told(faults: Any) -> list[int]:
    return [fault.byte_offset for fault in faults if fault.parameter == "x_ptr"]


@pytest.mark.parametrize("name", CASES)
def test_lane_by_lane_the_reports_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_guard.py` checks groups: an interpreter has one thread, which owns them all."""
    kernel, grid, right, wrong, expected = CASES[name]
    monkeypatch.setattr(ops_gpu, "num_threads", lambda: LANES)
    plain, guarded = right(), right()
    run(kernel, grid, plain)
    assert run_guarded(kernel, grid, guarded) == []
    for parameter, array in arrays_of(guarded).items():
        assert array.tobytes() == plain[parameter].tobytes(), parameter
    arguments = {**right(), **wrong()}
    found = run_guarded(kernel, grid, arguments)
    assert all(zones_intact(array) for array in arrays_of(arguments).values())
    found.sort(key=lambda fault: fault.site.calls[-1].line)
    assert [(f.parameter, f.site.operation) for f in found] == [(p, o) for p, o, _, _ in expected]
    for fault, (_, _, _, offsets) in zip(found, expected, strict=True):
        assert fault.byte_offset in offsets, fault


@pytest.mark.parametrize("threads", [1, LANES], ids=["groups", "lanes"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.int64])
@pytest.mark.parametrize("seed", range(4))
def test_the_offset_told_is_that_of_a_lane_outside_and_not_masked(
    threads: int, dtype: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked lanes are further away than all others, before the tensor and behind it."""
    monkeypatch.setattr(ops_gpu, "num_threads", lambda: threads)
    rng = np.random.default_rng(seed)
    size, count = np.dtype(dtype).itemsize, 50
    at = rng.integers(0, count, (4, 16))
    # One group has a lane that is outside, and each of the others a masked one.
    at[rng.integers(4), rng.integers(16)] = rng.choice([-3, count, count + 5])
    masked = np.zeros((4, 16), np.uint8)
    masked[:, ::2] = (at[:, ::2] >= 0) & (at[:, ::2] < count)
    at[masked != 0] = rng.choice([-1, FAR, -FAR], np.count_nonzero(masked))
    x, y = steps(count, dtype=dtype), zeros(4, 16, dtype=dtype)
    given = dict(at_ptr=tensor(at, np.int64), masked_ptr=tensor(masked, np.uint8))
    found = run_guarded(K.picked_kernel, (1,), dict(**given, x_ptr=x, y_ptr=y, A=4, B=16))
    outside = ((at < 0) | (at >= count)) & (masked == 0)
    assert bytes_told(found) == [at[outside][0] * size]
    # Those of its group read nothing, and all others what they should.
    lanes = 16 // size
    spoiled = outside.reshape(-1, lanes).any(axis=1).repeat(lanes).reshape(4, 16)
    wanted = np.where(masked | spoiled, 7, x[np.where(masked, 0, at) % count])
    assert y.tolist() == wanted.astype(dtype).tolist()


@pytest.mark.parametrize("threads", [1, LANES], ids=["groups", "lanes"])
@pytest.mark.parametrize("count", [0, 3])  # no element, or less than one
def test_of_a_tensor_without_an_element_only_unmasked_lanes_are_told(
    threads: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops_gpu, "num_threads", lambda: threads)
    at, masked = np.zeros((2, 16)), np.ones((2, 16))
    arguments: dict[str, Any] = dict(y_ptr=zeros(2, 16), x_ptr=zeros(0), A=2, B=16)

    def told() -> list[int]:
        given = dict(at_ptr=tensor(at, np.int64), masked_ptr=tensor(masked, np.uint8))
        return bytes_told(run_guarded(K.picked_kernel, (1,), {**arguments, **given}))

    assert told() == []
    masked[1, 5] = 0
    assert told() == [0]
    at[1, 5] = -2
    assert told() == [-8]


@pytest.mark.parametrize("lane", [(0, 0, 0), (1, 3, 6), (1, 2, 15)])
def test_groups_lie_on_the_last_of_three_axes(lane: tuple[int, ...]) -> None:
    at = np.arange(2 * 4 * 16).reshape(2, 4, 16)
    x, y = steps(2, 4, 16), zeros(2, 4, 16)
    wanted = x.copy()
    at[lane] = 130
    wanted[lane[0], lane[1], lane[2] // 4 * 4 :][:4] = 0
    arguments = dict(at_ptr=tensor(at, np.int64), x_ptr=x, y_ptr=y, A=2, B=4, C=16)
    assert bytes_told(run_guarded(K.picked_cube_kernel, (1,), arguments)) == [130 * 4]
    assert y.tolist() == wanted.tolist()
