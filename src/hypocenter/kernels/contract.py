"""What a kernel demands of its arguments, declared once beside it and compiled to plain functions.

The same declaration serves the check before a launch, the check of index values, the choice of the
64-bit variant and the documentation. Nothing here launches or reads device memory by itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.errors import LaunchRejected
from hypocenter.tensor import DType, Tensor

Array = np.ndarray[Any, Any]
Values = Mapping[str, Any]

_NAME = re.compile(r"[a-z_][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Index:
    """The values of an index tensor: each lies in 0 .. `bound` - 1, or is the `sentinel`.

    `bound` is an expression over the contract's symbols, `of` says what is indexed, for the
    message. `live` marks the entries that the kernel will read (all when None): a function of the
    values of every tensor and scalar, giving a mask that broadcasts to the tensor's shape.
    """

    bound: str
    of: str
    sentinel: int | None = None
    live: Callable[[Values], Array] | None = None
    unique: bool = False
    monotone: bool = False


@dataclass(frozen=True, slots=True)
class Reach:
    """Which elements a kernel writes, where that is not all of the live rows; the rest stays.

    `of` says it, for the declaration. `mask` is a function of the values of every index tensor, of
    scalars and sizes, giving a mask that broadcasts to the live rows.
    """

    of: str
    mask: Callable[[Values], Array]


@dataclass(frozen=True, slots=True)
class Arg:
    """One tensor argument.

    `shape` is a comma-separated list of symbols (one name = one value within a call), numbers, and
    expressions over symbols bound before; `>= expression` asks for at least that much. `layout` is
    `contiguous`, `rows` (the last axis has stride 1), `pages` (so have the last two together) or
    `any`. `access` is read, write or both.
    `fills` says how far the last axis is written where that is not to its end, `reach` what is
    written where values decide it; `hides` that -infinity is among it, for what must not count.
    """

    name: str
    dtypes: tuple[DType, ...]
    shape: str
    access: str = "read"
    layout: str = "contiguous"
    alignment_bytes: int = 4
    optional: bool = False
    index: Index | None = None
    fills: str = ""
    reach: Reach | None = None
    hides: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis.strip() for axis in self.shape.split(","))


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number: `condition` is an expression over symbols that holds for right values."""

    name: str
    condition: str = "True"
    limit: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A relation between symbols, with the sentence that says it."""

    condition: str
    limit: str


@dataclass(frozen=True, slots=True)
class Apart:
    """Two tensors that must not overlap: the one is written while the other is still read."""

    written: str
    read: str


def live_counts(rows: str, count: int | None = None) -> Arg:
    """The tensor that says how many tokens [0] and how many logit rows [1] of a step are live.

    The kernel reads entry `count`, or the one that its scalar `count` names; it must not exceed
    `rows`, the symbol of the axis that it bounds.
    """

    def live(values: Values) -> Array:
        entry: int = values["count"] if count is None else count
        return np.array([entry == 0, entry == 1])

    index = Index(f"{rows} + 1", "a step of that size", live=live)
    return Arg("counts", (DType.I32,), "2", index=index)


#: Which entry of `counts` a kernel reads.
COUNT = Scalar("count", "count in (0, 1)", "must be 0 or 1")


def live_rows(name: str, count: int = 0) -> Callable[[Values], Array]:
    """The mask of the first counts[count] entries of the index tensor `name`."""
    return lambda values: np.arange(len(values[name])) < values["counts"][count]


class Contract:
    """A kernel's demands. `check` is a plain function made once from the declaration."""

    def __init__(self, kernel: str, *parts: Arg | Scalar | Rule | Apart) -> None:
        self.kernel = kernel
        self.args = tuple(part for part in parts if isinstance(part, Arg))
        self.scalars = tuple(part for part in parts if isinstance(part, Scalar))
        self.rules = tuple(part for part in parts if isinstance(part, Rule))
        self.apart = tuple(part for part in parts if isinstance(part, Apart))
        self.names = (*(arg.name for arg in self.args), *(one.name for one in self.scalars))
        self._source = "\n".join(self._lines())
        scope: dict[str, Any] = {"_fail": self._fail, "_who": _who}
        # An enum's member is slow to reach through its class; here each is a global of its own.
        scope |= {f"_{dtype.name}": dtype for dtype in DType}
        exec(compile(self._source, f"<contract of {kernel}>", "exec"), scope)
        #: check(**arguments) -> symbols; raises LaunchRejected. Looks at host-side facts only.
        self.check: Callable[..., dict[str, Any]] = scope["check"]

    def check_values(self, read: Callable[[Tensor], Array], **arguments: Any) -> None:
        """Also look into index tensors, read by `read`; raises LaunchRejected with the entry."""
        symbols = self.check(**arguments)
        values: dict[str, Any] = dict(symbols)
        for arg in self.args:
            if arg.index is not None and arguments[arg.name] is not None:
                values[arg.name] = read(arguments[arg.name])
        for arg in self.args:
            if arg.index is not None and arguments[arg.name] is not None:
                self._check_index(arg, arg.index, values)

    def needs_int64(self, **arguments: Any) -> bool:
        """Whether an argument spans 2**31 elements or more, so that 32-bit offsets would wrap."""
        return any(
            tensor is not None and _span(tensor) >= 1 << 31
            for tensor in (arguments[arg.name] for arg in self.args)
        )

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the tensor arguments that the kernel writes, or reads and writes."""
        return tuple(arg.name for arg in self.args if arg.access in ("write", "both"))

    def num_live(self, name: str, counts: Array, facts: Values) -> int | None:
        """How many rows of argument `name` are live, by the values of `counts`.

        None where its first axis does not count the rows of a step.
        """
        args = {arg.name: arg for arg in self.args}
        index = args["counts"].index if "counts" in args else None
        if index is None or index.live is None or name == "counts" or name not in args:
            return None
        rows = args[name].axes[0].removeprefix(">=").strip()
        if rows != index.bound.removesuffix(" + 1"):
            return None
        return int(counts[index.live(facts)][0])

    def num_rows(self, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
        """How many rows the step has room for, by the shapes of arguments; None without counts."""
        counts = next((arg.index for arg in self.args if arg.name == "counts"), None)
        rows = counts.bound.removesuffix(" + 1") if counts is not None else ""
        return next(
            (shapes[arg.name][0] for arg in self.args
             if arg.name in shapes and shapes[arg.name] and arg.axes[0] == rows), None,
        )  # fmt: skip

    def shape_of(
        self, name: str, shapes: Mapping[str, tuple[int, ...]], scalars: Values
    ) -> tuple[int, ...] | None:
        """The least shape that argument `name` must have beside the others, which have `shapes`,
        and of the last axis as much as is written.

        None where the others do not say.
        """
        symbols = self._symbols(shapes, scalars)
        arg = next(arg for arg in self.args if arg.name == name)
        try:
            axes = (*arg.axes[:-1], arg.fills or arg.axes[-1])
            return tuple(int(eval(axis.removeprefix(">="), {}, symbols)) for axis in axes)
        except (NameError, TypeError, ArithmeticError):
            return None

    def reached(
        self, name: str, shapes: Mapping[str, tuple[int, ...]], values: Values
    ) -> Array | None:
        """A mask over the live rows of argument `name`: what of them the kernel writes.

        None for all of it. `values` are of scalars and index tensors; raises KeyError for one
        that is not among them, IndexError where they make no sense.
        """
        reach = next(arg.reach for arg in self.args if arg.name == name)
        return reach.mask(self._symbols(shapes, values)) if reach is not None else None

    def _symbols(self, shapes: Mapping[str, tuple[int, ...]], values: Values) -> dict[str, Any]:
        """`values`, and the sizes of axes that the shapes give."""
        symbols: dict[str, Any] = dict(values)
        for arg in self.args:
            if arg.name in shapes:
                pairs = zip(arg.axes, shapes[arg.name], strict=False)
                symbols = {axis: size for axis, size in pairs if _NAME.fullmatch(axis)} | symbols
        return symbols

    def describe(self) -> str:
        """The declaration as text, one line per argument and rule."""
        lines = [
            f"{arg.name}: {'/'.join(dtype.name.lower() for dtype in arg.dtypes)} [{arg.shape}], "
            f"{arg.layout}, {arg.access}"
            + (f", filled to {arg.fills}" if arg.fills else "")
            + (f", {arg.reach.of}" if arg.reach else "")
            + (", -infinity hides" if arg.hides else "")
            + (f", indexes {arg.index.of} (0 .. {arg.index.bound} - 1)" if arg.index else "")
            for arg in self.args
        ]
        lines += [f"{scalar.name}: {scalar.limit or 'any'}" for scalar in self.scalars]
        return "\n".join([*lines, *(rule.limit for rule in self.rules)])

    def _lines(self) -> list[str]:
        lines = [f"def check(*, {', '.join(self.names)}):", "    device = None"]
        bound = {scalar.name for scalar in self.scalars}
        # A wrong number also makes right shapes look wrong, so it is told of first.
        first = [scalar for scalar in self.scalars if _names(scalar.condition) <= bound]
        lines += [line for scalar in first for line in _scalar_lines(scalar)]
        for arg in self.args:
            lines += [f"    {line}" for line in _tensor_lines(arg, bound)]
        for pair in self.apart:
            lines += [f"    {line}" for line in _apart_lines(pair)]
        last = [scalar for scalar in self.scalars if scalar not in first]
        lines += [line for scalar in last for line in _scalar_lines(scalar)]
        for rule in self.rules:
            shown = ", ".join(
                f"{name} = {{{name}}}"
                for name in dict.fromkeys(_NAME.findall(rule.condition))
                if name in bound
            )
            lines += [
                f"    if not ({rule.condition}):",
                f"    {_fail_line(f'{shown}, but {rule.limit}')}",
            ]
        pairs = ", ".join(f"{name!r}: {name}" for name in sorted(bound))
        return [*lines, f"    return {{{pairs}}}"]

    def _fail(self, reason: str) -> None:
        raise LaunchRejected(self.kernel, reason)

    def _check_index(self, arg: Arg, index: Index, values: dict[str, Any]) -> None:
        entries: Array = values[arg.name]
        bound = eval(index.bound, {}, values)
        wrong = (entries < 0) | (entries >= bound)
        if index.sentinel is not None:
            wrong &= entries != index.sentinel
        live = np.ones(entries.shape, bool)
        if index.live is not None:
            live = np.broadcast_to(index.live(values), entries.shape)
        self._first(arg, entries, wrong & live, f"{index.of} has {bound}")
        if index.monotone:
            falling = np.zeros(entries.shape, bool)
            falling[..., 1:] = entries[..., 1:] < entries[..., :-1]
            self._first(arg, entries, falling & live, "its entries must not fall")
        if index.unique:
            _, first = np.unique(entries[live], return_index=True)
            again = np.ones(int(live.sum()), bool)
            again[first] = False
            repeated = np.zeros(entries.shape, bool)
            repeated[live] = again
            self._first(arg, entries, repeated, "an entry before has the same value")

    def _first(self, arg: Arg, entries: Array, wrong: Array, limit: str) -> None:
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            place = ", ".join(map(str, at))
            self._fail(f"{arg.name}[{place}] = {int(entries[at])}, but {limit}")


def _names(expression: str) -> set[str]:
    parts = ast.walk(ast.parse(expression, mode="eval"))
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _scalar_lines(scalar: Scalar) -> list[str]:
    return [
        f"    if not ({scalar.condition}):",
        f"    {_fail_line(f'{scalar.name} is {{{scalar.name}}}, but {scalar.limit}')}",
    ]


def _tensor_lines(arg: Arg, bound: set[str]) -> list[str]:
    before = set(bound)
    name, who = arg.name, _who_expression(arg.name)
    kinds = " or ".join(dtype.name.lower() for dtype in arg.dtypes)
    other = " and ".join(f"{name}.dtype is not _{dtype.name}" for dtype in arg.dtypes)
    lines = [
        f"memory = {name}.allocation",
        "if memory.freed_at:",
        _fail_line(f"{who} was freed at {{memory.freed_at}}"),
        f'if not memory.address and memory.device != "cpu" and {name}.extent_bytes:',
        _fail_line(f"{who} is null: its allocation has no address"),
        "if device is None: device = memory.device",
        "elif memory.device != device:",
        _fail_line(f"{who} is on {{memory.device}}, the others on {{device}}"),
        f"if {other}:",
        _fail_line(f"{who} is {{{name}.dtype.name.lower()}}, but it is read as {kinds}"),
        f"if len({name}.shape) != {len(arg.axes)}:",
        _fail_line(f"{who} has shape {{{name}.shape}}, but must be [{arg.shape}]"),
        f"if {name}.address % {arg.alignment_bytes}:",
        _fail_line(
            f"{who} lies at {{{name}.address:#x}}, but must be aligned to "
            f"{arg.alignment_bytes} bytes"
        ),
        f"if {name}.end_bytes > memory.num_bytes:",
        _fail_line(
            f"{who} reaches to byte {{{name}.end_bytes}}, but its allocation has "
            "{memory.num_bytes}"
        ),
    ]
    for axis, demand in enumerate(arg.axes):
        lines += _axis_lines(arg, axis, demand, bound)
    if arg.layout != "any":
        is_so, what = {
            "contiguous": (f"{name}.is_contiguous", "contiguous"),
            "rows": (f"{name}.has_dense_rows", "contiguous along its last axis"),
            "pages": (
                f"{name}.strides[-2:] == ({name}.shape[-1], 1)",
                "contiguous along its last two axes",
            ),
        }[arg.layout]
        lines += [
            f"if not ({is_so}):",
            _fail_line(f"{who} has strides {{{name}.strides}}, but must be {what}"),
        ]
    if arg.optional:
        if bound != before:
            raise ValueError(f"{name} is optional, but binds {', '.join(sorted(bound - before))}")
        return [f"if {name} is not None:", *(f"    {line}" for line in lines)]
    return [f"if {name} is None:", _fail_line(f"{name} is null"), *lines]


def _apart_lines(pair: Apart) -> list[str]:
    a, b = pair.written, pair.read
    return [
        f"if {a}.allocation is {b}.allocation and {a}.address < {b}.address + {b}.extent_bytes "
        f"and {b}.address < {a}.address + {a}.extent_bytes:",
        _fail_line(
            f"{_who_expression(a)} and {_who_expression(b)} share memory, but the one is written "
            "while the other is read"
        ),
    ]


def _axis_lines(arg: Arg, axis: int, demand: str, bound: set[str]) -> list[str]:
    size = f"{arg.name}.shape[{axis}]"
    if _NAME.fullmatch(demand) and demand not in bound:
        bound.add(demand)
        return [f"{demand} = {size}"]
    sign, least = ("<", demand[2:].strip()) if demand.startswith(">=") else ("!=", demand)
    verb = "must be at least" if sign == "<" else "must be"
    shown = least if least.isdigit() else f"{least} = {{{least}}}"
    who = _who_expression(arg.name)
    return [
        f"if {size} {sign} {least}:",
        _fail_line(f"{who} has {{{size}}} along axis {axis}, but {verb} {shown}"),
    ]


def _fail_line(text: str) -> str:
    return f'    _fail(f"{text}")'


def _who_expression(name: str) -> str:
    return f"{{_who('{name}', {name})}}"


def _who(argument: str, tensor: Tensor) -> str:
    """An argument by its own name and by that of the tensor which was passed."""
    return argument if tensor.name == argument else f"{argument} ({tensor.name})"


def _span(tensor: Tensor) -> int:
    """Elements from the first to behind the last that the view reaches."""
    if not tensor.num_elements:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
