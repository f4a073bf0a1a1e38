"""Products in bf16: what is rounded, how sums run, and which matrices of a model take part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from models.demo_variants import demo_with
from models.tiny_gguf import VOCAB_SIZE, WIDTH, write_tiny
from ops.bf16_oracle import pairs_in_order, rounded_bits, values_of
from ops.kernel_forms import use_form
from ops.kernel_launch import (
    bits,
    counts,
    launch,
    random_rows,
    rows_tensor,
    vector_tensor,
)
from repository import DEMO

from hypocenter.base.errors import UsageError
from hypocenter.base.tensor import DType, Tensor
from hypocenter.cli.verbs.bench import batch_of
from hypocenter.device import copies
from hypocenter.engine.runner import Runner, load_runner
from hypocenter.kernels.linear import linear, quantise
from hypocenter.kernels.linear.operands import Operands, Product
from hypocenter.kernels.weights import block_types, packing
from hypocenter.kernels.weights.cpu_layout import held_as
from hypocenter.model.gguf.file import open_gguf
from hypocenter.settings.config import EngineConfig

FLOATS = (DType.F16, DType.BF16)


@pytest.fixture(params=["one thread", "many threads", "guard pages"])
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_form(request.param, monkeypatch)


def weight_in_bf16(dtype: DType, raw: np.ndarray, num_columns: int) -> Tensor:
    packed = packing.pack(raw, dtype, num_columns, in_bf16=True)
    return packing.place("weight", "test", packed)


def unpacked(packed: packing.Packed) -> np.ndarray:
    """uint16 [num_rows, num_columns] of a weight in pairs, by the words of `cpu_layout.py`."""
    (words,) = packed.parts
    halves = np.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], axis=2).astype(np.uint16)
    rows = halves.reshape(len(words), -1, 64).transpose(0, 2, 1).reshape(-1, packed.num_columns)
    return np.asarray(rows[: packed.num_rows])


@pytest.mark.parametrize("dtype", FLOATS)
def test_each_number_of_two_bytes_becomes_the_nearest_one(dtype: DType) -> None:
    raw = np.arange(1 << 16, dtype=np.uint16).reshape(64, 1024).view(np.uint8)
    found = unpacked(packing.pack(raw, dtype, 1024, in_bf16=True))
    exact = block_types.dequantise(raw, dtype, 1024)
    is_nan = np.isnan(exact)
    np.testing.assert_array_equal(found[~is_nan], rounded_bits(exact[~is_nan]))
    assert np.isnan(values_of(found[is_nan])).all()
    assert ((found == 0) | (np.abs(values_of(found)) >= 2.0**-50) | is_nan).all()


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("width", [2, 64, 130])
@pytest.mark.usefixtures("on_the_cpu")
def test_activations_become_the_nearest_numbers(width: int, num_rows: int) -> None:
    """Ties, numbers that are too small and some that are none; zeros behind them."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((num_rows, width)).astype(np.float32)
    x *= np.exp2(rng.integers(-60, 60, x.shape)).astype(np.float32)
    ties = x.view(np.uint32)[:, ::2]
    ties[:] = ties & 0xFFFF0000 | 0x8000
    if num_rows > 1:
        x[0, :2] = 2.0**-50, -(2.0**-50) * (1 - 2.0**-24)
        x.view(np.uint32)[1, 0] = 0x7F800001  # NaN, and infinite if it were cut off
    x[-1, -2:] = np.nan, -np.inf
    x.view(np.uint32)[-1, -2] = 0x7FFFFFFF  # NaN, and -0 if it were rounded up
    operands = Operands.allocate([DType.BF16], num_rows, width, device="cpu", in_bf16=True)
    assert operands.rounded is not None
    operands.rounded.data[:] = -1
    num_made = -(-width // 16) * 16  # by whole vectors
    weight = weight_in_bf16(DType.F16, random_rows(DType.F16, 1, width), width)
    given = rows_tensor("x", x, np.nan)
    launch(
        lambda p: quantise.prepare_operands(p, given, [weight], operands, counts(num_rows)),
        num_rows,
    )
    found = copies.to_host(operands.rounded).view(np.uint16)
    is_nan = np.isnan(x)
    np.testing.assert_array_equal(found[:, :width][~is_nan], rounded_bits(x[~is_nan]))
    assert np.isnan(values_of(found[:, :width][is_nan])).all()
    assert (found[:, width:num_made] == 0).all()
    assert (found[:, num_made:] == 0xFFFF).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_rows", "num_outputs"), [(1, 1), (3, 129), (5, 64), (66, 70)])
@pytest.mark.usefixtures("on_the_cpu")
def test_sums_run_in_one_order_whatever_the_machine(
    dtype: DType, num_rows: int, num_outputs: int
) -> None:
    """Every bit, alone and among many rows; numbers of very different sizes are in each sum."""
    num_columns, rng = 130, np.random.default_rng(4)
    raw = random_rows(dtype, num_outputs, num_columns)
    x = rng.standard_normal((num_rows, num_columns)).astype(np.float32)
    x *= np.exp2(rng.integers(-6, 6, x.shape)).astype(np.float32)
    bias, before = (rng.standard_normal(num_outputs).astype(np.float32) for _ in range(2))
    weight = weight_in_bf16(dtype, raw, num_columns)
    assert weight.dtype is DType.BF16
    out = rows_tensor("out", np.tile(before, (num_rows, 1)))
    launch(
        lambda p: linear.linear(
            p, rows_tensor("x", x, np.nan), weight, out, counts(num_rows),
            bias=vector_tensor("bias", bias), accumulate=True, in_bf16=True,
        ),
        num_rows,
    )  # fmt: skip
    sums = pairs_in_order(
        rounded_bits(x), rounded_bits(block_types.dequantise(raw, dtype, num_columns))
    )
    wanted = before + (sums + bias)
    np.testing.assert_array_equal(bits(copies.to_host(out)[:, :num_outputs]), bits(wanted))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.usefixtures("on_the_cpu")
def test_products_are_within_what_rounding_allows(dtype: DType) -> None:
    num_rows, num_columns, num_outputs = 5, 386, 70
    raw = random_rows(dtype, num_outputs, num_columns)
    weights = block_types.dequantise(raw, dtype, num_columns).astype(np.float64)
    x = np.random.default_rng(5).standard_normal((num_rows, num_columns)).astype(np.float32)
    x[:, -1] = 4  # so that the last column weighs enough to be missed
    out = rows_tensor("out", np.zeros((num_rows, num_outputs), np.float32))
    weight, given = weight_in_bf16(dtype, raw, num_columns), rows_tensor("x", x, np.nan)
    launch(lambda p: linear.linear(p, given, weight, out, counts(num_rows), in_bf16=True), num_rows)
    error = np.abs(copies.to_host(out)[:, :num_outputs] - linear.reference(x, weights))
    size = np.abs(x) @ np.abs(weights).T
    # A number is off by 2**-8 of itself at most: both factors of F16, of BF16 only x; and sums.
    bound = (2 if dtype is DType.F16 else 1) * 2.0**-8 * (1 + 2.0**-8) + num_columns * 2.0**-24
    assert (error <= bound * size).all()
    assert error.max() > 0
    assert (np.abs(np.outer(x[:, -1], weights[:, -1])) > 2 * bound * size).any()


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.tier("sim")  # compiles what no other test needs
def test_weights_of_other_types_beside_it_are_read_as_ever() -> None:
    """Of one x: exact where a weight is F32, as codes where it is of a block type."""
    num_rows, num_columns, rng = 3, 256, np.random.default_rng(6)
    x = rng.standard_normal((num_rows, num_columns)).astype(np.float32)
    kinds = (DType.BF16, DType.F32, DType.Q8_0)
    weights = [weight_in_bf16(kind, random_rows(kind, 64, num_columns), num_columns)
               for kind in kinds]  # fmt: skip
    together = [rows_tensor("out", np.zeros((num_rows, 64), np.float32)) for _ in kinds]
    alone = [rows_tensor("out", np.zeros((num_rows, 64), np.float32)) for _ in kinds]
    operands = Operands.allocate(kinds, num_rows, num_columns, device="cpu", in_bf16=True)
    products = [Product(*one) for one in zip(weights, together, strict=True)]
    given, live = rows_tensor("x", x), counts(num_rows)
    launch(
        lambda p: linear.linear_several(p, given, products, live, operands.first(num_rows)),
        num_rows,
    )
    for weight, out, own in zip(weights, together, alone, strict=True):
        launch(
            lambda p, weight=weight, own=own: linear.linear(  # type: ignore[misc]
                p, given, weight, own, live, in_bf16=True
            ),
            num_rows,
        )
        np.testing.assert_array_equal(bits(copies.to_host(out)), bits(copies.to_host(own)))


def test_an_odd_number_of_columns_makes_no_pairs() -> None:
    assert held_as(DType.BF16, 6) is DType.BF16
    assert held_as(DType.BF16, 7) is DType.F32
    assert held_as(DType.F16, 6) is DType.F16
    assert held_as(DType.F16, 6, in_bf16=True) is DType.BF16
    assert held_as(DType.F16, 7, in_bf16=True) is DType.F16
    raw = random_rows(DType.BF16, 5, 7)
    packed = packing.pack(raw, DType.BF16, 7, in_bf16=True)
    (weights,) = packed.parts
    assert packed.dtype is DType.F32
    rows = weights.transpose(0, 2, 1).reshape(64, 7)[:5]
    np.testing.assert_array_equal(rows, block_types.dequantise(raw, DType.BF16, 7))


@pytest.fixture(scope="module", params=["F16", "BF16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with matrices of that type."""
    with open_gguf(DEMO) as file:
        names = [name for name, info in file.tensors.items() if len(info.shape) == 2]
    kind = GGMLQuantizationType[request.param]
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    return demo_with(path, {}, dict.fromkeys(names, kind))


def runner_of(path: Path, **settings: Any) -> Runner:
    with open_gguf(path) as file:
        return load_runner(file, EngineConfig(context_length=64, **settings))


def logits(runner: Runner) -> np.ndarray:
    """Of the tokens behind a prompt."""
    ids = np.arange(5, 45, dtype=np.int32)
    found = [runner.run(batch_of(ids, 0, runner))]
    made = [copies.to_host(found[0]).copy()]
    made.append(copies.to_host(runner.run(batch_of(ids[:1], len(ids), runner))).copy())
    return np.concatenate(made)


@pytest.mark.tier("sim", fast=lambda case: case.model == "F16")
def test_a_model_says_in_which_type_it_multiplies(model: Path) -> None:
    exact, rounded = runner_of(model), runner_of(model, float_products="bf16")
    ours, theirs = logits(rounded), logits(exact)
    route = rounded.route()
    assert (route.weight_dtype, route.activation_dtype) == ("BF16", "BF16")
    assert "round_bf16" in route.kernels
    route = exact.route()
    assert (route.weight_dtype, route.activation_dtype) == (model.stem, "F32")
    assert "round_bf16" not in route.kernels
    spread = theirs.std()
    assert 1e-4 * spread < np.abs(ours - theirs).max() < 0.1 * spread


@pytest.mark.tier("sim", fast=lambda case: case.model == "F16")
def test_the_token_table_is_rounded_only_where_it_is_multiplied(model: Path) -> None:
    """The bundled model has one for both."""
    tied = runner_of(model, float_products="bf16").weights
    assert tied.output is tied.token_table
    assert tied.token_table.dtype is DType.BF16
    with open_gguf(model) as file:
        table = file.raw("token_embd.weight")
        dtype = file.tensors["token_embd.weight"].dtype
        shape = file.tensors["token_embd.weight"].shape
        exact = block_types.dequantise(table.reshape(shape[0], -1), dtype, shape[1])
    np.testing.assert_array_equal(unpacked(tied.token_table.data), rounded_bits(exact))


@pytest.mark.tier("sim")  # compiles what no other test needs
def test_a_token_table_beside_a_head_stays_as_it_is(tmp_path: Path) -> None:
    head = np.random.default_rng(8).standard_normal((VOCAB_SIZE, WIDTH))
    path = write_tiny(tmp_path / "tiny.gguf", tensors={"output.weight": head}, in_f16=True)
    weights = runner_of(path, float_products="bf16").weights
    assert (weights.token_table.dtype, weights.output.dtype) == (DType.F16, DType.BF16)
    rounded = rounded_bits(head.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(unpacked(weights.output.data), rounded)


def test_a_model_without_such_matrices_is_refused(tmp_path: Path) -> None:
    odd = {"blk.0.ffn_down.weight": np.zeros((WIDTH, 23), np.float32)}
    for path in (DEMO, write_tiny(tmp_path / "tiny.gguf", tensors=odd)):
        with pytest.raises(UsageError, match="has no matrix of F16 or BF16"):
            runner_of(path, float_products="bf16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"float_products": "f8"}, "float_products is 'f8', but must be one of exact, bf16"),
        ({"float_products": "bf16", "device": "cuda"}, "run on the CPU only"),
        ({"float_products": "bf16", "device": "sim:mi300x"}, "run on the CPU only"),
    ],
)
def test_what_cannot_be_had_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineConfig(**settings)
