"""Kernels in Python without TRITON_INTERPRET: right numbers, and a language left as it was."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specimens import replay_kernels as kernels

from hypocenter.base.dtypes import Array, bf16_to_f32, f32_to_bf16
from hypocenter.base.errors import UsageError
from hypocenter.device.interpret.interpret import Pointer, StaticAssertFailed, interpreting
from hypocenter.device.triton_lang import interpreter, tl, triton


class PlainMemory:
    """One array of bytes at address 0; checks nothing."""

    def __init__(self, num_bytes: int = 1 << 16) -> None:
        self.exact: Any = None
        self.bytes = np.zeros(num_bytes, np.uint8)

    def put(self, address: int, values: Array) -> None:
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        self.bytes[address : address + raw.size] = raw

    def take(self, address: int, count: int, dtype: Any) -> Array:
        taken: Array = self.bytes[address:].view(dtype)[:count].copy()
        return taken

    def load(self, pointers: Array, mask: Array, other: Array, dtype: Any) -> Array:
        loaded = np.array(np.broadcast_to(other, pointers.shape), dtype=dtype)
        for at in zip(*np.nonzero(np.broadcast_to(mask, pointers.shape)), strict=True):
            loaded[at] = self.take(int(pointers[at]), 1, dtype)[0]
        return loaded

    def store(self, pointers: Array, values: Array, mask: Array) -> None:
        values = np.broadcast_to(values, pointers.shape)
        for at in zip(*np.nonzero(np.broadcast_to(mask, pointers.shape)), strict=True):
            self.put(int(pointers[at]), np.asarray([values[at]]))

    def atomic_rmw(
        self, operation: Any, pointers: Array, values: Array, mask: Array, order: Any
    ) -> Array:
        raise NotImplementedError

    def atomic_cas(self, pointers: Array, compare: Array, values: Array, order: Any) -> Array:
        raise NotImplementedError


def language() -> dict[str, Any]:
    """Every attribute that an interpretation may patch."""
    libdevice = importlib.import_module("triton.language.extra.libdevice")
    things = [tl, tl.core, tl.standard, tl.math, tl.random, tl.tensor, tl.dtype, interpreter()]
    things += [tl.core.tensor_descriptor_base, tl.core.tensor_descriptor, tl.block_type]
    things += [interpreter().TritonSemantic]
    things += [getattr(tl, "condition", tl), triton.runtime.jit.JITFunction, libdevice]
    return {f"{t.__name__}.{name}": value for t in things for name, value in vars(t).items()}


def run(kernel: Any, memory: PlainMemory, grid: int, **arguments: Any) -> None:
    with interpreting(memory) as opened:
        opened.set_grid((grid, 1, 1))
        values = opened.bind(kernel, arguments)
        for number in range(grid):
            opened.run(kernel, values, (number, 0, 0))


def test_a_kernel_computes_what_it_says() -> None:
    memory = PlainMemory()
    x = np.arange(37, dtype=np.float32)
    memory.put(256, x)
    run(
        kernels.arithmetic, memory, 3, x_ptr=Pointer(256, "float32"),
        y_ptr=Pointer(4096, "float32"), n=37, BLOCK=16,
    )  # fmt: skip
    blocks = [x[i : i + 16] for i in range(0, 37, 16)]
    expected = [b * 6 + b.sum() + b.max() + (0 + 16 + 32) + 19 for b in blocks]
    assert np.array_equal(memory.take(4096, 37, np.float32), np.concatenate(expected))


def test_bfloat16_is_computed_as_numbers() -> None:
    """Triton's own interpreter adds and multiplies the bits, and says nothing."""
    generator = np.random.default_rng(0)
    memory = PlainMemory()
    bits = [f32_to_bf16(generator.standard_normal((16, 16)).astype(np.float32)) for _ in range(2)]
    memory.put(0x1000, bits[0])
    memory.put(0x2000, bits[1])
    run(
        kernels.half_precision, memory, 1, x_ptr=Pointer(0x1000, "bfloat16"),
        w_ptr=Pointer(0x2000, "bfloat16"), y_ptr=Pointer(0x3000, "bfloat16"),
        d_ptr=Pointer(0x4000, "float32"), N=16,
    )  # fmt: skip
    x, w = map(bf16_to_f32, bits)
    chosen = np.where(x > w, bf16_to_f32(f32_to_bf16(x * w)), bf16_to_f32(f32_to_bf16(x - w)))
    differences = f32_to_bf16(np.float32(1.0078125) - chosen)  # 1.005, rounded
    assert np.array_equal(memory.take(0x3000, 256, np.uint16), differences.reshape(-1))
    product = x.astype(np.float64) @ w.astype(np.float64)
    error = np.abs(memory.take(0x4000, 256, np.float32).reshape(16, 16) - product)
    bound = (np.abs(x).astype(np.float64) @ np.abs(w)) * 2.0**-24 * (4 + 4)
    assert (error <= bound).all()


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.3895314e38, np.inf, np.nan], np.float32)
    back = bf16_to_f32(f32_to_bf16(values))
    assert back[0] == 1.0
    assert back[1] == 1.0  # half way: the even neighbour is below
    assert back[2] == 1.015625  # half way: the even neighbour is above
    assert back[4] == np.inf
    assert np.isnan(back[5])
    torch = pytest.importorskip("torch")
    many = np.random.default_rng(1).standard_normal(10_000).astype(np.float32) * 1e3
    wanted = torch.from_numpy(many).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(f32_to_bf16(many), wanted)


def test_the_language_is_restored() -> None:
    before = language()
    memory = PlainMemory()
    run(kernels.arithmetic, memory, 1, x_ptr=Pointer(0, "float32"), y_ptr=Pointer(512, "float32"),
        n=4, BLOCK=16)  # fmt: skip
    assert language() == before


def test_the_language_is_restored_after_a_fault() -> None:
    before = language()
    with pytest.raises(AttributeError, match="no_such_function"):
        run(kernels.fails, PlainMemory(), 1, x_ptr=Pointer(0, "float32"))
    assert language() == before
    run(kernels.scatter_one_store, PlainMemory(), 1, y_ptr=Pointer(0, "int32"), BLOCK=8, EQUAL=True)


def test_the_module_of_the_kernel_is_left_alone() -> None:
    before = dict(vars(kernels))
    run(kernels.scatter_one_store, PlainMemory(), 1, y_ptr=Pointer(0, "int32"), BLOCK=8, EQUAL=True)
    assert vars(kernels) == before


def test_two_at_once_are_refused() -> None:
    with (
        interpreting(PlainMemory()),
        pytest.raises(UsageError, match="neither nest"),
        interpreting(PlainMemory()),
    ):
        pass
    seen = []

    def other() -> None:
        try:
            with interpreting(PlainMemory()):
                pass
        except UsageError as error:
            seen.append(error)

    with interpreting(PlainMemory()):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(seen) == 1
    with interpreting(PlainMemory()):
        pass


def test_a_static_assert_has_its_own_exception() -> None:
    with pytest.raises(StaticAssertFailed, match="BLOCK below 16"):
        run(kernels.asserts, PlainMemory(), 1, x_ptr=Pointer(0, "float32"), BLOCK=8)


def test_the_compiler_still_works_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    run(kernels.scatter_one_store, PlainMemory(), 1, y_ptr=Pointer(0, "int32"), BLOCK=8, EQUAL=True)
    source = triton.compiler.ASTSource(
        fn=kernels.unmasked,
        signature={"x_ptr": "*fp32", "y_ptr": "*fp32", "BLOCK": "constexpr"},
        constexprs={"BLOCK": 128},
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    done = triton.compile(source, target=target, options={"enable_fp_fusion": True})
    assert "unmasked" in done.asm["ptx"]
