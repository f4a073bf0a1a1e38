"""The fold of attention refuses numbers that would lead it out of its tensors; nothing runs here.

Where heads of values are shorter than those of keys, as with latents, a fold that is given the
length of keys reads and writes past the ends of rows. So does one with another layout of parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_launch import counts, rows_tensor, tensor

from hypocenter.base.errors import LaunchRejected
from hypocenter.device import devices
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention import attention
from hypocenter.kernels.attention.attention import TileScratch

HEADS, HEAD_DIM, VALUE_DIM, BLOCKS = 4, 48, 32, 40
Changes = dict[str, int]


def _build(device: str, width: int) -> None:
    """A plan of attention over 640 keys, whose out has rows of `width`."""
    keys = tensor("k_cache", np.zeros((BLOCKS, 1, HEAD_DIM, 16), np.uint16))
    values = tensor("v_cache", np.zeros((BLOCKS, 1, 16, VALUE_DIM), np.uint16))
    partial = None
    if device != "cpu":
        partial = TileScratch.allocate(keys, values, 1, HEADS, BLOCKS, device=device)
    attention.attention(
        PlanBuilder(1, device),
        rows_tensor("q", np.zeros((1, HEADS * HEAD_DIM), np.float32)),
        keys,
        values,
        tensor("tables", np.arange(BLOCKS, dtype=np.int32)[None]),
        tensor("rows", np.zeros(1, np.int32)),
        tensor("positions", np.zeros(1, np.int32)),
        rows_tensor("out", np.zeros((1, width), np.float32)),
        counts(1),
        num_heads=HEADS,
        scale=1.0,
        partial=partial,
        value_dim=VALUE_DIM,
    )


@pytest.fixture(params=["cpu", "sim:h200"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = devices.open_device(request.param) if request.param != "cpu" else "cpu"
    monkeypatch.setattr(kernel_launch, "device", name)
    # As many threads as never share KV heads evenly: tokens are cut into tiles.
    monkeypatch.setattr(attention, "num_threads", lambda: 17)
    return name


def _alter(monkeypatch: pytest.MonkeyPatch, passed: Changes, facts: Changes) -> list[str]:
    """Folds to come are passed, and say that they are passed, other numbers; names of launches."""
    seen: list[str] = []

    def altered(add: Callable[..., None], parameters: Callable[[Any], Any]) -> Callable[..., None]:
        def add_altered(plan: PlanBuilder, kernel: Any, *args: Any, **options: Any) -> None:
            names = list(parameters(kernel))
            seen.append(getattr(kernel, "name", "") or kernel.__name__.removesuffix("_kernel"))
            if "fold" in seen[-1]:
                args = tuple(
                    passed.get(n, arg) for n, arg in zip(names[: len(args)], args, strict=True)
                )
                upper = {name.upper(): value for name, value in passed.items()}
                options = {name: upper.get(name, value) for name, value in options.items()}
                options["facts"] = {**options["facts"], **facts}
            add(plan, kernel, *args, **options)

        return add_altered

    cpu = altered(PlanBuilder.add_cpu, lambda kernel: kernel.parameters)
    gpu = altered(PlanBuilder.add_gpu, lambda kernel: kernel.arg_names)
    monkeypatch.setattr(PlanBuilder, "add_cpu", cpu)
    monkeypatch.setattr(PlanBuilder, "add_gpu", gpu)
    return seen


def test_a_fold_as_it_is_meant_is_taken(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _alter(monkeypatch, {}, {})
    _build(device, HEADS * VALUE_DIM)
    assert seen == ["attention" if device == "cpu" else "attention_split", "attention_fold"]


def test_keys_in_the_place_of_values_are_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the fold's contract is told of it or not, and whether out has room for it or not."""
    wrong = {"value_dim": HEAD_DIM}
    for facts, words in (
        ({}, r"value_dim is 48, but its contract was checked with 32"),
        (wrong, r".*(must fit a row|must be at least)"),
    ):
        with monkeypatch.context() as altered:
            _alter(altered, wrong, facts)
            for width in (HEADS * VALUE_DIM, HEADS * HEAD_DIM):
                with pytest.raises(LaunchRejected, match=f"attention_fold: {words}"):
                    _build(device, width)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pitch": 16}, "pitch is 16, but a head's values must fit"),
        ({"pitch": 40}, "pitch = 40, but rows are read as whole vectors"),
        ({"pitch": 48}, "pitch = 48.* a part is a row for each head"),
        ({"size": 64}, "size = 64.* a part is a row for each head"),
        ({"heads": 5}, "heads is 5"),
        ({"num_kv_heads": 2, "heads": 1}, "a part is a row for each head"),
    ],
)
def test_another_layout_of_parts_is_refused(
    changes: Changes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "num_threads", lambda: 17)
    _alter(monkeypatch, changes, changes)
    with pytest.raises(LaunchRejected, match=f"attention_fold: .*{words}"):
        _build("cpu", HEADS * VALUE_DIM)
