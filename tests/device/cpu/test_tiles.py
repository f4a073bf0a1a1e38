"""Products by tiles: the sums that they stand for, and the instructions that make them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llvmlite import binding, ir
from ops.kernel_launch import for_python

from hypocenter.device.cpu import tiles
from hypocenter.device.cpu.lang import intrinsic, types
from hypocenter.device.cpu.vector_ir import VEC_I32, address_of


def _write(context: Any, builder: Any, kinds: Any, args: Any, *, is_signed: bool) -> Any:
    weights, x, out = (
        address_of(context, builder, kind, array, ir.Constant(ir.IntType(64), 0))
        for kind, array in zip(kinds, args, strict=True)
    )
    vectors = []
    for at in range(8):
        place = builder.gep(weights, [ir.Constant(ir.IntType(64), 16 * at)])
        vectors.append(builder.load(builder.bitcast(place, VEC_I32.as_pointer())))
        vectors[-1].align = 4
    made = tiles.products(builder, vectors, x, is_signed=is_signed, have=False)
    for row, vector in enumerate(made):
        place = builder.gep(out, [ir.Constant(ir.IntType(64), 16 * row)])
        builder.store(vector, builder.bitcast(place, VEC_I32.as_pointer())).align = 4
    return context.get_dummy_value()


@intrinsic
def _signed(typing: Any, weights: Any, x: Any, out: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _write(context, builder, signature.args, args, is_signed=True)

    return types.void(weights, x, out), build


@intrinsic
def _unsigned(typing: Any, weights: Any, x: Any, out: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _write(context, builder, signature.args, args, is_signed=False)

    return types.void(weights, x, out), build


def _by_signed(weights: Any, x: Any, out: Any) -> None:
    _signed(weights, x, out)


def _by_unsigned(weights: Any, x: Any, out: Any) -> None:
    _unsigned(weights, x, out)


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_tile_is_the_sums_of_products(is_signed: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-127, 128, (16, 32), np.int8)
    low, high = (-128, 128) if is_signed else (0, 256)
    codes = rng.integers(low, high, (8, 16, 4)).astype(np.int8 if is_signed else np.uint8)
    out = np.zeros((16, 16), np.int32)
    run = for_python(_by_signed if is_signed else _by_unsigned)
    run(codes.view(np.int32).reshape(8, 16), x.view(np.int32), out)
    # Column 4 j + b of output n lies in word j as byte b of lane n.
    weights = codes.astype(np.int64).transpose(1, 0, 2).reshape(16, 32)
    np.testing.assert_array_equal(out, x.astype(np.int64) @ weights.T)


@pytest.mark.skipif("x86" not in binding.get_default_triple(), reason="tiles of x86")
def test_the_words_are_instructions_of_a_processor_that_has_tiles() -> None:
    module = ir.Module()
    module.triple = binding.get_default_triple()
    word = ir.IntType(32).as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word, word, word]), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    weights, x, out = function.args
    vectors = [
        builder.load(
            builder.bitcast(
                builder.gep(weights, [ir.Constant(ir.IntType(64), 16 * at)]), VEC_I32.as_pointer()
            )
        )
        for at in range(8)
    ]
    for is_signed in (True, False):
        made = tiles.products(builder, vectors, x, is_signed=is_signed, have=True)
        for row, vector in enumerate(made):
            place = builder.gep(out, [ir.Constant(ir.IntType(64), 16 * row)])
            builder.store(vector, builder.bitcast(place, VEC_I32.as_pointer()))
    builder.ret_void()
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(
        cpu="sapphirerapids", features="+amx-int8,+amx-tile,+avx512f"
    )
    text = machine.emit_assembly(binding.parse_assembly(str(module)))
    lines = [line.split()[0] for line in text.splitlines() if "tmm" in line]
    once = ["tilezero", "tileloadd", "tileloadd", "{}", "tilestored"]
    assert lines == [word.format(n) for n in ("tdpbssd", "tdpbsud") for word in once]


def test_sizes_are_those_of_a_configuration() -> None:
    data = bytes(tiles._sizes().constant)
    assert len(data) == 64
    assert data[0] == 1
    assert [int.from_bytes(data[at : at + 2], "little") for at in range(16, 32, 2)] == [
        64, 32, 64, *[0] * 5,
    ]  # fmt: skip
    assert list(data[48:56]) == [16, 16, 8, *[0] * 5]
