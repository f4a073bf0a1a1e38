"""What a runtime, a compiler or a kernel refused of any program: root causes by that alone.

The refusal is the proof: what was asked for and the limit stand in it. Nothing is replayed. What
NumPy refuses of Triton's interpreter is told, and is no proof.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from hypocenter.base.refusals import (
    AnyRefusal,
    CaptureError,
    CompileError,
    DeviceAssert,
    NoCode,
    NoConfiguration,
    OldInterpreter,
    ResourceExceeded,
)
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Claim, Hypothesis, Proof, RootCause, Verdict, proven
from hypocenter.doctor.rungs.captured import compiled_text
from hypocenter.doctor.rungs.compiled_assertion import compiled_assertion
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import Called, Launched, Rejected

NAME = "refusals"
#: Who was refused, where nothing says it.
_SOME = "a launch"
#: The last Triton whose interpreter counts by `int()` of an array with an axis, and the first NumPy
#: that refuses one.
_COUNTS_WITH_INT, _REFUSES_AN_AXIS = (3, 6), (2, 4)

#: Kernels of torch that check an index, and the call that a program makes of each.
_INDEXING = {
    "indexSelectLargeIndex": "an embedding or index_select",
    "indexSelectSmallIndex": "an embedding or index_select",
    "indexFuncLargeIndex": "index_add or index_reduce",
    "indexFuncSmallIndex": "index_add or index_reduce",
    "index_elementwise_kernel": "an index in brackets",
    "vectorized_gather_kernel": "gather, or an index in brackets",
    "nll_loss_forward_reduce_cuda_kernel_2d": "cross_entropy or nll_loss",
    "nll_loss_forward_no_reduce_cuda_kernel": "cross_entropy or nll_loss",
    "nll_loss2d_forward_kernel": "cross_entropy or nll_loss",
}
#: What stands in such a check, whichever kernel has it.
_OF_AN_INDEX = ("index out of bounds", "srcIndex <", "dstIndex <", "n_classes")


def runtime_refusals(case: Case) -> Iterator[Claim]:
    """Claims of what was refused; the recorded refusal counts before what stderr tells of it."""
    events = [event for event in case.index.events_of(Rejected) if is_of_runtime(event.refusal)]
    for event in events:
        yield from _claims(event.refusal, event.kernel, event.site, case, event.seq)
    fault = case.bundle.fault
    is_told = any(isinstance(event.refusal, type(fault.refusal)) for event in events)
    if fault.refusal is not None and is_of_runtime(fault.refusal) and not is_told:
        last = max((event.seq for event in case.bundle.events), default=0)
        yield from _claims(fault.refusal, fault.kernel, fault.site, case, last)


def is_of_runtime(refusal: AnyRefusal) -> bool:
    """Whether this check reads a refusal."""
    if isinstance(refusal, ResourceExceeded):
        return True
    kinds = NoCode | CompileError | NoConfiguration | OldInterpreter | CaptureError | DeviceAssert
    return isinstance(refusal, kinds)


def has_told_no_code(case: Case) -> bool:
    """Whether a refusal has more of a missing code than the call that reported it."""
    return isinstance(case.bundle.fault.refusal, NoCode)


def _claims(refusal: AnyRefusal, kernel: str, site: str, case: Case, seq: int) -> Iterator[Claim]:
    who = kernel or _statement(case) or _SOME
    if isinstance(refusal, OldInterpreter):
        yield from _of_interpreter(refusal, who, site, case)
    else:
        yield _claim(refusal, who, site, case, seq)


def _claim(refusal: AnyRefusal, who: str, site: str, case: Case, seq: int) -> Claim:
    match refusal:
        case ResourceExceeded():
            root = _of_resource(refusal, who)
        case NoCode():
            root = _of_code(refusal, who)
        case CompileError():
            root = _of_compiler(refusal, who)
        case NoConfiguration():
            root = _of_autotuner(refusal, who)
        case CaptureError():
            root = _of_capture(refusal, who, case)
        case DeviceAssert():
            root = _of_assertion(refusal, site, case)
        case _:
            raise TypeError(f"{type(refusal).__name__} is no refusal of a runtime")
    known = None if root.kernel == _SOME else root.kernel
    told = msgspec.structs.replace(root, launched_at=site, kernel=known)
    return proven(told, NAME, (), "the same call without an error", seq)


def _statement(case: Case) -> str:
    """The program's own line, where that reported the error."""
    first = next(iter(case.index.events_of(Called)), None)
    return case.bundle.fault.call or (first.call if first else "")


def _of_resource(refusal: ResourceExceeded, who: str) -> RootCause:
    causes = {"shared memory": Cause.SHARED_MEMORY, "threads": Cause.THREAD_LIMIT}
    ways = {
        "shared memory": "Use smaller tiles or fewer stages (num_stages)",
        "threads": "Launch with a smaller num_warps",
        "tensor memory": "Use smaller tiles, or fewer of them in tensor memory at a time",
    }
    limit, units = refusal.limit, {"shared memory": "bytes", "threads": "threads"}
    unit = units.get(refusal.resource, "columns")
    return RootCause(
        cause=causes.get(refusal.resource, Cause.TENSOR_MEMORY),
        sentence=f"{who}: a block needs {refusal.needed} {unit} of {refusal.resource}, and "
        f"{refusal.gpu} has {limit}"
        if unit != "threads"
        else f"{who}: a block has {refusal.needed} threads, and {refusal.gpu} takes {limit}",
        fix=f"{ways.get(refusal.resource, 'Use smaller tiles')}, so that {limit} {unit} are enough",
        kernel=who,
        argument="num_warps" if refusal.resource == "threads" else None,
        proof=Proof(
            f"Triton refused the launch of {who}: {refusal.resource}, required {refusal.needed}, "
            f"limit {limit}",
            f"{limit} instead of {refusal.needed}",
            f"the same check, at most {limit}, holds for {limit} and not for {refusal.needed}",
        ),
    )


def _of_code(refusal: NoCode, who: str) -> RootCause:
    wanted = refusal.wanted or "the architecture of this GPU"
    there = f" (it has {', '.join(refusal.built_for)})" if refusal.built_for else ""
    return RootCause(
        cause=Cause.NO_CODE_OBJECT,
        sentence=f"{who}: {refusal}",
        fix=f"Install a build of the library with code for {wanted}{there}, or build it for that",
        kernel=who,
        proof=Proof(
            f"the runtime refused {who}: {refusal}",
            f"code for {wanted}",
            "a kernel with code for the architecture is loaded"
            + (f", and there is none for {wanted}" if refusal.built_for else ""),
        ),
    )


def _of_compiler(refusal: CompileError, who: str) -> RootCause:
    return RootCause(
        cause=Cause.NOT_COMPILED,
        sentence=f"{who}: {refusal}",
        fix=f"Change the line that the compiler names: {refusal.sentence}",
        kernel=who,
        file=refusal.file or None,
        line=refusal.line or None,
        expression=refusal.text or None,
        blames=Blame.KERNEL if refusal.file else Blame.LAUNCH,
        proof=Proof(
            f"Triton's compiler refused {who}: {refusal.sentence}",
            f"another line than `{refusal.text}`" if refusal.text else "another kernel",
            "the compiler went as far as that line and refused it alone",
        ),
    )


def _of_autotuner(refusal: NoConfiguration, who: str) -> RootCause:
    return RootCause(
        cause=Cause.NO_CONFIGURATION,
        sentence=f"{who}: {refusal}",
        fix=f"Have early_config_prune of {who} leave a configuration for these arguments",
        kernel=who,
        proof=Proof(
            f"Triton's autotuner refused {who}: {refusal.sentence}",
            "one configuration that is not pruned",
            "the autotuner refuses an empty list alone",
        ),
    )


def _of_interpreter(refusal: OldInterpreter, who: str, site: str, case: Case) -> Iterator[Claim]:
    """No cause: an array of several elements is refused alike, and how many it had nothing says.

    Nothing at all where the recorded versions are none that refuse one of a single element.
    """
    packages = case.bundle.packages
    of = {name: packages[name] for name in ("triton", "numpy") if name in packages}
    triton, numpy = (_release(of.get(name, "")) for name in ("triton", "numpy"))
    if (triton is not None and triton > _COUNTS_WITH_INT) or (
        numpy is not None and numpy < _REFUSES_AN_AXIS
    ):
        return
    versions = "versions that ran: " + ", ".join(f"{name} {of[name]}" for name in of)
    seen = Hypothesis(
        cause=Cause.OLD_INTERPRETER,
        verdict=Verdict.INCONCLUSIVE,
        diagnostic=NAME,
        evidence=(
            f"Triton's own line `int(self.handle.data)`, by which a loop counts, ended {who}: "
            f"{refusal.sentence}",
            versions if of else "which Triton and NumPy ran was not recorded",
            "the interpreter of Triton 3.6 and older keeps a number as an array with an axis, and "
            "NumPy refuses that from 2.4 on; of several elements any NumPy refuses it",
            "not tried: NumPy below 2.4 or a newer Triton; on a GPU nothing of this shows",
        ),
        would_refute="the same error with NumPy below 2.4",
        kernel=None if who == _SOME else who,
        is_observed=True,
        at=site,
    )
    yield Claim(seen)


def _release(version: str) -> tuple[int, int] | None:
    """Major and minor number; None where the text has none."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    return (int(found[1]), int(found[2])) if found else None


def _of_capture(refusal: CaptureError, who: str, case: Case) -> RootCause:
    fix = (
        f"Take {who} out of the capture: what waits for the GPU, copies to the host, allocates by "
        "itself or loads code cannot be captured"
    )
    if refusal.in_triton:
        fix = (
            f"Launch {who} once, with arguments of the same types, before the capture begins: "
            "Triton compiles and loads a kernel at its first launch"
        )
    compiled = [event for event in case.index.events_of(Launched) if event.compiled]
    seen = [compiled_text(event) for event in compiled if event.launch.kernel == who]
    return RootCause(
        cause=Cause.CAPTURE_REFUSED,
        sentence=f"{who}: {refusal}",
        fix=fix,
        kernel=who,
        proof=Proof(
            f"the runtime refused {who} while a graph was captured: {refusal.sentence} "
            f"({refusal.code}){'; ' if seen else ''}{'; '.join(seen)}",
            f"{who} before the capture",
            "the runtime has this error for calls during a capture alone",
        ),
    )


def _of_assertion(refusal: DeviceAssert, site: str, case: Case) -> RootCause:
    is_index = refusal.function in _INDEXING or any(
        words in refusal.condition for words in _OF_AN_INDEX
    )
    of = _INDEXING.get(refusal.function)
    kernel, use = _asserting(case, refusal)
    compiled = compiled_assertion(case, use, refusal) if use is not None else None
    who = f"{kernel}, which {of} runs," if of else kernel
    threads = f" and {refusal.num_threads - 1} more threads" if refusal.num_threads > 1 else ""
    where = f" in block {refusal.block}, thread {refusal.thread}{threads}" if refusal.block else ""
    blocking = case.bundle.environment.get("CUDA_LAUNCH_BLOCKING") == "1"
    again = (
        ""
        if blocking or compiled is not None
        else "; run it with CUDA_LAUNCH_BLOCKING=1 to have the line that made the call"
    )
    what = (
        "Keep the index inside what it indexes, and negative ones out"
        if is_index
        else (f"Call it with values for which {refusal.condition} holds")
    )
    if compiled is not None:
        what = compiled.fix
    return RootCause(
        cause=Cause.INDEX_RANGE if is_index else Cause.DEVICE_ASSERT,
        sentence=f"{who} asserts {refusal.condition}, which did not hold{where}"
        + (compiled.told if compiled is not None else ""),
        fix=f"{what}{again}",
        kernel=kernel,
        argument=compiled.argument if compiled is not None else "index" if is_index else None,
        place=compiled.place if compiled is not None else None,
        entry=compiled.entry if compiled is not None else None,
        file=refusal.file,
        line=refusal.line,
        expression=refusal.condition,
        blames=Blame.LAUNCH if blocking and site else Blame.UNKNOWN,
        proof=Proof(
            f"the kernel itself checked {refusal.condition}{where}, and it did not hold",
            "an index inside the range" if is_index else f"values with {refusal.condition}",
            f"the same check holds for such: {refusal.condition}",
        ),
    )


def _asserting(case: Case, refusal: DeviceAssert) -> tuple[str, LaunchMade | None]:
    """The kernel that asserts, and a launch of it; the code of Triton's does not say which it is,
    but its file does where each kernel has one, else the text of the assertion."""
    if refusal.function != "unknown":
        return refusal.function, None
    texts = {
        key: source
        for key, source in case.sources.items()
        if "device_assert" in source.text and refusal.condition in source.text
    }
    same_file = {key for key, source in texts.items() if source.file == refusal.file}
    wanted = same_file or set(texts)
    use = next((use for use in reversed(case.launches) if use.launch.source in wanted), None)
    return (use.launch.kernel, use) if use is not None else (refusal.function, None)
