"""`torch.autocast("cuda")` for tensors that only say that they are on a GPU.

Switching it on switches on that of the CPU, whose lists of operations are others: what autocast of
CUDA casts and that of the CPU leaves alone is added here. What the CPU casts beyond it gets its own
type back, but for quantiles, FFTs and decompositions of matrices, which have no half on a GPU or
only some. Within it a context for the CPU changes nothing. For good, like `pretend_gpu.py`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_CPU_KEY, _CUDA_KEY = "AutocastCPU", "AutocastCUDA"
#: What runs in the narrower type, what in float32 by its `dtype`, and what in the widest type of
#: its operands; all else in float32. Names are those of torch's `ATen/autocast_mode.h`.
_NARROW = frozenset(
    {
        *("_convolution", "_convolution.deprecated", "convolution", "conv_tbc", "prelu"),
        *("addmv", "addr", "mv", "einsum", "chain_matmul", "linalg_multi_dot"),
        *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell"),
        *("rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention"),
    }
)
_WIDE_BY_DTYPE = frozenset(
    {"softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"}
)
_WIDEST = frozenset(
    {
        *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot"),
        *("index_put", "tensordot", "scatter_add"),
    }
)
#: What the CPU alone runs in float32, and what has many operations in one on a GPU: computed in
#: float32 here, while the result has the type of the first operand, or the narrower type.
_KEEPING = frozenset(
    {
        *("adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d", "max_pool3d"),
        *("fractional_max_pool2d", "fractional_max_pool3d", "max_unpool2d", "max_unpool3d"),
        *("reflection_pad1d", "reflection_pad2d", "trace"),
        *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
    }
)
_RECURRENT = frozenset(
    f"{kind}.{form}"
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for form in ("input", "data")
)
#: Refused by autocast of CUDA; and of another list of the CPU's.
_REFUSED, _SAMPLER = "binary_cross_entropy", "grid_sampler"


def pretend_autocast() -> None:
    """From now on a context of autocast for cuda casts the CPU's tensors as it would the GPU's."""
    _add_casts()
    anything: Any = torch
    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
    was_enabled, was_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    own = _OwnOfCpu()

    def follow() -> None:
        """That of the CPU is on with the type of CUDA's, or as the program has it."""
        by_cuda = was_enabled("cuda")
        set_enabled("cpu", by_cuda or own.is_enabled)
        set_dtype("cpu", was_dtype("cuda") if by_cuda else own.dtype)

    def enable(*args: Any) -> None:
        device, is_enabled = args if len(args) == 2 else ("cuda", args[0])
        if device == "cpu":
            own.is_enabled = is_enabled
        else:
            set_enabled(device, is_enabled)
        follow()

    def choose(device: str, dtype: torch.dtype) -> None:
        if device == "cpu":
            own.dtype = dtype
        else:
            set_dtype(device, dtype)
        follow()

    def is_enabled(device: str = "cuda") -> bool:
        return own.is_enabled if device == "cpu" else was_enabled(device)

    def dtype_of(device: str) -> torch.dtype:
        return own.dtype if device == "cpu" else was_dtype(device)

    anything.set_autocast_enabled = enable
    anything.set_autocast_dtype = choose
    anything.set_autocast_gpu_dtype = lambda dtype: choose("cuda", dtype)
    anything.is_autocast_enabled = is_enabled
    anything.get_autocast_dtype = dtype_of


class _OwnOfCpu(threading.local):
    """Autocast of the CPU as the program has it, thread by thread."""

    def __init__(self) -> None:
        self.is_enabled, self.dtype = False, torch.bfloat16


def missing_casts() -> list[str]:
    """The operations that autocast of CUDA has, and that of the CPU has not."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key
    of_cpu = set(names(_CPU_KEY))
    return sorted(
        name.removeprefix("aten::")
        for name in names(_CUDA_KEY)
        if name.startswith("aten::") and name not in of_cpu
    )


#: What is registered lives as long as this does.
_library: Any = None


def _add_casts() -> None:
    global _library
    library: Any = torch.library.Library
    _library = library("aten", "IMPL", _CPU_KEY)
    others = _KEEPING | _RECURRENT | {_SAMPLER}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the CPU's own casts are no more
        for name in sorted({*missing_casts(), *others}):
            _library.impl(name, _cast_of(name))
        _library.impl(_REFUSED, _refuse)


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"{_REFUSED} does not run under autocast of cuda, where its gradient may leave the narrow "
        "type: take binary_cross_entropy_with_logits, or switch autocast off around it"
    )


def _cast_of(name: str) -> Callable[..., Any]:
    """The operation with its operands cast, and autocast off for what it does itself."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    names = [each.name for each in op._schema.arguments]
    off = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _CPU_KEY))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(off):
            if name in _WIDE_BY_DTYPE:
                given = dict(zip(names, args, strict=False)) | kwargs
                if _is_cast(args[0]) and given.get("dtype") is None:
                    given["dtype"] = torch.float32
                return op(**given)
            dtype, made = _dtypes(name, args)
            args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
            return tree_map(lambda value: _cast(value, made), op(*args, **kwargs))

    return run


def _dtypes(name: str, args: tuple[Any, ...]) -> tuple[torch.dtype, torch.dtype | None]:
    """What operands are cast to, and results, where these are."""
    if name in _NARROW:
        return _narrow(), None
    if name in _WIDEST:
        return _widest(args), None
    if name == _SAMPLER:
        return torch.float32, _widest(args)
    if name in _KEEPING:
        return torch.float32, args[0].dtype
    return torch.float32, _narrow() if name in _RECURRENT else None


def _narrow() -> torch.dtype:
    return torch.get_autocast_dtype("cuda" if torch.is_autocast_enabled("cuda") else "cpu")


def _is_cast(value: Any) -> bool:
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_number and value.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if dtype is not None and _is_cast(value) else value


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    """float32 where an operand has it, else the type of autocast."""
    kinds = {value.dtype for value in tree_leaves(args) if _is_cast(value)}
    return torch.float32 if torch.float32 in kinds else _narrow()
