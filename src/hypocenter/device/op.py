"""An op: a contract, a kernel for the CPU and a launch for GPUs, whose arguments are bound by name.

A plan binds them once, when it is made; its steps look nothing up. Knows no op by itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.package import NAME
from hypocenter.base.refusals import Refused
from hypocenter.base.tensor import Tensor
from hypocenter.device.cpu.kernel_forms import NamedKernel, kernel_at_hand, named_kernel
from hypocenter.device.launch import Demands

if TYPE_CHECKING:
    from hypocenter.device.cpu.lang import CpuKernel

#: Constants of a Triton kernel that the launch door sets.
_OF_THE_DOOR = frozenset(("WIDE", "OVERLAPS", "ON_NVIDIA"))
#: What a launch may tell Triton's compiler, beside a kernel's constants.
_COMPILER_OPTIONS = frozenset(
    ("enable_fp_fusion", "matrix_instr_nonkdim", "maxnreg", "num_stages", "waves_per_eu")
)


class NamedDemands(Demands, Hashable, Protocol):
    """What binding needs of a contract (`contracts/contract.py`)."""

    kernel: str
    names: tuple[str, ...]

    def absent(self, name: str) -> Any: ...


class TakesLaunches(Protocol):
    """A plan that is made: `device/plan.py:PlanBuilder`."""

    device: str

    def add_cpu(
        self,
        kernel: NamedKernel,
        *args: Any,
        contract: Demands,
        facts: Mapping[str, Any],
        work_per_row: int,
        reads: Sequence[tuple[Any, int]] = (),
    ) -> None: ...

    def add_gpu(
        self,
        jit: Any,
        *args: Any,
        grid: tuple[int, ...],
        contract: Demands,
        facts: Mapping[str, Any],
        num_warps: int = 4,
        **constants: Any,
    ) -> None: ...

    def add_call(
        self,
        name: str,
        function: Callable[..., None],
        *args: Any,
        contract: Demands,
        facts: Mapping[str, Any],
    ) -> None: ...


def _no_work() -> int:
    return 0


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """A contract and what meets it on each device; `PlanBuilder.add` binds arguments by name.

    Each parameter of the CPU kernel takes the argument of its name. One that is annotated `float`
    takes it as f32, and an optional tensor that is not there comes as an empty array.

    `cpu` names a kernel below `kernels/`, as in "rowwise.norm_cpu.rms_norm", whose module is
    imported when numba has to load it; tests give kernels themselves. `gpu` names a function below
    `kernels/`, as in "rowwise.norm_gpu.launch", which is imported when it is first needed. That is
    called with a `BoundPlan` and with the arguments that its parameters
    name. `work_per_row`, about the multiply-adds for a row, and `reads`, as in
    `PlanBuilder.add_cpu`, are functions whose parameters name arguments, too.

    `gpu_contract` is that of GPUs where it differs. Arguments in `cpu_alone` and `gpu_alone` are
    those that only one of the two takes.
    """

    contract: NamedDemands
    cpu: str | CpuKernel = ""
    gpu: str = ""
    work_per_row: Callable[..., int] = _no_work
    reads: Callable[..., Sequence[tuple[Any, int]]] | None = None
    gpu_contract: NamedDemands | None = None
    cpu_alone: tuple[str, ...] = ()
    gpu_alone: tuple[str, ...] = ()

    def bind(self, plan: TakesLaunches, arguments: Mapping[str, Any]) -> None:
        """Append the launches of this op; raises LaunchRejected for a name that does not fit."""
        if plan.device == "cpu" and self.cpu:
            self._bind_cpu(plan, _kernel(self.cpu), arguments)
        elif plan.device != "cpu" and self.gpu:
            self._bind_gpu(plan, arguments)
        else:
            _refuse(self.contract.kernel, f"there is no kernel of it for {plan.device}")

    def _bind_cpu(
        self, plan: TakesLaunches, kernel: NamedKernel, arguments: Mapping[str, Any]
    ) -> None:
        contract, floats = self.contract, kernel.floats
        facts = {name: arguments[name] for name in _facts_on_cpu(self, kernel, tuple(arguments))}
        args = []
        for name in kernel.parameters:
            value = arguments[name]
            if value is None and (value := contract.absent(name)) is None:
                _refuse(contract.kernel, f"{name!r} is None, which its contract does not allow")
            if name not in facts and isinstance(value, Tensor):
                _require_declared(contract.kernel, name, value, facts)
            args.append(np.float32(value) if name in floats else value)
        reads = {"reads": _call(contract.kernel, self.reads, arguments)} if self.reads else {}
        work_per_row = _call(contract.kernel, self.work_per_row, arguments)
        plan.add_cpu(
            kernel, *args, contract=contract, facts=facts, work_per_row=work_per_row, **reads
        )

    def _bind_gpu(self, plan: TakesLaunches, arguments: Mapping[str, Any]) -> None:
        contract = self.gpu_contract or self.contract
        launch = _function(self.gpu)
        names = tuple(arguments)
        facts = {name: arguments[name] for name in _facts_among(contract, names)}
        bound = BoundPlan(plan, contract, facts, arguments)
        _call(contract.kernel, launch, arguments, bound)
        taken = (*facts, *_names(launch), *self.cpu_alone)
        _require_taken(contract.kernel, arguments.keys(), bound.taken.union(taken))


class BoundPlan:
    """A plan on a GPU with the arguments of one op, to which the op's launches are added."""

    def __init__(
        self,
        plan: TakesLaunches,
        contract: NamedDemands,
        facts: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> None:
        self.device = plan.device
        #: Names of arguments that a kernel has taken so far.
        self.taken: set[str] = set()
        self._plan, self._contract, self._facts = plan, contract, facts
        self._arguments = arguments

    @property
    def is_wide(self) -> bool:
        """Whether the kernels' 64-bit variants are needed."""
        return self._contract.needs_int64(**self._facts)

    def add_gpu(self, jit: Any, *, grid: tuple[int, ...], num_warps: int = 4, **given: Any) -> None:
        """Append a launch of a Triton kernel.

        A parameter takes what is `given` for its name. Of the others `x_ptr` is the argument x,
        `x_stride` the elements from a row of x to the next, `HAS_X` whether there is an x, and any
        other parameter, also in capitals, the argument of its name. What else is given are options
        of the compiler. Raises LaunchRejected for a name that does not fit.
        """
        kernel, facts, arguments = self._contract.kernel, self._facts, self._arguments
        binding = _binding(kernel, tuple(jit.arg_names), tuple(given), tuple(arguments))
        self.taken |= binding.taken
        args = []
        for name, argument, take in binding.args:
            value = given[name] if take is None else take(arguments[argument])
            if value is None and argument not in self._contract.names:
                _refuse(kernel, f"parameter {name!r} is None; its launch must give another value")
            if argument not in facts and isinstance(value, Tensor):
                _require_declared(kernel, name, value, facts)
            args.append(value)
        options = {
            name: given[name] if take is None else take(arguments[argument])
            for name, argument, take in binding.options
        }
        self._plan.add_gpu(
            jit,
            *args,
            grid=grid,
            contract=self._contract,
            facts=facts,
            num_warps=num_warps,
            **options,
        )

    def add_call(self, function: Callable[..., None], *names: str) -> None:
        """Append a call of a library that launches by itself, with the arguments of these names."""
        contract, args = self._contract, [self._arguments[name] for name in names]
        self.taken |= {*names}
        self._plan.add_call(contract.kernel, function, *args, contract=contract, facts=self._facts)


_Source = tuple[str, str, Callable[[Any], Any] | None]


@dataclass(frozen=True, slots=True)
class _Binding:
    """Of each parameter its name, the argument that it takes, and what is taken of that; "" and
    None where a launch gives something. Options are constants and what the compiler is told."""

    args: tuple[_Source, ...]
    options: tuple[_Source, ...]
    taken: frozenset[str]


# Plans of a model have the same ops at each layer and size: names are looked at once.
@functools.lru_cache(maxsize=1024)
def _binding(
    kernel: str, parameters: tuple[str, ...], given: tuple[str, ...], arguments: tuple[str, ...]
) -> _Binding:
    found = [
        (name, "", None) if name in given else _source(kernel, name, arguments)
        for name in parameters
        if name not in _OF_THE_DOOR
    ]
    for name in given:
        if name not in parameters and name not in _COMPILER_OPTIONS:
            _refuse(kernel, f"nothing takes {name!r}; its kernel takes {', '.join(parameters)}")
    told: list[_Source] = [(name, "", None) for name in given if name in _COMPILER_OPTIONS]
    return _Binding(
        args=tuple(source for source in found if not source[0].isupper()),
        options=(*(source for source in found if source[0].isupper()), *told),
        taken=frozenset(argument for _, argument, _ in found if argument),
    )


def _source(kernel: str, parameter: str, arguments: tuple[str, ...]) -> _Source:
    name = parameter.lower()
    take: Callable[[Any], Any] = _itself
    if parameter.endswith("_ptr"):
        name = parameter.removesuffix("_ptr")
    elif parameter.endswith("_stride") and parameter.removesuffix("_stride") in arguments:
        name, take = parameter.removesuffix("_stride"), _row_stride
    elif parameter.startswith("HAS_"):
        name, take = name.removeprefix("has_"), _is_there
    if name not in arguments:
        _refuse(kernel, f"nothing was given for {parameter!r}, only {', '.join(arguments)}")
    return parameter, name, take


def _itself(value: Any) -> Any:
    return value


def _row_stride(tensor: Any) -> Any:
    return tensor.strides[0]


def _is_there(value: Any) -> Any:
    return value is not None


@functools.lru_cache(maxsize=1024)
def _facts_among(contract: NamedDemands, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments that a contract names, in the order in which they were given."""
    for name in contract.names:
        if name not in arguments:
            what = f"its contract names {name!r}, but it was given {', '.join(arguments)}"
            _refuse(contract.kernel, what)
    return tuple(name for name in arguments if name in contract.names)


@functools.lru_cache(maxsize=1024)
def _facts_on_cpu(op: Op, kernel: NamedKernel, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """As `_facts_among`, of names that a kernel for the CPU takes, all of them."""
    facts = _facts_among(op.contract, arguments)
    taken = {*kernel.parameters, *facts, *op.gpu_alone}
    _require_taken(
        op.contract.kernel, arguments, taken.union(_names(op.work_per_row), _names(op.reads))
    )
    for name in kernel.parameters:
        if name not in arguments:
            given = ", ".join(arguments)
            _refuse(op.contract.kernel, f"nothing was given for {name!r}, only {given}")
    return facts


def _require_taken(kernel: str, arguments: Iterable[str], taken: set[str] | frozenset[str]) -> None:
    if not taken.issuperset(arguments):
        name = next(name for name in arguments if name not in taken)
        names = ", ".join(sorted(taken))
        _refuse(kernel, f"nothing takes the argument {name!r}, only {names}")


def _require_declared(kernel: str, name: str, tensor: Tensor, facts: Mapping[str, Any]) -> None:
    """A tensor that no contract has seen would be as unchecked as if there were no contract."""
    for fact in facts.values():
        if fact is tensor:
            return
    named = ", ".join(facts)
    _refuse(kernel, f"{name!r} is a tensor that its contract does not name: {named}")


def _call(
    kernel: str, function: Callable[..., Any], arguments: Mapping[str, Any], *first: Any
) -> Any:
    named = {}
    for name in _names(function)[len(first) :]:
        if name not in arguments:
            _refuse(kernel, f"nothing was given for {name!r}, only {', '.join(arguments)}")
        named[name] = arguments[name]
    return function(*first, **named)


def _function(place: str) -> Callable[..., Any]:
    """A function below `kernels/`, looked up each time: who tries another one exchanges it in its
    module."""
    module, name = _module_of(place)
    return getattr(sys.modules.get(module) or importlib.import_module(module), name)  # type: ignore[no-any-return]


def _kernel(kernel: str | CpuKernel) -> NamedKernel:
    return named_kernel(f"kernels.{kernel}") if isinstance(kernel, str) else kernel_at_hand(kernel)


@functools.cache
def _module_of(place: str) -> tuple[str, str]:
    module, _, name = place.rpartition(".")
    return f"{NAME}.kernels.{module}", name


@functools.cache
def _names(function: Callable[..., Any] | None) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters) if function else ()


def _refuse(kernel: str, what: str) -> NoReturn:
    raise LaunchRejected(kernel, Refused(what=what))
