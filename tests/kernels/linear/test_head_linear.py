"""head_linear against its reference in float64; batches, what must stay, what is refused."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from ops.kernel_forms import FORMS, use_form
from ops.kernel_launch import Array, bits, counts, launch, rows_tensor, tensor

from hypocenter.base.errors import LaunchRejected
from hypocenter.device.copies import to_host
from hypocenter.kernels.linear import head_linear

EPS = 2.0**-24


@pytest.fixture(params=FORMS, autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_form(request.param, monkeypatch)


def given(num_tokens: int, num_heads: int, num_inputs: int, num_kept: int) -> Array:
    rng = np.random.default_rng(num_inputs)
    shape = (num_tokens, num_heads, num_inputs + num_kept)
    return rng.standard_normal(shape).astype(np.float32)


def weights(num_heads: int, num_inputs: int, num_outputs: int, dtype: str = "f16") -> Array:
    rng = np.random.default_rng(num_outputs)
    made = rng.standard_normal((num_heads, num_inputs, num_outputs)).astype(np.float32)
    return made.astype(np.float16).astype(np.float32) if dtype == "f16" else made


def take(x: Array, weight: Array, dtype: str = "f16", spare: int = 0, num_kept: int = 0) -> Array:
    """[num_tokens, num_heads, num_kept + num_outputs]; rows of the bucket behind must stay."""
    num_tokens, num_heads, _ = x.shape
    num_outputs, kept = weight.shape[2], num_kept or x.shape[2] - weight.shape[1]
    padded = np.zeros((*weight.shape[:2], -(-num_outputs // 64) * 64), np.float32)
    padded[..., :num_outputs] = weight
    held = padded.astype(np.float16).view(np.uint16) if dtype == "f16" else padded
    rows = np.concatenate([x, np.full((spare, *x.shape[1:]), np.nan, np.float32)])
    width = num_heads * (kept + num_outputs)
    out = rows_tensor("out", np.full((len(rows), width), 7.0, np.float32), fill=7.0)
    flat = rows_tensor("x", rows.reshape(len(rows), -1), fill=np.nan)
    launch(
        lambda p: head_linear.head_linear(
            p,
            flat,
            tensor("weight", held),
            out,
            counts(num_tokens),
            num_outputs=num_outputs,
            num_kept=kept,
        ),
        len(rows),
    )
    found = to_host(out)
    assert (found[num_tokens:] == 7).all()
    assert (found[:, width:] == 7).all()
    return found[:num_tokens, :width].reshape(num_tokens, num_heads, -1)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_inputs", "num_outputs", "num_kept"),
    [(1, 3, 20, 72, 6), (7, 2, 33, 16, 0), (21, 1, 128, 24, 64), (4, 5, 1, 1, 2)],
)
def test_each_head_has_its_own_weight(
    num_tokens: int, num_heads: int, num_inputs: int, num_outputs: int, num_kept: int, dtype: str
) -> None:
    x = given(num_tokens, num_heads, num_inputs, num_kept)
    weight = weights(num_heads, num_inputs, num_outputs, dtype)
    found, right = take(x, weight, dtype, spare=3), head_linear.reference(x, weight)
    assert (bits(found[..., :num_kept]) == bits(x[..., num_inputs:])).all(), "what is kept"
    sizes = head_linear.reference(np.abs(x), np.abs(weight))
    assert (np.abs(found - right) <= (num_inputs + 4) * EPS * sizes).all()


def test_bits_do_not_depend_on_company() -> None:
    x, weight = given(21, 2, 40, 8), weights(2, 40, 80)
    whole = take(x, weight)
    for start, stop in ((0, 1), (1, 5), (5, 21)):
        assert (bits(take(x[start:stop], weight)) == bits(whole[start:stop])).all()


def test_large_and_small_inputs_keep_their_accuracy() -> None:
    """f16 holds neither 1e6 nor 1e-9; heads of a token differ by far."""
    x, weight = given(2, 2, 64, 0), weights(2, 64, 16)
    x[0, 0] *= 1e6
    x[0, 1] *= 1e-9
    x[1] = 0
    sizes = head_linear.reference(np.abs(x), np.abs(weight))
    error = np.abs(take(x, weight) - head_linear.reference(x, weight))
    assert (error <= 68 * EPS * sizes).all()


def test_what_is_refused() -> None:
    x, weight = given(2, 2, 16, 0), weights(2, 16, 16)
    with pytest.raises(LaunchRejected, match="x has 64 along axis 1, but must be at least"):
        take(x, weight, num_kept=30)
    flat, out = (rows_tensor(name, np.zeros((2, 192), np.float32)) for name in ("x", "out"))
    held = tensor("weight", np.zeros((2, 16, 64), np.float32))
    take_zeros = partial(head_linear.head_linear, x=flat, weight=held, counts=counts(2))
    for target, num_outputs, text in (
        (out, 65, "num_outputs is 65, but must be above 0 and within the weight"),
        (out, 0, "num_outputs is 0, but must be above 0"),
        (flat, 16, "out .x. and x share memory"),
    ):
        with pytest.raises(LaunchRejected, match=text):
            launch(partial(take_zeros, out=target, num_outputs=num_outputs), 2)
    narrow = tensor("weight", np.zeros((2, 16, 40), np.float32))
    with pytest.raises(LaunchRejected, match="padded to whole blocks of 64"):
        launch(
            lambda p: head_linear.head_linear(p, flat, narrow, out, counts(2), num_outputs=16), 2
        )
