"""Block pointers (`tl.make_block_ptr`, `tl.advance`) of an interpreted kernel, in any Triton.

Triton 3.9 has them no more. Each access becomes one by a tensor of pointers, with a mask where
`boundary_check` asks for it; the memory sees it like any other. `interpret.py` puts them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hypocenter.device.interpret.builder import scalar
from hypocenter.device.triton_lang import interpreter, tl, triton

#: The last Triton whose compiler takes block pointers, which emulated them itself.
_LAST_TRITON = (3, 8)


@dataclass(frozen=True, slots=True, eq=False)
class BlockPointer:
    """A block of `block_shape` elements at `offsets` of a tensor, as a kernel holds it.

    `shape`, `strides` and `offsets` are int64 scalars of Triton, in elements.
    """

    base: Any
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offsets: tuple[Any, ...]
    block_shape: tuple[int, ...]

    @property
    def type(self) -> Any:
        """As compiled: a pointer to a block, whose `element_ty` a kernel may cast to."""
        return tl.pointer_type(tl.block_type(self.base.dtype.element_ty, list(self.block_shape)))

    @property
    def dtype(self) -> Any:
        return self.type

    def advance(self, offsets: Any) -> BlockPointer:
        """The block `offsets` elements further along each axis."""
        steps = _scalars("offsets", offsets, len(self.block_shape))
        moved = (start + step for start, step in zip(self.offsets, steps, strict=True))
        return replace(self, offsets=tuple(moved))

    def __str__(self) -> str:
        where, size = _numbers(self.offsets), _numbers(self.shape)
        return f"block {list(self.block_shape)} at {where} of shape {size}"


def compile_problem(version: str = triton.__version__) -> str:
    """Why that Triton compiles no kernel with block pointers, and the way out; "" if it does."""
    last = ".".join(map(str, _LAST_TRITON))
    if tuple(int(part) for part in version.split(".")[:2]) <= _LAST_TRITON:
        return ""
    return (
        f"block pointers need Triton {last} or older, and {version} is installed; install triton "
        f"{last}, or use tl.make_tensor_descriptor"
    )


def make_block_ptr(
    base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any, **_: Any
) -> BlockPointer:
    """tl.make_block_ptr; raises ValueError for what Triton's compiler refuses."""
    if not isinstance(base, tl.tensor) or not base.type.is_ptr():
        raise ValueError("the base of a block pointer must be a scalar pointer")
    sizes = tuple(int(_plain(size)) for size in _sequence(block_shape))
    axes = sorted(int(_plain(axis)) for axis in _sequence(order))
    if axes != list(range(len(sizes))):
        raise ValueError(f"order must be a permutation of {list(range(len(sizes)))}, but is {axes}")
    if base.dtype.element_ty == tl.int1:
        base = base.to(tl.pointer_type(tl.int8))
    return BlockPointer(
        base,
        _scalars("shape", shape, len(sizes)),
        _scalars("strides", strides, len(sizes)),
        _scalars("offsets", offsets, len(sizes)),
        sizes,
    )


def advance(base: Any, offsets: Any, **_: Any) -> BlockPointer:
    """tl.advance."""
    if not isinstance(base, BlockPointer):
        raise ValueError("tl.advance takes a block pointer, made by tl.make_block_ptr")
    return base.advance(offsets)


def loading(plain: Callable[..., Any]) -> Callable[..., Any]:
    """tl.load for block pointers too; all other pointers go to `plain`."""

    def load(
        pointer: Any,
        mask: Any = None,
        other: Any = None,
        boundary_check: Any = (),
        padding_option: Any = "",
        **options: Any,
    ) -> Any:
        checked, padding = _sequence(boundary_check), str(_plain(padding_option) or "")
        interpreter().interpreter_semantic.builder.gives_other = _plain(other) is not None
        if not isinstance(pointer, BlockPointer):
            _refuse(checked or padding, "boundary_check and padding_option are", "block pointers")
            return plain(pointer, mask, other, **options)
        _refuse(
            _plain(mask) is not None or _plain(other) is not None,
            "mask and other are",
            "other pointers",
        )
        pointers, inside = _pointers(pointer, checked)
        if inside is None:
            return plain(pointers, **options)
        if not padding:  # what lies outside is undefined then
            return plain(pointers, inside, **options)
        kind = pointer.base.dtype.element_ty
        if padding == "nan" and not kind.is_floating():
            raise ValueError(f"padding_option 'nan' is for floats, and this block holds {kind}")
        interpreter().interpreter_semantic.builder.gives_other = True
        outside = tl.full(pointer.block_shape, float("nan") if padding == "nan" else 0, kind)
        return plain(pointers, inside, outside, **options)

    return load


def storing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """tl.store for block pointers too; all other pointers go to `plain`."""

    def store(
        pointer: Any, value: Any, mask: Any = None, boundary_check: Any = (), **options: Any
    ) -> Any:
        checked = _sequence(boundary_check)
        if not isinstance(pointer, BlockPointer):
            _refuse(checked, "boundary_check is", "block pointers")
            return plain(pointer, value, mask, **options)
        _refuse(_plain(mask) is not None, "mask is", "other pointers")
        kind = pointer.base.dtype.element_ty
        if isinstance(value, tl.tensor) and value.type.is_block():
            shape = tuple(int(size) for size in value.shape)
            if shape != pointer.block_shape or value.dtype != kind:
                raise ValueError(
                    f"a block pointer to {list(pointer.block_shape)} of {kind} cannot take a "
                    f"block {list(shape)} of {value.dtype}; cast it with .to({kind})"
                )
        pointers, inside = _pointers(pointer, checked)
        return plain(pointers, value, inside, **options)

    return store


def _pointers(block: BlockPointer, checked: Sequence[Any]) -> tuple[Any, Any]:
    """The address of each element; whether it is inside along the `checked` axes, or None."""
    axes = [int(_plain(axis)) for axis in checked]
    if any(not 0 <= axis < len(block.block_shape) for axis in axes):
        raise ValueError(f"boundary_check {axes} names no axis of {list(block.block_shape)}")
    pointers, inside = block.base, None
    for axis, size in enumerate(block.block_shape):
        index = block.offsets[axis] + tl.arange(0, size).to(tl.int64)
        for other in range(len(block.block_shape)):
            index = index if other == axis else tl.expand_dims(index, other)
        pointers = pointers + index * block.strides[axis]
        if axis in axes:
            within = (index >= 0) & (index < block.shape[axis])
            inside = within if inside is None else inside & within
    if inside is not None:
        inside = tl.broadcast_to(inside, block.block_shape)
    return pointers, inside


def _refuse(is_given: Any, what: str, of: str) -> None:
    if is_given:
        raise ValueError(f"{what} for {of} only")


def _scalars(what: str, values: Any, rank: int) -> tuple[Any, ...]:
    """As int64 scalars of Triton, which is what its compiler computes block addresses in."""
    given = _sequence(values)
    if len(given) != rank:
        raise ValueError(f"a block pointer has {len(given)} {what}, but its block {rank} axes")
    return tuple(_scalar(value) for value in given)


def _scalar(value: Any) -> Any:
    if isinstance(value, tl.tensor):
        return value.to(tl.int64)
    return scalar(int(_plain(value)), np.int64, tl.int64)


def _sequence(values: Any) -> Sequence[Any]:
    plain = _plain(values)
    return list(plain) if hasattr(plain, "__iter__") else [plain]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _numbers(scalars: Sequence[Any]) -> str:
    return f"({', '.join(str(np.asarray(s.handle.data).reshape(-1)[0]) for s in scalars)})"
