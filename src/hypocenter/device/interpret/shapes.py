"""What Triton's language says of a block's shape, worked out once for each shape and then shared.

Triton makes it anew for every value of every program, which is a third of an interpreted launch.
Shapes are never changed in place. Where a Triton has other fields, its own code runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypocenter.device.triton_lang import interpreter, tl

_BLOCK_FIELDS = {"element_ty", "shape", "numel", "name"}
_TENSOR_FIELDS = {"handle", "shape", "numel", "type", "dtype"}
#: More different shapes than these are worked out anew, as Triton does.
_MAX_SHAPES = 4096
#: By elements along each axis: Triton's shape, the number of elements, and the shape as text.
_blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
#: By the id of a shape in `_blocks`, so that nothing else has that id; of a scalar by that of None:
#: a tensor's shape and number of elements.
_tensors: dict[int, tuple[Any, Any] | None] = {id(None): None}


def making_block_types(plain: Callable[..., None]) -> Callable[..., None]:
    """`block_type.__init__`, which is `plain`."""

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = []
        for size in shape:
            number = size if type(size) is int else getattr(size, "value", None)
            if type(number) is not int:  # a bool, or what Triton refuses
                return plain(self, element_ty, shape)
            sizes.append(number)
        key = tuple(sizes)
        known = _blocks.get(key)
        if known is None:
            plain(self, element_ty, shape)
            if vars(self).keys() == _BLOCK_FIELDS and len(_blocks) < _MAX_SHAPES:
                _blocks[key] = self.shape, self.numel, str(self.shape)
                _tensors[id(self.shape)] = None
            return None
        self.shape, self.numel, text = known
        self.element_ty, self.name = element_ty, f"<{text}, {element_ty}>"
        return None

    return init


def making_tensors(plain: Callable[..., None]) -> Callable[..., None]:
    """`tensor.__init__`, which is `plain`."""

    def init(self: Any, handle: Any, type: Any) -> None:
        key = id(type.shape if type.is_block() else None)
        known = _tensors.get(key)
        if known is None:
            plain(self, handle, type)
            if key in _tensors and vars(self).keys() == _TENSOR_FIELDS:
                _tensors[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    return init


def broadcasting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`broadcast_impl_value` of Triton's semantics, which is `plain`: of equal shapes nothing."""

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block():
            is_done = right.is_block() and left.shape is right.shape
        else:
            is_done = not right.is_block()
        return (lhs, rhs) if is_done else plain(self, lhs, rhs)

    return broadcast


def numpy_types(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_get_np_dtype` of Triton's interpreter, which is `plain` and builds a table in each call."""
    found: dict[Any, Any] = {}

    def numpy_type(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        key = tl.pointer_type if isinstance(scalar, tl.pointer_type) else scalar
        known = found.get(key)
        if known is None:
            known = found[key] = plain(kind)
        return known

    return numpy_type


NUMPY_TYPES = numpy_types(interpreter()._get_np_dtype)
