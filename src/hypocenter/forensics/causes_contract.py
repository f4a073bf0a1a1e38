"""Rung: the kernels' contracts, rechecked with the facts and the index values that were recorded.

A breach is a root cause only where the contract's own check refuses what was recorded and passes
with the one fact corrected. Needs no Triton, no torch and no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hypocenter.diagnosis import Cause, Proof, RootCause, Verdict
from hypocenter.forensics.case import Array, Case, Use, array_of
from hypocenter.forensics.causes_contract_recheck import Recheck, Seen
from hypocenter.forensics.causes_contract_walk import Breach
from hypocenter.forensics.claims import Claim, proven, row
from hypocenter.kernels.contracts import recorded_contract
from hypocenter.recording import TensorRecord
from hypocenter.tensor import Tensor

NAME = "contracts"
#: What this rung looks at, and so can refute.
SEEN = {
    Cause.NULL_POINTER: "every pointer argument of every launch is set",
    Cause.DTYPE_WIDTH: "every argument has the width that its kernel reads, in memory that fits",
    Cause.BUFFER_TOO_SMALL: "every argument lies wholly inside its allocation",
    Cause.WRONG_STRIDE: "every argument has the shape and layout that its kernel takes",
    Cause.BAD_SCALAR: "every number is in its range",
    Cause.WRONG_DEVICE: "all arguments of each launch lie on its device",
    Cause.HOST_POINTER: "no argument of a GPU kernel lies in host memory",
    Cause.MISALIGNMENT: "every argument is aligned as its contract demands",
}
VALUES_SEEN = {
    Cause.TOKEN_RANGE: "all token ids lie inside the vocabulary",
    Cause.POSITION_RANGE: "all positions lie inside their tables",
    Cause.BLOCK_TABLE_RANGE: "all live entries of the block tables lie inside the cache",
    Cause.INDEX_RANGE: "all slots and row indices lie inside what they index",
}
_MAX_ROOTS = 8


def contracts(case: Case) -> list[Claim]:
    """Breaches of every launch in the ring, earliest first; else what is refuted by there being
    none."""
    recheck, claims = Recheck(case), list[Claim]()
    done: set[tuple[Cause, int | str]] = set()
    for use in (*case.uses, *case.refused):
        for breach, proof in recheck.breaches(use):
            tensor = case.tensor_of(use.launch, breach.argument)
            key = (breach.cause, tensor.allocation if tensor else breach.argument)
            if key in done or len(done) >= _MAX_ROOTS:
                continue
            done.add(key)
            facts = recheck.facts(use)
            claims.append(
                _claim(case, use, breach, proof, facts) if proof and facts is not None
                else _unproven(use, breach)
            )  # fmt: skip
    _tell_unseen(case, recheck.seen)
    return [*claims, *_refuted(recheck.seen, claims)]


# -- claims ---------------------------------------------------------------------------------------


def _claim(case: Case, use: Use, breach: Breach, proof: Proof, facts: Mapping[str, Any]) -> Claim:
    launch = use.launch
    tensor = facts.get(breach.argument)
    name = tensor.name if isinstance(tensor, Tensor) else None
    access = case.access(launch, breach.argument)
    record = case.tensor_of(launch, breach.argument)
    effect = ""
    evidence = [f"{use.where}: {launch.kernel}: {breach.found}"]
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
        file=access.file if access else None,
        line=access.line if access else None,
        expression=access.expression if access else None,
        place=use.place,
    )
    return proven(
        root, NAME, tuple(evidence),
        f"the contract of {launch.kernel} accepting the recorded {breach.argument}",
        use.seq, (record.id,) if record else (),
    )  # fmt: skip


def _unproven(use: Use, breach: Breach) -> Claim:
    return row(
        breach.cause, Verdict.INCONCLUSIVE, NAME,
        f"{use.where}: {use.launch.kernel}: {breach.found}",
        "no single fact was found with which the contract accepts the launch",
        would_refute="a contract that takes such an argument", kernel=use.launch.kernel,
        argument=breach.argument,
    )  # fmt: skip


def _as_read(
    case: Case, use: Use, breach: Breach, record: TensorRecord, tensor: Tensor,
    facts: Mapping[str, Any],
) -> Iterator[str]:  # fmt: skip
    """What the kernel makes of the bytes that the host wrote, and where that leads."""
    recorded = case.values(record.id, use.seq)
    contract = recorded_contract(case.bundle, use.launch)
    args = contract.args if contract is not None else ()
    arg = next((one for one in args if one.name == breach.argument), None)
    if recorded is None or arg is None or contract is None:
        return
    reads = np.dtype(f"<i{arg.dtypes[0].block_bytes}")
    whole = recorded.data[: len(recorded.data) // reads.itemsize * reads.itemsize]
    as_read = np.frombuffer(whole, reads)
    if arg.index is None or tensor.dtype is arg.dtypes[0] or not as_read.size:
        return
    given = array_of(recorded).reshape(-1)
    yield (
        f"the host wrote {breach.argument} = {_shown(given)} as {recorded.dtype}; the kernel, "
        f"reading {reads.itemsize} bytes each, gets {_shown(as_read)}"
    )
    symbols = {one.name: facts[one.name] for one in contract.scalars}
    for other in contract.args:
        value = facts[other.name]
        if isinstance(value, Tensor):
            symbols |= {
                axis: size for axis, size in zip(other.axes, value.shape, strict=False)
                if axis.isidentifier()
            }  # fmt: skip
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


def _shown(array: Array, count: int = 8) -> str:
    shown = ", ".join(str(int(value)) for value in array[:count])
    return f"[{shown}{', ...' if array.size > count else ''}]"


def _refuted(seen: Seen, claims: list[Claim]) -> Iterator[Claim]:
    if not seen.launches:
        return
    confirmed = {claim.hypothesis.cause for claim in claims}
    for cause, text in SEEN.items():
        if cause not in confirmed:
            yield row(
                cause, Verdict.REFUTED, NAME,
                f"{text} (contracts rechecked for {seen.launches} launches)",
                would_refute="a launch whose contract refuses the recorded arguments",
            )  # fmt: skip
    for cause, text in VALUES_SEEN.items():
        if seen.entries[cause] and cause not in confirmed:
            yield row(
                cause, Verdict.REFUTED, NAME,
                f"{text} ({seen.entries[cause]} recorded entries rechecked)",
                would_refute="a recorded entry outside of what it indexes",
            )  # fmt: skip
    if seen.entries and Cause.SENTINEL_CONSUMED not in confirmed:
        yield row(
            Cause.SENTINEL_CONSUMED, Verdict.REFUTED, NAME,
            f"no live entry is -1 ({seen.entries.total()} recorded entries rechecked)",
            would_refute="a live entry that is -1",
        )  # fmt: skip


def _tell_unseen(case: Case, seen: Seen) -> None:
    if seen.without_contract:
        case.unseen[
            f"arguments of {', '.join(seen.without_contract)}: no contract is known for them"
        ] = None
    if seen.changed:
        case.unseen[
            f"contracts of {', '.join(seen.changed)} differ from the recorded ones; the installed "
            "ones were used"
        ] = None
    if seen.no_values:
        case.unseen[
            f"index values that the device made or that were not recorded: "
            f"{', '.join(seen.no_values)}"
        ] = None
