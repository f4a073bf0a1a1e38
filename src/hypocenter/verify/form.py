"""The forms in which a model's ops are launched, each with an op call that asks for it.

Runs nothing: `kernel_stage.py` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

from hypocenter.base.tensor import Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, evaluate
from hypocenter.device.cpu.slots import key_of
from hypocenter.device.forms import form_of
from hypocenter.device.launch import Launch
from hypocenter.device.plan import OpCall, Plan

#: Of attention by tiles the second op folds what the first one leaves; neither has a result that
#: anybody else reads.
_FIRST_HALVES = frozenset({"attention_split", "attention"})
_SECOND_HALF = "attention_fold"
#: Of one row alone a wrong one may be read unseen: the index has but one end.
_ENOUGH_ROWS = 4


@dataclass(frozen=True, slots=True)
class Unit:
    """Op calls whose result is compared: one, or two of which the second finishes the first."""

    calls: tuple[OpCall, ...]
    device: str

    @property
    def contracts(self) -> tuple[Contract, ...]:
        """The contracts of the ops on this device."""
        return tuple(contract_of(call, self.device) for call in self.calls)

    @property
    def op(self) -> str:
        """The first op's name."""
        return self.contracts[0].kernel

    @property
    def kernels(self) -> str:
        """The kernels that are launched, in order."""
        return " + ".join(launch.kernel for launch in self.launches)

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(launch for call in self.calls for launch in call.launches)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of all calls together; where both have a name, they mean the same."""
        merged: dict[str, Any] = {}
        for call in self.calls:
            merged |= call.arguments
        return merged

    @property
    def given(self) -> tuple[Arg, ...]:
        """The tensors that are read before a call of the unit has written them."""
        found: dict[str, Arg] = {}
        written: set[str] = set()
        for contract in self.contracts:
            for arg in contract.args:
                if arg.access != "write" and arg.name not in written:
                    found.setdefault(arg.name, arg)
            written |= {arg.name for arg in contract.args if arg.access != "read"}
        return tuple(found.values())

    @property
    def written(self) -> tuple[Arg, ...]:
        """The tensors that a call of the unit writes."""
        args = (arg for contract in self.contracts for arg in contract.args)
        return tuple({arg.name: arg for arg in args if arg.access != "read"}.values())

    @property
    def symbols(self) -> dict[str, Any]:
        """Sizes of axes and numbers, by the names in the contracts."""
        found: dict[str, Any] = {}
        for call, contract in zip(self.calls, self.contracts, strict=True):
            details = {name: call.arguments[name] for name in contract.names}
            found |= contract.check(**details)
        return found

    @property
    def has_counts(self) -> bool:
        """Whether something says how many of its rows are live."""
        return any(arg.name == "counts" for arg in self.given)

    @property
    def has_sequences(self) -> bool:
        """Whether it carries states of sequences from step to step."""
        return any(arg.name == "sequence_starts" for arg in self.given)

    @property
    def has_groups(self) -> bool:
        """Whether it reads which expert each of its rows is for."""
        return any(arg.name == "firsts" for arg in self.given)

    @property
    def is_drawn(self) -> bool:
        """Whether its inputs can be drawn: something says which of its rows are live."""
        return self.has_counts or self.has_groups

    @property
    def num_rows(self) -> int:
        """Rows of the bucket: as many as may be live; of products of experts, which have no counts,
        the rows that they write."""
        if not self.has_counts:
            written = (self.arguments[arg.name] for arg in self.written)
            most: int = max(tensor.shape[0] for tensor in written if tensor is not None)
            return most
        counts = next(arg for arg in self.given if arg.name == "counts")
        assert counts.index is not None
        bound = evaluate(counts.index.bound, self.symbols)
        assert bound is not None
        return bound - 1


def contract_of(call: OpCall, device: str) -> Contract:
    """The contract that a call meets on a device."""
    op = call.op
    found = op.contract if device == "cpu" else op.gpu_contract or op.contract
    return cast("Contract", found)


def units_of(plan: Plan) -> Iterator[Unit]:
    """The calls of a plan, each with the one that finishes it, and those that the host makes."""
    for asked, device in ((plan.calls, plan.device), (plan.host_calls, "cpu")):
        calls = list(asked)
        while calls:
            first = calls.pop(0)
            taken: tuple[OpCall, ...] = (first,)
            if calls and contract_of(first, device).kernel in _FIRST_HALVES:
                second = contract_of(calls[0], device).kernel
                if second.startswith(_SECOND_HALF):
                    taken = (first, calls.pop(0))
            if any(call.launches for call in taken):
                yield Unit(taken, device)


def distinct_units(plans: Iterable[Plan]) -> list[Unit]:
    """A unit for each form of a launch that the plans have, the one with the fewest rows that are
    enough to tell one from another. One of each op comes before the second one of any."""
    by_forms: dict[frozenset[Hashable], Unit] = {}
    seen: set[Hashable] = set()
    for plan in plans:
        for unit in units_of(plan):
            launched = ((launch, call) for call in unit.calls for launch in call.launches)
            forms = frozenset(form(*pair) for pair in launched)
            known = by_forms.get(forms)
            if not forms <= seen or (known and known.num_rows < min(unit.num_rows, _ENOUGH_ROWS)):
                seen |= forms
                by_forms[forms] = unit
    found = list(by_forms.values())
    num_before = Counter[str]()
    turns = []
    for unit in found:
        turns.append(num_before[unit.kernels])
        num_before[unit.kernels] += 1
    return [unit for _, unit in sorted(zip(turns, found, strict=True), key=itemgetter(0))]


def form(launch: Launch, call: OpCall) -> Hashable:
    """What is the same of launches that run the same machine code in the same way.

    On a GPU it is what Triton compiles for, or a library's call. On the CPU it is the kernel, the
    kinds of arguments, whether threads share the work, and the numbers that decide its way.
    """
    if launch.jit is not None:
        return form_of(launch.jit, launch.args, launch.options)
    if launch.device != "cpu":
        return launch.kernel
    numbers = tuple(
        (name, value)
        for name, value in call.arguments.items()
        if isinstance(value, int | float | str | bool)
    )
    there = tuple(name for name, value in call.arguments.items() if isinstance(value, Tensor))
    shared = getattr(launch.function, "is_shared", False)
    return launch.kernel, repr(key_of(launch.args)), shared, numbers, there
