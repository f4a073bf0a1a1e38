"""Writes the functions that a contract is compiled to; the only place that executes made text.

What is executed comes from declarations in this package, never from a file or a bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypocenter.base.refusals import (
    AnyRefusal,
    BrokenRule,
    FreedTensor,
    Misaligned,
    Null,
    OnOtherDevice,
    Overlap,
    TooShort,
    WrongAxes,
    WrongScalar,
    WrongSize,
    WrongStrides,
    WrongType,
)
from hypocenter.base.tensor import DType
from hypocenter.contracts.demands import SYMBOL, Apart, Arg, Rule, Scalar, is_broken, names_in

Demand = Arg | Scalar | Rule | Apart
Check = Callable[..., dict[str, Any]]
Refusals = Callable[..., Generator[AnyRefusal, None, dict[str, Any]]]


def compile_check(
    kernel: str, demands: Sequence[Demand], fail: Callable[[AnyRefusal], None]
) -> Check:
    """check(**arguments) of a declaration: calls `fail`, which raises, with the first demand that
    is broken, and returns the values of symbols."""
    check: Check = _function_of(kernel, demands, _CHECK, {"_fail": fail})
    return check


def compile_refusals(kernel: str, demands: Sequence[Demand]) -> Refusals:
    """refusals(device, **arguments) of a declaration: yields all demands that are broken, for a
    launch on `device`, and returns the symbols that are known."""
    refusals: Refusals = _function_of(kernel, demands, _LIST, {"_broken": is_broken})
    return refusals


def _function_of(
    kernel: str, demands: Sequence[Demand], form: _Form, names: Mapping[str, Any]
) -> Any:
    # An enum's member is slow to reach through its class; here each is a global of its own.
    scope: dict[str, Any] = {**names, **_REFUSALS, **{f"_{dtype.name}": dtype for dtype in DType}}
    source = "\n".join(_Source(demands, form).lines())
    exec(compile(source, f"<{form.name} of {kernel}>", "exec"), scope)
    return scope[form.name]


@dataclass(frozen=True, slots=True)
class _Form:
    """One of the two functions that are made of a declaration: `check` stops at what is broken,
    `refusals` goes on, and takes what it cannot evaluate by then for right."""

    name: str
    parameters: str
    fails: str
    tests: str


_CHECK = _Form("check", "*", "_fail({refusal})", "{condition}")
_LIST = _Form("refusals", "device, *", "yield {refusal}", "_broken(lambda: {condition})")
_REFUSALS = {
    kind.__name__: kind
    for kind in (
        BrokenRule,
        FreedTensor,
        Misaligned,
        Null,
        OnOtherDevice,
        Overlap,
        TooShort,
        WrongAxes,
        WrongScalar,
        WrongSize,
        WrongStrides,
        WrongType,
    )
}
_LAYOUTS = {
    "contiguous": ("{name}.is_contiguous", "must be contiguous"),
    "rows": ("{name}.has_dense_rows", "must be contiguous along its last axis"),
    "pages": (
        "{name}.strides[-2:] == ({name}.shape[-1], 1)",
        "must be contiguous along its last two axes",
    ),
}


class _Source:
    """Writes one function; `bound` are the symbols that are known at a place of its text."""

    def __init__(self, demands: Sequence[Demand], form: _Form) -> None:
        self.form = form
        self.args = [demand for demand in demands if isinstance(demand, Arg)]
        self.scalars = [demand for demand in demands if isinstance(demand, Scalar)]
        self.rules = [demand for demand in demands if isinstance(demand, Rule)]
        self.pairs = [demand for demand in demands if isinstance(demand, Apart)]
        self.bound = {scalar.name for scalar in self.scalars}

    def lines(self) -> Iterator[str]:
        form = self.form
        names = ", ".join(
            [arg.name for arg in self.args] + [scalar.name for scalar in self.scalars]
        )
        yield f"def {form.name}({form.parameters}{', ' if names else ''}{names}):"
        if form is _CHECK:
            yield "    device = None"
        else:
            sizes = {axis for arg in self.args for axis in arg.axes if SYMBOL.fullmatch(axis)}
            yield from (f"    {name} = None" for name in sorted(sizes - self.bound))
            yield "    if False: yield"
        # A wrong number also makes right shapes look wrong, so it is told of first.
        first = [scalar for scalar in self.scalars if {*names_in(scalar.condition)} <= self.bound]
        for scalar in first:
            yield from self._of_scalar(scalar)
        for arg in self.args:
            yield from self._of_tensor(arg)
        for pair in self.pairs:
            yield from self._of_pair(pair)
        for scalar in self.scalars:
            if scalar not in first:
                yield from self._of_scalar(scalar)
        for rule in self.rules:
            yield from self._of_rule(rule)
        pairs = ", ".join(f"{name!r}: {name}" for name in sorted(self.bound))
        yield f"    return {{{pairs}}}"

    def _unless(self, condition: str, refusal: str, depth: int = 1) -> Iterator[str]:
        yield from self._when(f"not ({condition})", refusal, depth)

    def _when(self, condition: str, refusal: str, depth: int = 1) -> Iterator[str]:
        yield f"{'    ' * depth}if {self.form.tests.format(condition=condition)}:"
        yield f"{'    ' * (depth + 1)}{self.form.fails.format(refusal=refusal)}"

    def _of_scalar(self, scalar: Scalar) -> Iterator[str]:
        name = scalar.name
        yield from self._unless(
            scalar.condition,
            f"WrongScalar(argument={name!r}, value=getattr({name}, 'item', lambda: {name})(), "
            f"limit={scalar.limit!r})",
        )

    def _of_rule(self, rule: Rule) -> Iterator[str]:
        known = [name for name in names_in(rule.condition) if name in self.bound]
        values = ", ".join(f"{name!r}: {name}" for name in known)
        yield from self._unless(
            rule.condition,
            f"BrokenRule(values={{{values}}}, condition={rule.condition!r}, limit={rule.limit!r})",
        )

    def _of_tensor(self, arg: Arg) -> Iterator[str]:
        before = set(self.bound)
        yield f"    if {arg.name} is None:"
        fails = self.form.fails.format(refusal=f"Null(argument={arg.name!r})")
        yield f"        {'pass' if arg.optional else fails}"
        yield "    else:"
        yield from self._of_memory(arg)
        yield from self._of_shape(arg)
        if arg.optional and self.bound != before:
            new = ", ".join(sorted(self.bound - before))
            raise ValueError(f"{arg.name} is optional, but binds {new}")

    def _of_memory(self, arg: Arg) -> Iterator[str]:
        name, who = arg.name, _who(arg.name)
        yield f"        memory = {name}.allocation"
        yield from self._when("memory.freed_at", f"FreedTensor({who}, site=memory.freed_at)", 2)
        yield from self._when(
            f'not memory.address and memory.device != "cpu" and {name}.extent_bytes',
            f"Null({who}, why='its allocation has no address')",
            2,
        )
        yield "        if device is None: device = memory.device"
        yield from self._when(
            "memory.device != device",
            f"OnOtherDevice({who}, device=memory.device, others=device)",
            2,
        )
        kinds = tuple(dtype.name.lower() for dtype in arg.dtypes)
        yield from self._when(
            " and ".join(f"{name}.dtype is not _{dtype.name}" for dtype in arg.dtypes),
            f"WrongType({who}, dtype={name}.dtype.name.lower(), read_as={kinds!r})",
            2,
        )

    def _of_shape(self, arg: Arg) -> Iterator[str]:
        name, who, alignment = arg.name, _who(arg.name), arg.alignment_bytes
        yield f"        has_axes = len({name}.shape) == {len(arg.axes)}"
        yield from self._when(
            "not has_axes", f"WrongAxes({who}, shape={name}.shape, axes={arg.shape!r})", 2
        )
        yield from self._when(
            f"{name}.address % {alignment}",
            f"Misaligned({who}, address={name}.address, alignment_bytes={alignment})",
            2,
        )
        yield from self._when(
            f"{name}.end_bytes > memory.num_bytes",
            f"TooShort({who}, end_bytes={name}.end_bytes, num_bytes=memory.num_bytes)",
            2,
        )
        yield "        if has_axes:"
        for axis, demand in enumerate(arg.axes):
            yield from self._of_axis(arg, axis, demand)
        if arg.layout != "any":
            condition, limit = _LAYOUTS[arg.layout]
            yield from self._unless(
                condition.format(name=name),
                f"WrongStrides({who}, strides={name}.strides, limit={limit!r}, "
                f"layout={arg.layout!r})",
                3,
            )

    def _of_axis(self, arg: Arg, axis: int, demand: str) -> Iterator[str]:
        size = f"{arg.name}.shape[{axis}]"
        if SYMBOL.fullmatch(demand) and demand not in self.bound:
            self.bound.add(demand)
            yield f"            {demand} = {size}"
            return
        at_least = demand.startswith(">=")
        wanted = demand.removeprefix(">=").strip()
        yield from self._when(
            f"{size} {'<' if at_least else '!='} {wanted}",
            f"WrongSize({_who(arg.name)}, axis={axis}, size={size}, wanted={wanted}, "
            f"expression={wanted!r}, at_least={at_least})",
            3,
        )

    def _of_pair(self, pair: Apart) -> Iterator[str]:
        a, b = pair.written, pair.read
        yield from self._when(
            f"{a}.allocation is {b}.allocation and {a}.address < {b}.address + {b}.extent_bytes "
            f"and {b}.address < {a}.address + {a}.extent_bytes",
            f"Overlap({_who(a)}, other={b!r}, other_tensor={b}.name)",
        )


def _who(name: str) -> str:
    return f"argument={name!r}, tensor={name}.name"
