"""The tensors that variables of a program stand for when an exception ends it.

Asks them for what the host knows: names, shapes and addresses, and nothing of the GPU.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

from hypocenter.foreign.argument_facts import dtype_of
from hypocenter.foreign.caller import is_library
from hypocenter.record.driver_run import MAX_TENSORS, DriverTensor

#: Variables that are looked at in one scope.
_MAX_VARIABLES = 512


def named_tensors(
    trace: TracebackType | None, made_at: Callable[[FrameType, str], str]
) -> list[DriverTensor]:
    """Tensors of a GPU by the variables of the program's own frames, the innermost first.

    `made_at` gives the line that makes what a name stands for in a frame, or "".
    """
    frames = [frame for frame, _ in traceback.walk_tb(trace)][::-1]
    found: dict[tuple[int, int], DriverTensor] = {}
    for frame in frames:
        if is_library(frame.f_code.co_filename):
            continue
        for name, value in _variables(frame.f_locals):
            tensor = _tensor(name, value, made_at(frame, name))
            if tensor is not None:
                found.setdefault((tensor.address, tensor.extent_bytes), tensor)
    main = getattr(sys.modules.get("__main__"), "__dict__", {})
    for name, value in _variables(main):
        tensor = _tensor(name, value, "")
        if tensor is not None:
            found.setdefault((tensor.address, tensor.extent_bytes), tensor)
    return list(found.values())[:MAX_TENSORS]


def _variables(scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(scope.items())[:_MAX_VARIABLES]:
        if name.isidentifier():
            yield name, value


def _tensor(name: str, value: Any, made_at: str) -> DriverTensor | None:
    """A tensor of torch's, or an array with `__cuda_array_interface__`; None for anything else."""
    with contextlib.suppress(Exception):  # an object of anybody's may do anything when it is asked
        if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "data_ptr"):
            if getattr(value.device, "type", "") != "cuda":
                return None
            size = value.element_size()
            reach = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
            return DriverTensor(
                name=name,
                dtype=dtype_of(value.dtype),
                shape=tuple(value.shape),
                address=value.data_ptr(),
                extent_bytes=(reach + 1) * size if 0 not in value.shape else 0,
                made_at=made_at,
            )
        if not isinstance(value, type) and hasattr(type(value), "__cuda_array_interface__"):
            told = value.__cuda_array_interface__
            shape = tuple(int(n) for n in told["shape"])
            width = int(str(told["typestr"])[2:])
            num_bytes = width
            for n in shape:
                num_bytes *= n
            return DriverTensor(
                name=name,
                dtype=str(told["typestr"])[1:],
                shape=shape,
                address=int(told["data"][0]),
                extent_bytes=num_bytes,
                made_at=made_at,
            )
    return None
