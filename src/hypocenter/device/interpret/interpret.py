"""Runs any @triton.jit function on the CPU, one program at a time, against a memory that is given.

Checks nothing itself: the memory sees every access. Triton's language is patched while
`interpreting` is open and restored when it closes; TRITON_INTERPRET is not needed.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError, UsageError
from hypocenter.device.interpret import block_pointers
from hypocenter.device.interpret.builder import (
    STEPS_BETWEEN,
    STEPS_BETWEEN_CLOSE,
    Builder,
    Exact,
    is_machinery,
    scalar,
)
from hypocenter.device.interpret.libdevice import LIBDEVICE
from hypocenter.device.interpret.libdevice_types import result_type
from hypocenter.device.interpret.loops import counting
from hypocenter.device.interpret.numbers import NumberBuilder, OnNumbers
from hypocenter.device.interpret.shapes import (
    NUMPY_TYPES,
    broadcasting,
    making_block_types,
    making_tensors,
)
from hypocenter.device.interpret.undefined import (
    Following,
    Watch,
    carry,
    reducing,
    scanning,
    transpose_defined,
)
from hypocenter.device.triton_lang import interpreter, tl, triton

_interp: Any = interpreter()
_JIT: Any = triton.runtime.jit.JITFunction

_TYPES: dict[str, Any] = {
    "bool": tl.int1, "uint8": tl.uint8, "int8": tl.int8, "uint16": tl.uint16, "int16": tl.int16,
    "uint32": tl.uint32, "int32": tl.int32, "uint64": tl.uint64, "int64": tl.int64,
    "float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32, "float64": tl.float64,
    "float8_e5m2": tl.float8e5, "float8_e4m3fn": tl.float8e4nv, "float8_e4m3fnuz": tl.float8e4b8,
    "float8_e5m2fnuz": tl.float8e5b16,
}  # fmt: skip
_ANNOTATED = {
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
}

_BUSY = threading.Lock()


class Memory(Protocol):
    """The four functions through which all accesses of a kernel go, as Triton's native ones.

    `pointers` is a uint64 array of byte addresses, `mask` a bool array of its shape; `dtype` is
    NumPy's (bfloat16 is uint16, float8 is uint8). `exact` is set before each access: the Exact of
    the pointers when integer arithmetic wrapped on the way to them, else None.
    """

    exact: Exact | None

    def load(self, pointers: Array, mask: Array, other: Array, dtype: Any) -> Array: ...
    def store(self, pointers: Array, values: Array, mask: Array) -> None: ...
    def atomic_rmw(
        self, operation: Any, pointers: Array, values: Array, mask: Array, order: Any
    ) -> Array: ...
    def atomic_cas(self, pointers: Array, compare: Array, values: Array, order: Any) -> Array: ...


def block_of_others(other: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A block that a load fills where its mask is true, with `other` everywhere.

    In C order, so that `reshape(-1)` is a view of it: Triton makes `other` in the order of the
    addresses, which may lie by columns.
    """
    return np.array(np.broadcast_to(other, shape), dtype=dtype, order="C")


@dataclass(frozen=True, slots=True)
class Pointer:
    """A tensor argument as a kernel sees it: where it begins, and torch's name of its type."""

    address: int
    dtype: str  # "float32", as torch names it


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A host-side tensor descriptor: shape and strides in elements."""

    base: Pointer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    padding: str


class StaticAssertFailed(HypoError):
    """tl.static_assert of a kernel does not hold: for Triton this variant does not compile."""


class Interpretation:
    """Programs of kernels, run against one memory; made by `interpreting`."""

    def __init__(self, memory: Memory, builder: Any) -> None:
        self._memory = memory
        self._builder = builder
        #: Of each program at its start; it becomes another where a lane has no value.
        self._kind = type(builder)
        self._functions: dict[Any, Callable[..., Any]] = {}
        #: Whether a kernel made block pointers, which not every Triton compiles.
        self.has_block_pointers = False

    @property
    def steps(self) -> int:
        """Integer operations and accesses so far: a measure of work that no clock disturbs."""
        return int(self._builder.steps)

    def watch_closely(self, closely: bool) -> None:
        """Whether `on_step` of `interpreting` is called after few operations."""
        self._builder.steps_between = STEPS_BETWEEN_CLOSE if closely else STEPS_BETWEEN

    def make_block_ptr(self, *args: Any, **options: Any) -> block_pointers.BlockPointer:
        """tl.make_block_ptr."""
        self.has_block_pointers = True
        return block_pointers.make_block_ptr(*args, **options)

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        """What tl.num_programs answers, and the bound of `run`'s programs."""
        self._builder.set_grid_dim(*grid)

    def bind(self, kernel: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name (Pointer, Descriptor, numbers, None, tuples) as the kernel's values.

        A parameter that is tl.constexpr, or that has a default and is left out, stays Python's.
        """
        kinds = {p.name: p for p in kernel.params}
        values = {}
        for name, value in arguments.items():
            is_constant = kinds[name].is_constexpr
            values[name] = value if is_constant else _value(value, kinds[name].annotation_type)
        return values

    def run(self, kernel: Any, values: Mapping[str, Any], program: tuple[int, int, int]) -> None:
        """Run one program; whatever the kernel or the memory raises comes through."""
        self._builder.__class__ = self._kind
        self._builder.set_grid_idx(*program)
        self.function(kernel)(**values)

    def suspend(self) -> object:
        """What belongs to the program that is running; `resume` goes on with it."""
        return self._builder.grid_idx, self._builder.__class__

    def resume(self, kept: Any) -> None:
        self._builder.grid_idx, self._builder.__class__ = kept

    def function(self, kernel: Any) -> Callable[..., Any]:
        """The Python function that does what the JITFunction `kernel` says."""
        # By the Python function: a JITFunction's hash parses its source and all it refers to.
        if kernel.fn not in self._functions:
            self._functions[kernel.fn] = self._fresh(kernel)
        return self._functions[kernel.fn]

    def _fresh(self, kernel: Any) -> Callable[..., Any]:
        """A copy whose globals are the kernel's of this moment, with the language's own names
        that were imported one by one (`from triton.language import load`) patched as well."""
        rewritten = _rewritten(kernel)
        names = {**rewritten.__globals__, **_visible(kernel.fn)}
        for name, value in names.items():
            names[name] = self._replace(value)
        names.setdefault("range", counting)
        names["interpreter_semantic"] = _interp.interpreter_semantic
        made = types.FunctionType(
            rewritten.__code__, names, rewritten.__name__, rewritten.__defaults__
        )
        made.__kwdefaults__ = rewritten.__kwdefaults__
        return made

    def _replace(self, value: Any) -> Any:
        if not isinstance(value, types.FunctionType):
            return value
        if value.__module__.endswith("libdevice") and value.__name__ in LIBDEVICE:
            return _numpy_function(value.__name__)
        if value.__module__.startswith("triton.language") and tl.core.is_builtin(value):
            home = sys.modules[value.__module__]
            return getattr(tl, value.__name__, getattr(home, value.__name__, value))
        return value


@contextlib.contextmanager
def interpreting(
    memory: Memory,
    *,
    on_step: Callable[[], None] = lambda: None,
    on_numbers: OnNumbers | None = None,
    watch: Watch | None = None,
    operands: Callable[[Array, Array, str], tuple[Array, Array]] | None = None,
) -> Iterator[Interpretation]:
    """Open Triton's language for running kernels in Python; restores it whatever happens.

    One at a time in a process: raises UsageError when one is open already, in this thread or in
    another. `on_step` is called each 4096 operations, or more often if asked, and may raise.
    `on_numbers` is told of results that are not finite (`numbers.py`). `watch` is told where lanes
    go that a load leaves out, but for a run whose numbers are looked at. `operands` makes of the
    two operands of a product, and the name of its precision, those that are multiplied.
    """
    if not _BUSY.acquire(blocking=False):
        raise UsageError(
            "a kernel is being interpreted already: triton.language is patched for the whole "
            "process, so replays can neither nest nor run in two threads; wait for the first"
        )
    changed = _Changes()
    try:
        builder = Builder(memory, on_step)
        if on_numbers is not None:
            builder = NumberBuilder(memory, on_step, on_numbers)
        if watch is not None:
            builder.watch = watch
            builder.following = Following if on_numbers is None else None
        builder.operands = operands
        opened = Interpretation(memory, builder)
        _patch(changed, memory, builder, opened)
        # Triton's interpreter reduces by NumPy's nanmax, which warns of rows that are all NaN;
        # a GPU does not, and overflow to infinity is no event there either.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield opened
    finally:
        changed.restore()
        _BUSY.release()


def indent_of(code: types.CodeType) -> int:
    """Columns that the kernel's source was moved left before it was compiled."""
    return _indents.get(code, 0)


class _Changes:
    """Attributes that were set, and what they were; `restore` goes backwards."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, dict[str, Any]]] = []
        self._set: list[tuple[Any, str, Any]] = []

    def watch(self, thing: Any) -> None:
        """Remember all attributes: older Tritons patch their language and keep no list."""
        self._before.append((thing, dict(vars(thing))))

    def put(self, thing: Any, name: str, value: Any) -> None:
        self._set.append((thing, name, vars(thing)[name]))
        setattr(thing, name, value)

    def restore(self) -> None:
        for thing, name, value in reversed(self._set):
            setattr(thing, name, value)
        for thing, before in self._before:
            for name, value in list(vars(thing).items()):
                if name not in before:
                    delattr(thing, name)
                elif value is not before[name]:
                    setattr(thing, name, before[name])


def _patch(changed: _Changes, memory: Memory, builder: Any, opened: Interpretation) -> None:
    language = [tl, tl.core, tl.standard, tl.math, tl.random, tl.tensor, tl.dtype]
    language += [tl.core.tensor_descriptor_base, tl.core.tensor_descriptor]
    language += [tl.condition] if hasattr(tl, "condition") else []
    for thing in language:
        changed.watch(thing)
    changed.put(tl.block_type, "__init__", making_block_types(tl.block_type.__init__))
    tl.tensor.__init__ = making_tensors(tl.tensor.__init__)
    semantic = _interp.TritonSemantic
    changed.put(semantic, "broadcast_impl_value", broadcasting(semantic.broadcast_impl_value))
    changed.put(_interp, "_get_np_dtype", NUMPY_TYPES)
    changed.put(_interp, "_interpreter", _Native(_interp._interpreter, memory))
    changed.put(_interp, "interpreter_builder", builder)
    changed.put(_interp, "interpreter_semantic", _interp.TritonSemantic(builder))
    _interp._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    # The interpreter of Triton 3.6 and older says int(array([n])), which NumPy 2.4 refuses.
    tl.tensor.__index__ = lambda self: self.handle.data.item()
    tl.range = tl.core.range = counting
    tl.static_assert = tl.core.static_assert = _static_assert
    tl.make_block_ptr = tl.core.make_block_ptr = opened.make_block_ptr
    tl.advance = tl.core.advance = block_pointers.advance
    tl.reduce = tl.core.reduce = reducing(tl.core.reduce)
    tl.associative_scan = tl.core.associative_scan = scanning(tl.core.associative_scan)
    tl.tensor.T = transpose_defined(tl.tensor.T)
    tl.tensor.__bool__ = _branching(builder, tl.tensor.__bool__)
    tl.load = tl.core.load = block_pointers.loading(tl.load)
    tl.store = tl.core.store = block_pointers.storing(tl.store)

    def call(self: Any, *args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return opened.function(self)(*args, **kwargs)

    # Kernels call jitted functions: their own, and tl.sum, tl.cdiv and the like.
    changed.put(_JIT, "__call__", call)
    for name, value in list(vars(tl.tensor).items()):
        if isinstance(value, _JIT):
            setattr(tl.tensor, name, lambda *args, _f=value, **kwargs: call(_f, *args, **kwargs))
    for name, module in list(sys.modules.items()):
        if name.startswith("triton.language.extra") and name.endswith("libdevice"):
            for known in LIBDEVICE.keys() & vars(module).keys():
                changed.put(module, known, _numpy_function(known))


def _branching(builder: Any, plain: Callable[..., bool]) -> Callable[..., bool]:
    def truth(self: Any) -> bool:
        if not is_machinery(sys._getframe(1).f_code.co_filename):  # Triton asks on its own account
            builder.branches_on(self.handle)
        return plain(self)

    return truth


class _Native:
    """Triton's native interpreter module with the four accesses going to a memory instead."""

    def __init__(self, native: Any, memory: Memory) -> None:
        self._native = native
        self.load, self.store = memory.load, memory.store
        self.atomic_rmw, self.atomic_cas = memory.atomic_rmw, memory.atomic_cas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


def _static_assert(condition: Any, message: Any = "") -> None:
    if not condition:
        raise StaticAssertFailed(f"static_assert failed{f': {message}' if message else ''}")


def _numpy_function(name: str) -> Callable[..., Any]:
    """The libdevice function `name` on Triton tensors and numbers, typed as Triton types it."""
    function = LIBDEVICE[name]

    def call(*args: Any, **_: Any) -> Any:
        operands = [_interp.interpreter_semantic.to_tensor(arg) for arg in args]
        given = result_type(name, [operand.dtype for operand in operands])
        result = np.asarray(function(*(operand.handle.data for operand in operands)))
        result = result.astype(_interp._get_np_dtype(given), copy=False)
        is_block = any(operand.type.is_block() for operand in operands)
        kind = tl.block_type(given, list(result.shape)) if is_block else given
        handle = _interp.TensorHandle(result, given)
        carry([operand.handle for operand in operands], handle)
        return tl.tensor(handle, kind)

    return call


#: By the kernel's Python function.
_kept: weakref.WeakKeyDictionary[Any, types.FunctionType] = weakref.WeakKeyDictionary()
_indents: dict[types.CodeType, int] = {}


def _rewritten(kernel: Any) -> types.FunctionType:
    """Triton's rewriting of the source (assignments make tensors), done once per kernel."""
    function = kernel.fn
    if function not in _kept:
        copy = types.FunctionType(
            function.__code__,
            _visible(function),
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
        copy.__annotations__ = function.__annotations__
        copy.__kwdefaults__ = function.__kwdefaults__
        made: types.FunctionType = _interp.FunctionRewriter(copy).rewrite_ast()
        _kept[function] = made
        lines = inspect.getsource(function).splitlines() if made is not copy else []
        first = next((line for line in lines if line.lstrip().startswith("def ")), "")
        _indents[made.__code__] = len(first) - len(first.lstrip())
    return _kept[function]


def _visible(function: Any) -> dict[str, Any]:
    """Globals and closure of a function as one new dictionary."""
    names = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a name of the outer function not yet bound
            names[name] = cell.cell_contents
    return names


def _value(value: Any, annotation: str) -> Any:
    """One argument as a Triton value; strings, dtypes and functions stay what they are."""
    if isinstance(value, Pointer):
        kind = tl.pointer_type(_TYPES[value.dtype])
        return scalar(value.address, np.uint64, kind)
    if isinstance(value, Descriptor):
        return _descriptor(value)
    if isinstance(value, tuple):
        parts = [_value(part, "") for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tl.tuple(parts)
    if isinstance(value, bool):
        return scalar(value, np.bool_, tl.int1)
    if isinstance(value, int):
        name = _ANNOTATED.get(annotation) or _integer_type(value)
        return scalar(value, getattr(np, name), _TYPES[name])
    if isinstance(value, float):
        wide = annotation == "fp64"
        return scalar(value, np.float64 if wide else np.float32, tl.float64 if wide else tl.float32)
    return value


def _integer_type(value: int) -> str:
    """How Triton types a Python integer that no annotation types."""
    if -(2**31) <= value < 2**31:
        return "int32"
    return "uint64" if value >= 2**63 else "int64"


def _descriptor(value: Descriptor) -> Any:
    make = _interp.interpreter_semantic.make_tensor_descriptor
    strides: list[Any] = [scalar(stride, np.int64, tl.int64) for stride in value.strides]
    strides[-1] = tl.constexpr(1)
    # Triton 3.4 knows no padding but zeros.
    padding = (value.padding,) if "padding_option" in inspect.signature(make).parameters else ()
    return make(
        _value(value.base, ""),
        [scalar(size, np.int32, tl.int32) for size in value.shape],
        strides,
        [tl.constexpr(size) for size in value.block_shape],
        *padding,
    )
