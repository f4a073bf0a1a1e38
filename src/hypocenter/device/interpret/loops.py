"""`range` and `tl.range` of an interpreted kernel: as compiled, what they count by is a tensor.

Unrolled loops (`tl.static_range`) keep Python's numbers; Triton's compiler has constants there.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import numpy as np

from hypocenter.device.interpret.builder import scalar
from hypocenter.device.triton_lang import interpreter

_interp: Any = interpreter()


def counting(first: Any, last: Any = None, step: Any = 1, **_: Any) -> Iterator[Any]:
    """The scalars of `range(first, last, step)`, of the type that Triton's compiler counts in.

    Hints to the compiler (`num_stages=`) change nothing here. Raises TypeError for a bound that is
    no integer, as the compiler does, and ValueError for a step of 0, as range does.
    """
    semantic = _interp.interpreter_semantic
    given = (0, first, step) if last is None else (first, last, step)
    lower, upper, by = bounds = [semantic.to_tensor(bound) for bound in given]
    types = [bound.dtype for bound in bounds]
    if not all(kind.is_int() for kind in types):
        shown = ", ".join(map(str, types))
        raise TypeError(f"the bounds and the step of a loop must be integers, but are {shown}")
    kind = semantic.integer_promote_impl(types[0], types[1])
    kind = semantic.integer_promote_impl(kind, types[2])
    numpy_type = _interp._get_np_dtype(kind)
    for number in builtins.range(_plain(lower), _plain(upper), _plain(by)):
        yield scalar(number, numpy_type, kind)


def _plain(bound: Any) -> int:
    _interp.interpreter_semantic.builder.branches_on(bound.handle)
    return int(np.asarray(bound.handle.data).item())
