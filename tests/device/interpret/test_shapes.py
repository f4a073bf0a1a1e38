"""Shapes of blocks are worked out once, and say what Triton's own code says of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from hypocenter.device.interpret.interpret import interpreting
from hypocenter.device.interpret.shapes import NUMPY_TYPES
from hypocenter.device.triton_lang import interpreter, tl

KINDS = [tl.int1, tl.int32, tl.float16, tl.bfloat16, tl.float32, tl.pointer_type(tl.float32)]
SHAPES = [[1], [16], [4, 8], [8, 4], [2, 1, 4], [16], [4, 8]]  # some for the second time


class NoMemory:
    """Nothing is accessed."""

    exact = None
    load = store = atomic_rmw = atomic_cas = None


def said_of(kind: Any, shape: list[Any]) -> tuple[Any, ...]:
    """What a type and a tensor of it say, by plain values."""
    made = tl.block_type(kind, shape)
    tensor = tl.tensor(None, made)
    return (
        str(made), repr(made), made.numel, [int(size) for size in made.shape], made.scalar,
        [size.value for size in tensor.shape], tensor.numel.value, tensor.dtype, tensor.type,
        tensor.type.is_block(),
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_types_and_tensors_are_as_triton_makes_them(kind: Any) -> None:
    plain = [said_of(kind, shape) for shape in SHAPES]
    as_constants = [[tl.constexpr(size) for size in shape] for shape in SHAPES]
    with interpreting(NoMemory()):  # type: ignore[arg-type]
        assert [said_of(kind, shape) for shape in SHAPES] == plain
        assert [said_of(kind, shape) for shape in as_constants] == plain
        one = tl.tensor(None, kind)
        assert (list(one.shape), one.numel.value, one.dtype) == ([], 1, kind)
        assert tl.block_type(kind, [4]).shape is tl.block_type(tl.int8, [4]).shape
    assert tl.block_type(kind, [4]).shape is not tl.block_type(kind, [4]).shape


@pytest.mark.parametrize("shape", [[], [3], [4, 6], [2.0], [0], [1 << 30], [tl.constexpr(2.0)]])
def test_what_triton_refuses_is_refused_each_time(shape: list[Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as plain:
        tl.block_type(tl.int32, shape)
    with interpreting(NoMemory()):  # type: ignore[arg-type]
        tl.block_type(tl.int32, [2])
        for _ in range(2):
            with pytest.raises(type(plain.value)) as refused:
                tl.block_type(tl.int32, shape)
            assert str(refused.value) == str(plain.value)


def block(*shape: int) -> Any:
    data = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    handle = interpreter().TensorHandle(data, tl.int32)
    return tl.tensor(handle, tl.block_type(tl.int32, list(shape)))


def test_blocks_of_other_shapes_are_broadcast_and_equal_ones_are_not() -> None:
    with interpreting(NoMemory()):  # type: ignore[arg-type]
        semantic = interpreter().interpreter_semantic
        for left, right, wanted in (
            ((4, 8), (4, 8), (4, 8)),
            ((4, 1), (1, 8), (4, 8)),
            ((8, 4), (1, 4), (8, 4)),
        ):
            found = semantic.broadcast_impl_value(block(*left), block(*right))
            assert [one.handle.data.shape for one in found] == [wanted, wanted]
        with pytest.raises(ValueError, match="incompatible dimensions"):
            semantic.broadcast_impl_value(block(4, 8), block(8, 4))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_numpy_types_are_those_of_triton(kind: Any) -> None:
    plain = interpreter()._get_np_dtype
    for one in (kind, tl.block_type(kind, [4]), kind, tl.block_type(kind, [2, 2])):
        assert NUMPY_TYPES(one) == plain(one)
