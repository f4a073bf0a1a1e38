"""Rung: indices of 8 bytes that a kernel reads 4 bytes at a time, all of them inside the tensor.

A kernel may read halves on purpose. It is a fault where all of this holds, by what was recorded:

- one load reads as many numbers as the tensor has elements, one behind the other, so that it
  reads the first half of the tensor alone;
- what it reads decides where the kernel goes;
- every second number is but the sign of the one before it, as in whole numbers of 8 bytes;
- the half that is never read holds other numbers than 0;
- no launch before wrote to that memory by a pointer that it cast, as into a workspace;
- the program has not compared what the launch gave, and found it right.

Such a comparison speaks for the result where the other side came of neither it nor the same kernel,
allowed little, and would fail with the numbers in another order. Where it is not known whence the
other side came, or where much was allowed, it makes the fault uncertain. Else it says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError
from hypocenter.base.tensor import contiguous_strides
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.judging.origin import writers_of
from hypocenter.doctor.kernel_text import accesses, follows_what_it_loads
from hypocenter.doctor.mask_text import MaskEdit, uncast_edits
from hypocenter.doctor.rungs.replaying.trials import edits_of
from hypocenter.doctor.rungs.seen.touched import Touched, touches_of
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.compared import ComparedEqual
from hypocenter.record.events import SourceRecord, TensorRecord
from hypocenter.record.gap import Gap

NAME = "halved elements"
#: Launches that are replayed, the first of each kernel and parameter; and least elements of a
#: tensor of which it is told.
MAX_LAUNCHES, MIN_ELEMENTS = 8, 4
_WIDTH_BYTES = 4
#: With fewer elements unlike their neighbours it says nothing, and with as many it may be sure.
_FEW_UNLIKE, _MANY_UNLIKE = 1 / 16, 1 / 2
#: What a comparison may allow of the largest number: a third of a type's digits have to agree, so
#: it is the cube root of the step from 1 to the next number. Of whole numbers nothing.
_SHARE = {"F16": 0.1, "BF16": 0.2, "F32": 5e-3, "F64": 6e-6}


def halved_elements(case: Case) -> list[Claim]:
    """A root for each parameter that is read so."""
    claims: list[Claim] = []
    for number, (use, parameter, tensor, source) in enumerate(_cast_indices(case)):
        if number >= MAX_LAUNCHES:
            break
        try:
            claim = _claim(case, use, parameter, tensor, source)
        except (HypoError, ImportError) as error:
            what = f"whether {use.launch.kernel} reads halves of what {parameter} holds"
            case.leave_unseen(Gap.not_examined(what, str(error)))
            continue
        if claim is not None:
            claims.append(claim)
    return claims


def _cast_indices(case: Case) -> Iterator[tuple[LaunchMade, str, TensorRecord, SourceRecord]]:
    """The first launch of each kernel that casts a pointer and goes by what it loads there."""
    seen: set[tuple[str, str]] = set()
    for use in case.launches if case.is_foreign else ():
        source = case.sources.get(use.launch.source)
        if source is None or "pointer_type" not in source.text:
            continue
        for name, tensor in case.tensors_of(use.launch).items():
            parameter = case.parameter_of(use.launch, name)
            key = (use.launch.source, parameter)
            if tensor.dtype != "I64" or key in seen or _contents_of(case, use, tensor) is None:
                continue
            if _is_workspace(case, use, tensor):
                continue
            is_read_once = len(accesses(source, parameter, {})) == 1
            if is_read_once and follows_what_it_loads(source, parameter):
                seen.add(key)
                yield use, parameter, tensor, source


def _is_workspace(case: Case, use: LaunchMade, tensor: TensorRecord) -> bool:
    """Whether a launch before this one may have written there by a pointer that it cast."""
    for made in case.launches:
        source = case.sources.get(made.launch.source)
        if made.seq >= use.seq or source is None or "pointer_type" not in source.text:
            continue
        written = case.written_by(made.launch)
        at = {
            held.address for name, held in case.tensors_of(made.launch).items() if name in written
        }
        if tensor.address in at:
            return True
    return False


def _words_for(case: Case, use: LaunchMade) -> Iterator[tuple[ComparedEqual, bool]]:
    """Comparisons that say that a launch's result is right, and whether each is sure of that.

    They are of what this launch was the last to write, and passed.
    """
    tensors = case.tensors_of(use.launch)
    given = [tensors[name] for name in case.written_by(use.launch) if name in tensors]
    for event in case.index.events_of(ComparedEqual):
        later = [made for made in case.launches if use.seq < made.seq < event.seq]
        for tensor in given:
            is_whole = event.num_elements == math.prod(tensor.shape)
            is_its = event.allocation == tensor.allocation and is_whole and event.seq > use.seq
            if not is_its or any(writers_of(case, later, tensor.allocation)):
                continue
            if (is_sure := _speaks(case, use, event)) is not None:
                yield event, is_sure


def _speaks(case: Case, use: LaunchMade, event: ComparedEqual) -> bool | None:
    """Whether a comparison that passed is sure of a result; None where it says nothing of it."""
    same = [made for made in case.launches if made.launch.source == use.launch.source]
    if event.origin == "derived" or any(writers_of(case, same, event.other)):
        return None
    if event.share_unlike < _FEW_UNLIKE:
        return None  # the same numbers in another order, or others near them, would pass as well
    is_close = event.allowed <= _SHARE.get(event.dtype, 0.0) * event.largest
    return is_close and event.share_unlike >= _MANY_UNLIKE and event.origin == "apart"


def _contents_of(case: Case, use: LaunchMade, tensor: TensorRecord) -> Array | None:
    """What a packed tensor held before the launch, where all of that was recorded; flat."""
    values = case.index.values(use.place).get(tensor.id) if use.place is not None else None
    is_packed = tuple(tensor.strides) == tuple(contiguous_strides(tuple(tensor.shape)))
    if values is None or not is_packed or values.dtype != "I64":
        return None
    held = np.frombuffer(values.data, np.int64)
    return held if held.size == int(np.prod(tensor.shape)) >= MIN_ELEMENTS else None


def _claim(
    case: Case, use: LaunchMade, parameter: str, tensor: TensorRecord, source: SourceRecord
) -> Claim | None:
    held = _contents_of(case, use, tensor)
    before = touches_of(case, use, parameter)
    if held is None or before is None or not _are_halves(before, held):
        return None
    line = before.accesses[0].line
    edits = [edit for edit in uncast_edits(source, line) if edit.now == parameter]
    if len(edits) != 1:
        return None
    edited = msgspec.structs.replace(source, text=edits[0].text)
    after = touches_of(case, use, parameter, edited=edited)
    if after is None or not _are_elements(after, held.size):
        return None
    words = list(_words_for(case, use))
    if any(is_sure for _, is_sure in words):
        return None
    claim = _proven(use, parameter, tensor, source, edits[0], line)
    return _uncertain(claim, words[0][0]) if words else claim


def _uncertain(claim: Claim, passed: ComparedEqual) -> Claim:
    """The same where the program has found the result equal to something."""
    root = claim.root
    assert root is not None
    why = (
        "where the other side came from was not seen"
        if passed.origin == "unknown"
        else f"it allowed {passed.allowed:.3g}, beside numbers of up to {passed.largest:.3g}, of "
        f"which {passed.share_unlike:.0%} are unlike the one before"
    )
    return row(
        root.cause,
        Verdict.INCONCLUSIVE,
        NAME,
        root.sentence,
        f"yet the program found the result equal to another tensor at {passed.site}; {why}",
        would_refute="a comparison with what came of neither the result nor this kernel",
        kernel=root.kernel,
        argument=root.argument,
    )


def _are_halves(found: Touched, held: Array) -> bool:
    """Whether one load reads the first half of the numbers, and they are halves of whole ones."""
    if any(a.operation != "load" or a.width_bytes != _WIDTH_BYTES for a in found.accesses):
        return False
    if not np.array_equal(np.unique(found.offsets), np.arange(held.size) * _WIDTH_BYTES):
        return False
    if any(not _go_up_by_one(access.pointers[access.active]) for access in found.accesses):
        return False  # pairs, lane by lane
    words = held.view(np.int32)[: held.size]
    low, high = words[0::2], words[1::2]
    is_sign = np.array_equal(high, low[: high.size] >> 31)
    return bool(is_sign and held[(held.size + 1) // 2 :].any())


def _go_up_by_one(addresses: Array) -> bool:
    return bool((np.diff(addresses) == np.uint64(_WIDTH_BYTES)).all())


def _are_elements(found: Touched, num_elements: int) -> bool:
    are_whole = all(access.width_bytes == 2 * _WIDTH_BYTES for access in found.accesses)
    elements = np.arange(num_elements) * 2 * _WIDTH_BYTES
    return are_whole and np.array_equal(np.unique(found.offsets), elements)


def _proven(
    use: LaunchMade,
    parameter: str,
    tensor: TensorRecord,
    source: SourceRecord,
    edit: MaskEdit,
    line: int,
) -> Claim:
    num = int(np.prod(tensor.shape))
    half = (num + 1) // 2
    root = RootCause(
        cause=Cause.DTYPE_WIDTH,
        sentence=f"{use.launch.kernel}: {parameter} ({tensor.name}) holds whole numbers of 8 bytes "
        f"and is read {_WIDTH_BYTES} bytes at a time, so every second index is the upper half of "
        "the one before it",
        fix=f"Take the cast of the pointer away: `{edit.now}`; or give {parameter} a tensor of "
        "int32",
        proof=Proof(
            f"the replay of {use.where} reads {num} numbers of {_WIDTH_BYTES} bytes, which are "
            f"elements 0 to {half - 1} of {num}: every second one is 0, or -1 behind one below 0, "
            f"and elements {half} to {num - 1} are never read",
            f"`{edit.now}` in line {edit.line}",
            f"the same replay reads each of {num} elements",
        ),
        kernel=use.launch.kernel,
        argument=parameter,
        tensor=tensor.name,
        file=source.file,
        line=line,
        expression=edit.was,
        place=use.place,
        blames=Blame.KERNEL,
        launched_at=use.launch.site,
        edits=edits_of(source, msgspec.structs.replace(source, text=edit.text)),
    )
    refutes = "a number among the upper halves that is no sign"
    return proven(root, NAME, (), refutes, use.seq, (tensor.id,))
