"""`torch.autocast("cuda")` for tensors that only say that they are on a GPU.

Switching it on switches on that of the CPU, whose lists of operations are others: what autocast of
CUDA casts and that of the CPU leaves alone is added here. What the CPU casts beyond it (pooling in
three dimensions, quantiles, FFTs, decompositions of matrices) stays so. For good, like
`pretend_gpu.py`.
"""

from __future__ import annotations

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
        *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler"),
        *("index_put", "tensordot", "scatter_add"),
    }
)


def pretend_autocast() -> None:
    """From now on a context of autocast for cuda casts the CPU's tensors as it would the GPU's."""
    _add_casts()
    anything: Any = torch
    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
    dtype_of_cpu = torch.get_autocast_dtype("cpu")

    def follow() -> None:
        """That of the CPU is on with the type of CUDA's, or off with its own."""
        is_enabled = torch.is_autocast_enabled("cuda")
        set_enabled("cpu", is_enabled)
        set_dtype("cpu", torch.get_autocast_dtype("cuda") if is_enabled else dtype_of_cpu)

    def enable(*args: Any) -> None:
        device, is_enabled = args if len(args) == 2 else ("cuda", args[0])
        set_enabled(device, is_enabled)
        if device == "cuda":
            follow()

    def choose(device: str, dtype: torch.dtype) -> None:
        set_dtype(device, dtype)
        if device == "cuda":
            follow()

    anything.set_autocast_enabled = enable
    anything.set_autocast_dtype = choose
    anything.set_autocast_gpu_dtype = lambda dtype: choose("cuda", dtype)


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
    for name in missing_casts():
        _library.impl(name, _cast_of(name))


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
            dtype = torch.float32
            if name in _NARROW:
                dtype = torch.get_autocast_dtype("cpu")
            elif name in _WIDEST:
                dtype = _widest(args)
            args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
            return op(*args, **kwargs)

    return run


def _is_cast(value: Any) -> bool:
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_number and value.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if _is_cast(value) else value


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    """float32 where an operand has it, else the type of autocast."""
    kinds = {value.dtype for value in tree_leaves(args) if _is_cast(value)}
    return torch.float32 if torch.float32 in kinds else torch.get_autocast_dtype("cpu")
