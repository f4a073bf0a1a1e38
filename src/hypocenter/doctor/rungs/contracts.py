"""Rung: the kernels' contracts, rechecked with the facts and the index values that were recorded.

A breach is a root cause only where the contract's own check refuses what was recorded and passes
with the one fact corrected. Needs no Triton, no torch and no device.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import LaunchRejected
from hypocenter.base.refusals import AnyRefusal
from hypocenter.base.tensor import Allocation, DType, Tensor
from hypocenter.base.wording import count_text
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.registry import recorded_contract
from hypocenter.doctor.case import Case, array_of
from hypocenter.doctor.causes import Cause, TestedBy, index_cause, refutable
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.rungs.contract_breaches import (
    Breach,
    fact_breaches,
    index_breaches,
)
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import LaunchRecord, TensorRecord
from hypocenter.record.gap import Gap

NAME = "arguments"
_MAX_ROOTS = 8


#: All arguments on one wrong device agree with each other, and an address of 0 is no shape.
_UNSEEN_BY_CHECK = (Cause.HOST_POINTER, Cause.WRONG_DEVICE, Cause.NULL_POINTER)
Breaches = list[tuple[Breach, Proof | None]]


def contracts(case: Case) -> list[Claim]:
    """Breaches of every launch in the ring, earliest first; else what is refuted by there being
    none."""
    recheck, claims = Recheck(case), list[Claim]()
    done: set[tuple[Cause, int | str]] = set()
    for use in (*case.launches, *case.index.refused):
        for breach, proof in recheck.breaches(use):
            tensor = case.tensor_of(use.launch, breach.argument)
            key = (breach.cause, tensor.allocation if tensor else breach.argument)
            if key in done or len(done) >= _MAX_ROOTS:
                continue
            done.add(key)
            facts = recheck.facts(use)
            claims.append(
                _claim(case, use, breach, proof, facts)
                if proof and facts is not None
                else _unproven(use, breach)
            )
    _tell_unseen(case, recheck.seen)
    return [*claims, *_refute(recheck.seen, claims)]


# -- claims ---------------------------------------------------------------------------------------


def _claim(
    case: Case, use: LaunchMade, breach: Breach, proof: Proof, facts: Mapping[str, Any]
) -> Claim:
    launch = use.launch
    tensor = facts.get(breach.argument)
    name = tensor.name if isinstance(tensor, Tensor) else None
    access = case.access(launch, breach.argument)
    record = case.tensor_of(launch, breach.argument)
    effect = ""
    evidence = [f"{launch.kernel}: {breach.found}"]
    if breach.cause is Cause.DTYPE_WIDTH and record is not None and isinstance(tensor, Tensor):
        told = list(_as_read(case, use, breach, record, tensor, facts))
        evidence += told
        effect = f"; {told[0]}" if told else ""
    root = RootCause(
        cause=breach.cause,
        sentence=f"{launch.kernel}: {breach.found}{effect}",
        fix=breach.fix[:1].upper() + breach.fix[1:],
        proof=proof,
        kernel=launch.kernel,
        argument=breach.argument,
        tensor=name,
        place=use.place,
    ).at(access)
    return proven(
        root,
        NAME,
        tuple(evidence),
        f"the argument check of {launch.kernel} accepting the recorded {breach.argument}",
        use.seq,
        (record.id,) if record else (),
    )


def _unproven(use: LaunchMade, breach: Breach) -> Claim:
    return row(
        breach.cause,
        Verdict.INCONCLUSIVE,
        NAME,
        f"{use.where}: {use.launch.kernel}: {breach.found}",
        "no single change was found with which the argument check accepts the launch",
        would_refute="a kernel that takes such an argument",
        kernel=use.launch.kernel,
        argument=breach.argument,
    )


def _as_read(
    case: Case,
    use: LaunchMade,
    breach: Breach,
    record: TensorRecord,
    tensor: Tensor,
    facts: Mapping[str, Any],
) -> Iterator[str]:
    """What the kernel makes of the bytes that the host wrote, and where that leads."""
    recorded = case.index.values_of(record.id, use.seq)
    contract = recorded_contract(case.bundle, use.launch)
    args = contract.args if contract is not None else ()
    arg = next((arg for arg in args if arg.name == breach.argument), None)
    if recorded is None or arg is None or contract is None:
        return
    reads = np.dtype(f"<i{arg.dtypes[0].block_bytes}")
    whole = recorded.data[: len(recorded.data) // reads.itemsize * reads.itemsize]
    as_read = np.frombuffer(whole, reads)
    if arg.index is None or tensor.dtype is arg.dtypes[0] or not as_read.size:
        return
    given = array_of(recorded).reshape(-1)
    yield (
        f"the host wrote {breach.argument} = {_show(given)} as {recorded.dtype}; the kernel, "
        f"reading {reads.itemsize} bytes each, gets {_show(as_read)}"
    )
    symbols = {scalar.name: facts[scalar.name] for scalar in contract.scalars}
    for other in contract.args:
        value = facts[other.name]
        if isinstance(value, Tensor):
            symbols |= {
                axis: size
                for axis, size in zip(other.axes, value.shape, strict=False)
                if axis.isidentifier()
            }
    bound = symbols.get(arg.index.bound)
    wrong = as_read[(as_read < 0) | (as_read >= bound)] if bound is not None else as_read[:0]
    if not wrong.size:
        return
    yield f"{int(wrong[0])} lies outside {arg.index.of}, which has {bound} entries"
    fault = case.bundle.fault
    for other in contract.args:
        target = facts[other.name]
        if (
            fault.address is None
            or not isinstance(target, Tensor)
            or other.axes[0] != arg.index.bound
        ):
            continue
        pitch = target.strides[0] * target.dtype.block_bytes
        for value in wrong:
            start = target.address + int(value) * pitch
            if start < fault.address + fault.address_bytes and fault.address < start + pitch:
                yield (
                    f"{other.name}[{int(value)}] would lie at {start:#x}, and the fault was "
                    f"reported at {fault.address:#x}: it is that access"
                )
                return


def _show(array: Array, count: int = 8) -> str:
    shown = ", ".join(str(int(value)) for value in array[:count])
    return f"[{shown}{', ...' if array.size > count else ''}]"


def _refute(seen: Tally, claims: list[Claim]) -> Iterator[Claim]:
    if not seen.launches:
        return
    rechecked = f"arguments of {count_text(seen.launches, 'launch', 'launches')} rechecked"
    confirmed = {claim.hypothesis.cause for claim in claims}
    for cause, text in refutable(TestedBy.ARGUMENTS).items():
        if cause not in confirmed:
            yield row(
                cause,
                Verdict.REFUTED,
                NAME,
                f"{text} ({rechecked})",
                would_refute="a launch whose recorded arguments are refused",
            )
    for cause, text in refutable(TestedBy.ENTRIES).items():
        if seen.entries[cause] and cause not in confirmed:
            yield row(
                cause,
                Verdict.REFUTED,
                NAME,
                f"{text} ({seen.entries[cause]} recorded entries rechecked)",
                would_refute="a recorded entry outside of what it indexes",
            )
    if seen.entries and Cause.SENTINEL_CONSUMED not in confirmed:
        yield row(
            Cause.SENTINEL_CONSUMED,
            Verdict.REFUTED,
            NAME,
            f"no live entry is -1 ({seen.entries.total()} recorded entries rechecked)",
            would_refute="a live entry that is -1",
        )


def _tell_unseen(case: Case, seen: Tally) -> None:
    if seen.without_contract:
        case.leave_unseen(
            Gap.not_examined(
                f"arguments of {', '.join(seen.without_contract)}",
                "what they must be is not known",
            )
        )
    if seen.changed:
        case.leave_unseen(
            Gap.not_examined(
                f"the recorded argument checks of {', '.join(seen.changed)}",
                "the installed ones differ, and were used",
            )
        )
    if seen.no_values:
        case.leave_unseen(
            Gap.not_recorded(
                "index values that the device made or that were not recorded",
                ", ".join(seen.no_values),
            )
        )


@dataclass
class Tally:
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
    found: Breaches
    symbols: dict[str, Any] | None
    shapes: tuple[Any, ...]
    indices: tuple[tuple[str, int], ...]


class Recheck:
    """Holds what was worked out for one case, so that a launch of each step costs look-ups only."""

    def __init__(self, case: Case) -> None:
        self.case, self.seen = case, Tally()
        self._prepared: dict[tuple[int, int], _Prepared | None] = {}
        self._by_values: dict[Any, Breaches] = {}
        self._frees = sorted(event.seq for event in case.freed.values())

    def facts(self, use: LaunchMade) -> dict[str, Any] | None:
        prepared = self._of(use)
        return prepared.facts if prepared else None

    def breaches(self, use: LaunchMade) -> Breaches:
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
            if (values := self.case.index.values_of(number, use.seq)) is not None
        }
        key = (
            id(prepared.contract),
            prepared.shapes,
            tuple((name, id(array)) for name, array in recorded.items()),
        )
        if key not in self._by_values:
            self._by_values[key] = self._of_values(use, prepared, recorded)
        return self._by_values[key]

    def _of_values(
        self, use: LaunchMade, prepared: _Prepared, recorded: Mapping[str, Any]
    ) -> Breaches:
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
                self.seen.entries[index_cause(0, arg.name)] += arrays[arg.name].size
        return [
            (breach, proof)
            for breach in index_breaches(contract, symbols, arrays)
            if (proof := _proven_value(contract, symbols, arrays, breach))
        ]

    def _of(self, use: LaunchMade) -> _Prepared | None:
        key = (id(use.launch), bisect.bisect_left(self._frees, use.seq))
        if key not in self._prepared:
            self._prepared[key] = self._prepare(use)
        return self._prepared[key]

    def _prepare(self, use: LaunchMade) -> _Prepared | None:
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
                self.case.leave_unseen(
                    Gap.not_examined(
                        f"index values of {contract.kernel}",
                        f"its arguments were refused first ({refused.refusal})",
                    )
                )
        numbers = {fact.name: fact.tensor for fact in launch.facts}
        indices = tuple(
            (arg.name, number)
            for arg in contract.args
            if arg.index is not None and (number := numbers.get(arg.name)) is not None
        )
        shapes = tuple(fact.shape if isinstance(fact, Tensor) else fact for fact in facts.values())
        return _Prepared(contract, facts, found, symbols, shapes, indices)

    def _contract(self, launch: LaunchRecord) -> Contract | None:
        declaration = self.case.bundle.declaration(launch)
        contract = recorded_contract(self.case.bundle, launch)
        if contract is None:
            self.seen.without_contract[launch.kernel] = None
        elif declaration is not None and contract.declaration != declaration:
            self.seen.changed[launch.kernel] = None
        return contract


def rebuilt_facts(case: Case, launch: LaunchRecord, seq: int) -> dict[str, Any] | None:
    """A launch's facts as the contract takes them, as they were at event `seq`; no data."""
    memories: dict[int, Allocation] = {}
    facts: dict[str, Any] = {}
    for fact in launch.facts:
        if fact.tensor is None:
            facts[fact.name] = fact.value
            continue
        record = case.tensors.get(fact.tensor)
        tensor = _rebuilt(case, record, seq, memories) if record else None
        if tensor is None:
            case.leave_unseen(
                Gap.not_recorded(
                    f"tensor {fact.tensor}, argument {fact.name} of {launch.kernel}",
                    "its record or that of its memory is not in the bundle",
                )
            )
            return None
        facts[fact.name] = tensor
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
        record.name,
        record.owner,
        dtype,
        record.shape,
        record.strides,
        record.offset,
        memories[made.id],
        None,
    )


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
        red: object = _refusal(contract, one_wrong)
        green = _refusal(contract, whole)
        if green is None and red is None and breach.cause in _UNSEEN_BY_CHECK:
            red = breach.found
        if red is not None and green is None:
            check = f"the argument check of {contract.kernel}"
            proof = Proof(
                f"{check} refuses the recorded launch: {red}",
                breach.correction,
                f"{check} accepts the same launch with {breach.correction}",
            )
            proven_ones.append((breach, proof))
        else:
            proven_ones.append((breach, None))
    return proven_ones


def _refusal(contract: Contract, facts: Mapping[str, Any]) -> AnyRefusal | None:
    try:
        contract.check(**facts)
    except LaunchRejected as refused:
        return refused.refusal
    return None


def _proven_value(
    contract: Contract, symbols: Mapping[str, Any], values: Mapping[str, Array], breach: Breach
) -> Proof | None:
    mended = {**values, **breach.mended}
    after = [
        still
        for still in index_breaches(contract, symbols, mended)
        if still.argument == breach.argument
    ]
    if after:
        return None
    check = f"the recorded index values of {contract.kernel}"
    return Proof(
        f"{check}: {breach.found}",
        breach.correction,
        f"{check}: every entry of {breach.argument} is inside with {breach.correction}",
    )
