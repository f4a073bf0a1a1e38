"""Rechecks the contracts of recorded launches, each once per state of its memory and its values.

What is found is proven by the contract's own check, before and after one fact is put right.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypocenter.diagnosis import Cause, Proof
from hypocenter.errors import LaunchRejected
from hypocenter.forensics.case import Array, Case, Use
from hypocenter.forensics.causes_contract_walk import (
    Breach,
    fact_breaches,
    index_breaches,
    index_cause,
)
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.contracts import recorded_contract
from hypocenter.recording import LaunchRecord, TensorRecord
from hypocenter.tensor import Allocation, DType, Tensor

#: All arguments on one wrong device agree with each other, and an address of 0 is no shape.
_UNSEEN_BY_CHECK = (Cause.HOST_POINTER, Cause.WRONG_DEVICE, Cause.NULL_POINTER)

Found = list[tuple[Breach, Proof | None]]


@dataclass
class Seen:
    """How much was looked at, for refutations, and what could not be."""

    launches: int = 0
    entries: Counter[Cause] = field(default_factory=Counter)
    without_contract: dict[str, None] = field(default_factory=dict)
    changed: dict[str, None] = field(default_factory=dict)
    no_values: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Prepared:
    """A launch in one state of its memory. `symbols` is None where its arguments are refused."""

    contract: Contract
    facts: dict[str, Any]
    found: Found
    symbols: dict[str, Any] | None
    shapes: tuple[Any, ...]
    indices: tuple[tuple[str, int], ...]


class Recheck:
    """Holds what was worked out for one case, so that a launch of each step costs look-ups only."""

    def __init__(self, case: Case) -> None:
        self.case, self.seen = case, Seen()
        self._prepared: dict[tuple[int, int], _Prepared | None] = {}
        self._by_values: dict[Any, Found] = {}
        self._frees = sorted(event.seq for event in case.freed.values())

    def facts(self, use: Use) -> dict[str, Any] | None:
        prepared = self._of(use)
        return prepared.facts if prepared else None

    def breaches(self, use: Use) -> Found:
        """Those of the facts; where there are none, those of the index values of the step."""
        prepared = self._of(use)
        if prepared is None:
            return []
        self.seen.launches += 1
        if prepared.found or prepared.symbols is None:
            return prepared.found
        recorded = {
            name: values
            for name, number in prepared.indices
            if (values := self.case.values(number, use.seq)) is not None
        }
        key = (id(prepared.contract), prepared.shapes,
               tuple((name, id(one)) for name, one in recorded.items()))  # fmt: skip
        if key not in self._by_values:
            self._by_values[key] = self._of_values(use, prepared, recorded)
        return self._by_values[key]

    def _of_values(self, use: Use, prepared: _Prepared, recorded: Mapping[str, Any]) -> Found:
        contract, symbols = prepared.contract, prepared.symbols
        assert symbols is not None
        for name, _ in prepared.indices:
            if name not in recorded:
                tensor = prepared.facts[name].name
                self.seen.no_values[f"{name} of {use.launch.kernel} ({tensor})"] = None
        arrays = {
            name: self.case.full_array(values, prepared.facts[name].shape)
            for name, values in recorded.items()
        }
        for arg in contract.args:
            if arg.index is not None and arg.name in arrays:
                self.seen.entries[index_cause(arg.name, arg.index, 0)] += arrays[arg.name].size
        return [
            (breach, proof)
            for breach in index_breaches(contract, symbols, arrays)
            if (proof := _proven_value(contract, symbols, arrays, breach))
        ]

    def _of(self, use: Use) -> _Prepared | None:
        key = (id(use.launch), bisect.bisect_left(self._frees, use.seq))
        if key not in self._prepared:
            self._prepared[key] = self._prepare(use)
        return self._prepared[key]

    def _prepare(self, use: Use) -> _Prepared | None:
        launch = use.launch
        contract = self._contract(launch)
        facts = rebuilt_facts(self.case, launch, use.seq) if contract is not None else None
        if contract is None or facts is None:
            return None
        found = _proven_facts(contract, facts, fact_breaches(contract, facts, launch.device))
        symbols = None
        if not found:
            try:
                symbols = contract.check(**facts)
            except LaunchRejected as refused:
                self.case.unseen[f"index values of {contract.kernel}: its arguments were refused "
                                 f"first ({refused.reason})"] = None  # fmt: skip
        numbers = {one.name: one.tensor for one in launch.facts}
        indices = tuple(
            (arg.name, number)
            for arg in contract.args
            if arg.index is not None and (number := numbers.get(arg.name)) is not None
        )
        shapes = tuple(
            fact.shape if isinstance(fact, Tensor) else fact for fact in facts.values()
        )  # fmt: skip
        return _Prepared(contract, facts, found, symbols, shapes, indices)

    def _contract(self, launch: LaunchRecord) -> Contract | None:
        text = self.case.bundle.declaration(launch)
        contract = recorded_contract(self.case.bundle, launch)
        if contract is None:
            self.seen.without_contract[launch.kernel] = None
        elif text is not None and contract.describe() != text:
            self.seen.changed[launch.kernel] = None
        return contract


def rebuilt_facts(case: Case, launch: LaunchRecord, seq: int) -> dict[str, Any] | None:
    """A launch's facts as the contract takes them, as they were at event `seq`; no data."""
    memories: dict[int, Allocation] = {}
    facts: dict[str, Any] = {}
    for one in launch.facts:
        if one.tensor is None:
            facts[one.name] = one.value
            continue
        record = case.tensors.get(one.tensor)
        tensor = _rebuilt(case, record, seq, memories) if record else None
        if tensor is None:
            case.unseen[f"tensor {one.tensor}, argument {one.name} of {launch.kernel}: its record "
                        "or that of its memory is not in the bundle"] = None  # fmt: skip
            return None
        facts[one.name] = tensor
    return facts


def _rebuilt(
    case: Case, record: TensorRecord, seq: int, memories: dict[int, Allocation]
) -> Tensor | None:
    made = case.allocations.get(record.allocation)
    if made is None:
        return None
    if made.id not in memories:
        freed = case.freed.get(made.id)
        site = freed.site or "an unknown place" if freed and freed.seq < seq else ""
        device = "cpu" if made.kind != "device" else made.device
        memories[made.id] = Allocation(
            made.id, device, made.num_bytes, made.site, made.address, site
        )
    try:
        dtype = DType[record.dtype.upper()]
    except KeyError:
        return None
    return Tensor(
        record.name, record.owner, dtype, record.shape, record.strides, record.offset,
        memories[made.id], None,
    )  # fmt: skip


def _proven_facts(
    contract: Contract, facts: dict[str, Any], wrong: list[Breach]
) -> list[tuple[Breach, Proof | None]]:
    """Each breach with the check's own words before and after; None for what nothing mends."""
    proven_ones: list[tuple[Breach, Proof | None]] = []
    whole = dict(facts)
    for breach in wrong:
        whole |= breach.mended
    for breach in wrong:
        if not breach.mended:
            proven_ones.append((breach, None))
            continue
        name = next(iter(breach.mended))
        one_wrong = {**whole, name: facts[name]}
        red, green = _refusal(contract, one_wrong), _refusal(contract, whole)
        if green is None and red is None and breach.cause in _UNSEEN_BY_CHECK:
            red = breach.found
        if red is not None and green is None:
            check = f"the contract of {contract.kernel}"
            proof = Proof(
                f"{check} refuses what was recorded: {red}",
                breach.correction,
                f"{check} accepts the same launch with {breach.correction}",
            )
            proven_ones.append((breach, proof))
        else:
            proven_ones.append((breach, None))
    return proven_ones


def _refusal(contract: Contract, facts: Mapping[str, Any]) -> str | None:
    try:
        contract.check(**facts)
    except LaunchRejected as refused:
        return refused.reason
    return None


def _proven_value(
    contract: Contract, symbols: Mapping[str, Any], values: Mapping[str, Array], breach: Breach
) -> Proof | None:
    mended = {**values, **breach.mended}
    after = [one for one in index_breaches(contract, symbols, mended)
             if one.argument == breach.argument]  # fmt: skip
    if after:
        return None
    check = f"the recorded values against the contract of {contract.kernel}"
    return Proof(
        f"{check}: {breach.found}",
        breach.correction,
        f"{check}: every entry of {breach.argument} is inside with {breach.correction}",
    )
