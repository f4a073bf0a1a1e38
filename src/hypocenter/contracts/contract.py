"""What a kernel demands of its arguments, declared once beside it.

The same declaration serves the check before a launch, the check of index values, the choice of the
64-bit variant and the documentation. Nothing here launches or reads device memory by itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from hypocenter.base.dtypes import NUMPY_DTYPES, Array
from hypocenter.base.errors import LaunchRejected
from hypocenter.base.refusals import (
    AnyRefusal,
    EntryFalls,
    EntryOutOfRange,
    EntryRefusal,
    EntryRepeated,
)
from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract_source import (
    Check,
    Demand,
    Refusals,
    compile_check,
    compile_refusals,
)
from hypocenter.contracts.demands import (
    SYMBOL,
    Apart,
    Arg,
    Index,
    Rule,
    Scalar,
    Symbols,
    evaluate,
)
from hypocenter.record.events import ArgumentDeclaration, Declaration


class Contract:
    """A kernel's demands. `check` is a plain function made once from the declaration, when it is
    first asked for: a start needs a few of them."""

    def __init__(self, kernel: str, *demands: Demand) -> None:
        self.kernel, self._demands = kernel, demands
        self._module: str = sys._getframe(1).f_globals["__name__"]
        self.args = tuple(demand for demand in demands if isinstance(demand, Arg))
        self.scalars = tuple(demand for demand in demands if isinstance(demand, Scalar))
        self.rules = tuple(demand for demand in demands if isinstance(demand, Rule))
        self.apart = tuple(demand for demand in demands if isinstance(demand, Apart))
        self.names = (*(arg.name for arg in self.args), *(scalar.name for scalar in self.scalars))

    @functools.cached_property
    def check(self) -> Check:
        """check(**arguments) -> symbols; raises LaunchRejected. Reads no data of a device."""
        return compile_check(self.kernel, self._demands, self._fail)

    @functools.cached_property
    def refusals(self) -> Refusals:
        """refusals(device, **arguments) -> all that `check` would refuse, one after the other."""
        return compile_refusals(self.kernel, self._demands)

    def check_values(self, read: Callable[[Tensor], Array], **arguments: Any) -> None:
        """Also look into index tensors, read by `read`; raises LaunchRejected with the entry."""
        values: dict[str, Any] = self.check(**arguments)
        for arg in self.args:
            if arg.index is not None and arguments[arg.name] is not None:
                values[arg.name] = read(arguments[arg.name])
        for refusal in self.index_refusals(values):
            self._fail(refusal)

    def index_refusals(self, values: Symbols) -> Iterator[EntryRefusal]:
        """The first entry that is not as it must be of each index tensor that is among `values`.

        `values` has the symbols too. A tensor is left out where its live entries depend on one that
        is not there.
        """
        for arg in self.args:
            if arg.index is not None and arg.name in values:
                try:
                    live = self.live_entries(arg.name, values)
                except KeyError:
                    continue
                yield from _index_refusals(arg.name, arg.index, live, values)

    def live_entries(self, name: str, values: Symbols) -> Array:
        """The mask of the entries of an index tensor that the kernel will read.

        Raises KeyError where that depends on a tensor that is not among `values`.
        """
        index = next(arg.index for arg in self.args if arg.name == name)
        entries: Array = values[name]
        if index is None or index.live is None:
            return np.ones(entries.shape, bool)
        return np.broadcast_to(index.live(values), entries.shape)

    def needs_int64(self, **arguments: Any) -> bool:
        """Whether an argument spans 2**31 elements or more, so that 32-bit offsets would wrap; of
        blocks, which may take more bytes than they have elements, it is bytes."""
        for arg in self.args:
            tensor = arguments[arg.name]
            if tensor is not None and (
                tensor.span >= 1 << 31
                or (tensor.dtype.is_quantised and tensor.extent_bytes >= 1 << 31)
            ):
                return True
        return False

    def absent(self, name: str) -> Array | None:
        """What a CPU kernel gets for an optional tensor that is not there: no elements of its type.

        None for any other argument.
        """
        arg = next((arg for arg in self.args if arg.name == name and arg.optional), None)
        return None if arg is None else _empty(arg.dtypes[0], len(arg.axes))

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the tensor arguments that the kernel writes, or reads and writes."""
        return tuple(arg.name for arg in self.args if arg.access in ("write", "both"))

    def num_live(self, name: str, counts: Array, symbols: Symbols) -> int | None:
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
        return int(counts[index.live(symbols)][0])

    def num_rows(self, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
        """How many rows the step has room for, by the shapes of arguments; None without counts."""
        counts = next((arg.index for arg in self.args if arg.name == "counts"), None)
        rows = counts.bound.removesuffix(" + 1") if counts is not None else ""
        return next(
            (
                shapes[arg.name][0]
                for arg in self.args
                if arg.name in shapes and shapes[arg.name] and arg.axes[0] == rows
            ),
            None,
        )

    def shape_of(
        self, name: str, shapes: Mapping[str, tuple[int, ...]], scalars: Symbols
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

    def mask_written(
        self, name: str, shapes: Mapping[str, tuple[int, ...]], values: Symbols
    ) -> Array | None:
        """A mask over the live rows of argument `name`: what of them the kernel writes.

        None for all of it. `values` are of scalars and index tensors; raises KeyError for one
        that is not among them, IndexError where they make no sense.
        """
        reach = next(arg.reach for arg in self.args if arg.name == name)
        return reach.mask(self._symbols(shapes, values)) if reach is not None else None

    def _symbols(self, shapes: Mapping[str, tuple[int, ...]], values: Symbols) -> dict[str, Any]:
        """`values`, and the sizes of axes that the shapes give."""
        symbols: dict[str, Any] = dict(values)
        for arg in self.args:
            if arg.name in shapes:
                pairs = zip(arg.axes, shapes[arg.name], strict=False)
                symbols = {axis: size for axis, size in pairs if SYMBOL.fullmatch(axis)} | symbols
        return symbols

    @functools.cached_property
    def place(self) -> str:
        """The module that made it and its name there: "hypocenter.kernels.rowwise.norm:CONTRACT".

        Empty for one that has no name at the top of that module.
        """
        named = named_contracts(getattr(sys.modules.get(self._module), "__dict__", {}))
        return next((f"{self._module}:{name}" for name, found in named if found is self), "")

    @functools.cached_property
    def declaration(self) -> Declaration:
        """What is recorded of it."""
        return Declaration(
            kernel=self.kernel,
            arguments=tuple(map(_declaration_of, self.args)),
            scalars={scalar.name: scalar.limit for scalar in self.scalars},
            rules=tuple(rule.limit for rule in self.rules),
        )

    def _fail(self, refusal: AnyRefusal) -> NoReturn:
        raise LaunchRejected(self.kernel, refusal)


def named_contracts(names: Mapping[str, Any]) -> Iterator[tuple[str, Contract]]:
    """The contracts of a module with their names, those in tuples as "SCALED[1]"."""
    for name, value in names.items():
        if isinstance(value, Contract):
            yield name, value
        elif isinstance(value, tuple):
            for index, one in enumerate(value):
                if isinstance(one, Contract):
                    yield f"{name}[{index}]", one


@functools.cache
def _empty(dtype: DType, num_axes: int) -> Array:
    return np.zeros((0,) * num_axes, NUMPY_DTYPES[dtype.name])


def _declaration_of(arg: Arg) -> ArgumentDeclaration:
    return ArgumentDeclaration(
        name=arg.name,
        dtypes=tuple(dtype.name for dtype in arg.dtypes),
        shape=arg.shape,
        layout=arg.layout,
        access=arg.access,
        fills=arg.fills,
        reach=arg.reach.of if arg.reach else "",
        hides=arg.hides,
        indexes=arg.index.of if arg.index else "",
        bound=arg.index.bound if arg.index else "",
    )


def _index_refusals(
    name: str, index: Index, live: Array, values: Symbols
) -> Iterator[EntryRefusal]:
    """The first entry, if there is one, that is out of range, falls or occurs before."""
    entries: Array = values[name]
    bound = evaluate(index.bound, values)
    if bound is None:
        return
    wrong = ((entries < 0) | (entries >= bound)) & live
    if index.sentinel is not None:
        wrong &= entries != index.sentinel
    if wrong.any():
        at = _first(wrong)
        yield EntryOutOfRange(
            argument=name,
            entry=at,
            value=int(entries[at]),
            of=index.of,
            bound=bound,
            num_wrong=int(wrong.sum()),
            num_live=int(live.sum()),
        )
        return
    if index.monotone:
        falling = np.zeros(entries.shape, bool)
        falling[..., 1:] = entries[..., 1:] < entries[..., :-1]
        if (falling & live).any():
            at = _first(falling & live)
            yield EntryFalls(argument=name, entry=at, value=int(entries[at]))
    if index.unique:
        repeated = repeated_entries(entries, live)
        if repeated.any():
            at = _first(repeated)
            yield EntryRepeated(argument=name, entry=at, value=int(entries[at]))


def repeated_entries(entries: Array, live: Array) -> Array:
    """The mask of live entries that a live entry before has, too."""
    _, first = np.unique(entries[live], return_index=True)
    again = np.ones(int(live.sum()), bool)
    again[first] = False
    repeated = np.zeros(entries.shape, bool)
    repeated[live] = again
    return repeated


def _first(mask: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(mask)[0])
