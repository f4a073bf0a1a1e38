"""Autocast of CUDA for tensors on the CPU: types are those of torch's "Autocast Op Reference"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from hypocenter.check import pretend_autocast as pretended

HALF, WIDE, SINGLE = torch.float16, torch.float64, torch.float32


@pytest.fixture
def autocast(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`torch.autocast` as a program under `hypo check` has it; all is put back afterwards."""
    for name in (
        *("set_autocast_enabled", "set_autocast_dtype", "set_autocast_gpu_dtype"),
        *("is_autocast_enabled", "get_autocast_dtype"),
    ):
        monkeypatch.setattr(torch, name, getattr(torch, name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    plain = torch.get_autocast_dtype("cpu")
    pretended.pretend_autocast()
    yield torch.autocast
    assert pretended._library is not None
    pretended._library._destroy()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == plain


def _matrix(dtype: torch.dtype = SINGLE) -> torch.Tensor:
    return torch.full((4, 4), 0.5, dtype=dtype)


def _padded(x: torch.Tensor, mode: str) -> torch.Tensor:
    return torch.nn.functional.pad(x[None, None], (1, 1, 1, 1), mode=mode)


OPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype]] = {
    "product": (lambda x: x @ x, HALF),
    "linear": (lambda x: torch.nn.functional.linear(x, x, x[0]), HALF),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, x), HALF),
    "matrix and vector": (lambda x: torch.mv(x, x[0]), HALF),
    "convolution": (lambda x: torch.nn.functional.conv1d(x[None], x[None]), HALF),
    "attention": (
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        HALF,
    ),
    "exp": (lambda x: torch.exp(x.half()), SINGLE),
    "power": (lambda x: x.half() ** 2, SINGLE),
    "rsqrt": (lambda x: x.half().rsqrt(), SINGLE),
    "softmax": (lambda x: x.half().softmax(-1), SINGLE),
    "softmax of a type": (lambda x: x.half().softmax(-1, dtype=HALF), HALF),
    "sum": (lambda x: x.half().sum(), SINGLE),
    "sum of rows": (lambda x: x.half().sum(0), SINGLE),
    "sums so far": (lambda x: x.half().cumsum(0), SINGLE),
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x.half(), (4,)), SINGLE),
    "norm": (lambda x: x.half().norm(), SINGLE),
    "norm of rows": (lambda x: x.half().norm(dim=1), SINGLE),
    "widest": (lambda x: torch.atan2(x, x.half()), SINGLE),
    "widest of halves": (lambda x: torch.dot(x[0].half(), x[1].half()), HALF),
    "sampler of halves": (
        lambda x: torch.nn.functional.grid_sample(
            x.half()[None, None],
            x.half()[None, :2, :2, None].expand(1, 2, 2, 2),
            align_corners=False,
        ),
        HALF,
    ),
    "reflected edges": (lambda x: _padded(x.half(), "reflect"), HALF),
    "copied edges": (lambda x: _padded(x.half(), "replicate"), HALF),
    "pool of volumes": (
        lambda x: torch.nn.functional.max_pool3d(
            x.half()[None, None, None].expand(1, 1, 2, 4, 4), 2
        ),
        HALF,
    ),
    "lstm": (lambda x: torch.nn.LSTM(4, 4)(x)[0], HALF),
    "gru": (lambda x: torch.nn.GRU(4, 4, bidirectional=True)(x)[0], HALF),
    "addition": (lambda x: x.half() + x.half(), HALF),
    "relu": (lambda x: x.half().relu(), HALF),
    "of doubles": (lambda x: (x.double() @ x.double()).exp(), WIDE),
}


def test_each_operation_has_the_type_that_a_gpu_gives(autocast: Callable[..., Any]) -> None:
    wrong = {}
    with autocast("cuda"):
        for name, (op, dtype) in OPS.items():
            found = op(_matrix()).dtype
            if found != dtype:
                wrong[name] = found
    assert wrong == {}
    assert (_matrix() @ _matrix()).dtype == SINGLE


def test_the_context_has_its_type_its_inner_ones_and_its_words(
    autocast: Callable[..., Any],
) -> None:
    x = _matrix()
    with autocast("cuda", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        with autocast("cuda", enabled=False):
            assert (x @ x).dtype == SINGLE
        with torch.amp.autocast("cuda", dtype=HALF):
            assert (x @ x).dtype == HALF
        assert (x @ x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")


def test_contexts_of_the_cpu_around_and_within_stay_the_programs(
    autocast: Callable[..., Any],
) -> None:
    x = _matrix()
    with autocast("cpu", dtype=torch.bfloat16):
        with autocast("cuda", dtype=HALF):
            with autocast("cpu", enabled=False):
                assert (x @ x).dtype == HALF
                assert not torch.is_autocast_enabled("cpu")
            assert (x @ x).dtype == HALF
        assert (x @ x).dtype == torch.bfloat16
        with autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled("cuda")
        assert (x @ x).dtype == torch.bfloat16
    assert (x @ x).dtype == SINGLE


def test_what_a_gpu_refuses_under_autocast_is_refused(autocast: Callable[..., Any]) -> None:
    loss, x = torch.nn.functional.binary_cross_entropy, _matrix()
    with autocast("cuda"), pytest.raises(RuntimeError, match="with_logits"):
        loss(x, x)
    with autocast("cuda"), autocast("cuda", enabled=False):
        assert loss(x, x).dtype == SINGLE
    assert loss(x, x).dtype == SINGLE


def test_values_are_those_of_the_narrow_type(autocast: Callable[..., Any]) -> None:
    x = torch.full((1, 1), 1 + 2.0**-14)
    with autocast("cuda"):
        assert float(x @ x) == 1.0
    assert float(x @ x) > 1.0


def test_gradients_have_the_type_of_their_tensors(autocast: Callable[..., Any]) -> None:
    x = _matrix().requires_grad_()
    with autocast("cuda"):
        loss: Any = (x @ x).exp().sum()
    loss.backward()
    assert (loss.dtype, x.grad is not None and x.grad.dtype) == (SINGLE, SINGLE)


def test_the_lists_name_only_what_torch_casts_on_a_gpu() -> None:
    names = set(pretended.missing_casts())
    known = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    }
    assert known >= pretended._NARROW | pretended._WIDE_BY_DTYPE | pretended._WIDEST
    assert len(names) > 40
