"""Rung: what was refused or reported outright, and who made an error that another call reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import Cause, Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.record.events import Called, Rejected

NAME = "refusals"
_OUT_OF_MEMORY = re.compile(r"out ?of ?memory|MemoryAllocation|bytes asked for", re.I)
_NO_CODE = re.compile(
    r"no kernel image|no binary for gpu|NoBinaryForGpu|NoKernelImage|unable to find code object|"
    r"invalid device function|InvalidDeviceFunction|has no code for",
    re.I,
)
_FIELD = re.compile(
    r"(?P<file>\S+): (?P<field>[\w.]+) is (?P<value>[^,]+), but must be from (?P<low>\S+) to "
    r"(?P<high>[^\s,;]+)"
)
_INDEX = re.compile(
    r"(?P<name>\w+)(?P<at>(?:\[[^\]]*\])+) = (?P<value>-?\d+), but (?P<of>.+?) has "
    r"(?P<bound>\d+)(?: entries)?"
)


@dataclass(frozen=True, slots=True)
class _Read:
    """A refusal understood: what it blames, the number it refused and one that it would take."""

    cause: Cause
    argument: str | None
    corrected: str
    green: str
    fix: str


def refusals(case: Case) -> list[Claim]:
    """Root causes that a refusal names by itself, and errors blamed on the call that made them."""
    told = {claim.seq for claim in case.claims if claim.root is not None}
    claims = [
        claim
        for event in case.events(Rejected)
        if event.seq not in told and (claim := _of_rejected(event.kernel, event.reason, event.seq))
    ]
    is_untold = not case.events(Rejected) and not case.events(Called)
    if is_untold and (claim := _of_last_words(case)):
        claims.append(claim)
    claims += _of_calls(case)
    return claims


# -- refusals -------------------------------------------------------------------------------------


def _of_last_words(case: Case) -> Claim | None:
    """A refusal that was told to the user, though no recorder wrote it down."""
    fault = case.bundle.fault
    lines = [fault.message] if fault.kind == "error" else []
    if fault.exit_code:
        lines += [text for text in case.bundle.stderr.splitlines() if text.startswith("error: ")]
    for text in lines[-1:]:
        if (found := _FIELD.search(text)) is not None:
            return _of_field(found)
        kernel, _, reason = text.removeprefix("error: ").partition(": ")
        if kernel.isidentifier():
            return _of_rejected(kernel, reason, 0)
    return None


def _of_field(found: re.Match[str]) -> Claim:
    """A refused number of the model file's metadata; its name says which kernel wants it."""
    field, value, low, high = found["field"], found["value"], found["low"], found["high"]
    red = f"{field} is {value}, but must be from {low} to {high}"
    root = RootCause(
        cause=Cause.BAD_SCALAR, sentence=f"the model file: {red}",
        fix=f"Mend {field} in the model file ({found['file']}), or convert the model anew",
        kernel="rope" if "rope" in field.split(".") else None, argument=field,
        proof=Proof(f"the reader refused it: {red}", f"{field} = {high}",
                    f"the same test, {low} <= {field} <= {high}, holds for {high}"),
    )  # fmt: skip
    return proven(root, NAME, (), "a value inside the range")


def _of_rejected(kernel: str, reason: str, seq: int) -> Claim | None:
    is_copy = kernel.startswith("copy of ")
    whole = f"{kernel.removeprefix('copy of ')} {reason}" if is_copy else reason
    read = next((found for rule in _RULES if (found := rule(whole))), None)
    if read is None:
        return None
    root = RootCause(
        cause=read.cause, sentence=f"{kernel}: {reason}", fix=read.fix,
        kernel="copy" if is_copy else kernel,
        argument=read.argument,
        proof=Proof(f"{kernel} was refused: {reason}", read.corrected, read.green),
    )  # fmt: skip
    return proven(root, NAME, (), "the check accepting what was passed", seq)


def _index(reason: str) -> _Read | None:
    found = _INDEX.search(reason)
    if found is None:
        return None
    name, of = found["name"], found["of"]
    value, bound = int(found["value"]), int(found["bound"])
    if 0 <= value < bound:
        return None
    at = f"{name}{found['at']}"
    better = min(max(value, 0), bound - 1)
    return _Read(
        index_cause_by_name(name, of, value), name, f"{at} = {better}",
        f"the same check, 0 <= {at} < {bound}, holds for {better} and not for {value}",
        f"Keep {name} inside 0 to {bound - 1}: {of} has {bound} entries",
    )  # fmt: skip


def index_cause_by_name(name: str, of: str, value: int) -> Cause:
    """The class of an index out of range, by its name and by what it indexes."""
    if value == -1:
        return Cause.SENTINEL_CONSUMED
    for part, cause in (
        ("vocabulary", Cause.TOKEN_RANGE), ("token_ids", Cause.TOKEN_RANGE),
        ("positions", Cause.POSITION_RANGE),
        ("block_tables", Cause.BLOCK_TABLE_RANGE), ("counts", Cause.BAD_SCALAR),
    ):  # fmt: skip
        if part in name or part in of:
            return cause
    return Cause.INDEX_RANGE


def _numbers(
    pattern: str, cause: Cause, argument: str, holds: Callable[[int, int], bool], fix: str
) -> Callable[[str], _Read | None]:
    """A rule for `... VALUE ... LIMIT ...` of which `holds(value, limit)` should have been true."""
    compiled = re.compile(pattern)

    def read(reason: str) -> _Read | None:
        found = compiled.search(reason)
        if found is None:
            return None
        value, limit = int(found["value"]), int(found["limit"])
        if holds(value, limit):
            return None
        name = found.groupdict().get("name") or argument or None
        return _Read(
            cause, name, f"{limit} instead of {value}",
            f"the same check holds for {limit} and not for {value}",
            fix.format(value=value, limit=limit, name=name),
        )  # fmt: skip

    return read


def _words(
    pattern: re.Pattern[str] | str, cause: Cause, corrected: str, green: str, fix: str
) -> Callable[[str], _Read | None]:
    """A rule for a refusal without numbers."""
    compiled = re.compile(pattern)

    def read(reason: str) -> _Read | None:
        found = compiled.search(reason)
        if found is None:
            return None
        names = {"name": "it", "right": "", "was": "", **found.groupdict()}
        return _Read(
            cause, found.groupdict().get("name"), corrected.format(**names),
            green.format(**names), fix.format(**names),
        )  # fmt: skip

    return read


def _at_most(value: int, limit: int) -> bool:
    return value <= limit


def _at_least(value: int, limit: int) -> bool:
    return value >= limit


_NAME = r"(?P<name>[\w.]+)(?: \([^)]*\))?"
_RULES: tuple[Callable[[str], _Read | None], ...] = (
    _index,
    _words(
        r"two tokens have the same (?P<name>slot)", Cause.STALE_SLOT, "a slot of its own for each",
        "the same check holds when no two slots are equal", "Give every token of a step its slot",
    ),
    _numbers(r"grid\[\d\] is (?P<value>-?\d+), but must be from (?P<limit>\d+)", Cause.EMPTY_LAUNCH,
             "grid", _at_least, "Do not launch for an empty batch"),
    _numbers(r"^(?P<value>0) tokens, but (?P<limit>\d+) to", Cause.EMPTY_LAUNCH, "grid", _at_least,
             "Do not run a step for an empty batch"),
    _numbers(r"grid\[\d\] is (?P<value>\d+), but .* has at most (?P<limit>\d+)", Cause.GRID_LIMIT,
             "grid", _at_most, "Keep the grid at or below {limit} along that axis"),
    _numbers(r"has (?P<value>\d+) programs, but at most (?P<limit>\d+)", Cause.GRID_PRODUCT, "grid",
             _at_most, "Split the launch into parts of at most {limit} programs"),
    _numbers(r"grid\[0\] x threads is (?P<value>\d+), but .* at most (?P<limit>\d+)",
             Cause.GRID_LIMIT, "grid", _at_most, "Use a second grid axis, or fewer warps"),
    _numbers(r"a block has (?P<value>\d+) threads.*, but .* takes (?:1 to )?(?P<limit>\d+)",
             Cause.THREAD_LIMIT, "num_warps", _at_most, "Launch with fewer warps: {limit} threads "
             "fit a block, {value} were asked for"),
    _numbers(r"needs (?P<value>\d+) bytes of shared memory, but .* has (?P<limit>\d+)",
             Cause.SHARED_MEMORY, "", _at_most,
             "Use smaller tiles or fewer stages, so that {limit} bytes are enough"),
    _numbers(r"shared memory.* needs (?P<value>\d+), but .* has (?P<limit>\d+)",
             Cause.SHARED_MEMORY, "", _at_most,
             "Use smaller tiles or fewer stages, so that {limit} bytes are enough"),
    _words(
        _NAME + r" is null", Cause.NULL_POINTER, "a tensor for {name}",
        "the same check holds for any tensor there", "Pass a tensor for {name}, or do not launch",
    ),
    _words(
        _NAME + r" is (?P<was>\w+), but it is read as (?P<right>\w+)", Cause.DTYPE_WIDTH,
        "{name} as {right}", "the same check holds for {name} as {right}, and not as {was}",
        "Make {name} with dtype {right}",
    ),
    _words(
        _NAME + r" was freed (?:before, )?at (?P<right>\S+)", Cause.USE_AFTER_FREE,
        "{name} not freed", "the same check holds for {name} while it is not freed",
        "Keep {name} until its last use has ended (it was freed at {right})",
    ),
    _words(
        _NAME + r" is an? \w+ of the host", Cause.HOST_POINTER, "{name} on the device",
        "the same check holds for an address of the device",
        "Copy {name} to the device and pass that",
    ),
    _words(
        _NAME + r" is on cpu, the others on (?P<right>\S+)", Cause.HOST_POINTER,
        "{name} on {right}", "the same check holds with {name} on {right}",
        "Copy {name} to {right} and pass the copy",
    ),
    _words(
        _NAME + r" is on (?P<was>\S+), the others on (?P<right>\S+)", Cause.WRONG_DEVICE,
        "{name} on {right}", "the same check holds with {name} on {right}, and not on {was}",
        "Copy {name} to {right} and pass the copy",
    ),
    _words(
        _NAME + r" is taken to be on (?P<right>\S+), but lies at (?P<was>\w+)", Cause.WRONG_DEVICE,
        "{name} in memory of {right}", "the same check holds for an address of {right}",
        "Copy {name} by the device that it was allocated on: {was} is not {right}'s",
    ),
    _words(
        _NAME + r" is still being written by (?P<right>.+?), which", Cause.MISSING_WAIT,
        "a wait for {right}", "the same check holds when {right} has been waited for",
        "Record an event behind {right} and wait for it before {name} is copied",
    ),
    _numbers(
        _NAME + r" (?P<value>\d+) rows, but it has (?P<limit>\d+)", Cause.BUFFER_TOO_SMALL, "",
        _at_most, "Copy at most {limit} rows of {name}",
    ),
    _numbers(
        _NAME + r" reaches to byte (?P<limit>\d+), but its allocation has (?P<value>\d+)",
        Cause.BUFFER_TOO_SMALL, "", _at_least, "Allocate {limit} bytes for {name}, not {value}",
    ),
    _words(
        _NAME + r" lies at \w+, but must be aligned to (?P<right>\d+)", Cause.MISALIGNMENT,
        "{name} at a multiple of {right} bytes",
        "the same check holds at a multiple of {right} bytes",
        "Begin {name} at a multiple of {right} bytes",
    ),
    _words(
        _NAME + r" has (?:strides|shape) \([^)]*\), but must be (?P<right>.+)", Cause.WRONG_STRIDE,
        "{name} as {right}", "the same check holds for {name} as {right}", "Pass {name} as {right}",
    ),
    _words(
        r"(?P<name>\w+) is (?P<was>\S+), but (?P<right>must .+)", Cause.BAD_SCALAR,
        "a {name} that holds: {right}", "the same check holds for it, and not for {was}",
        "Pass a {name} for which this holds: {right}",
    ),
    _words(
        _NO_CODE, Cause.NO_CODE_OBJECT, "code for this architecture",
        "a kernel with code for the architecture is loaded: others of this run were",
        "Build the kernel for the architecture of this GPU too",
    ),
)  # fmt: skip


# -- calls ----------------------------------------------------------------------------------------


def _of_calls(case: Case) -> Iterator[Claim]:
    """Errors whose maker is not who reported them."""
    fault = case.bundle.fault
    for event in case.events(Called):
        if claim := _of_outcome(case, event):
            yield claim
    first = next(iter(case.events(Called)), None)
    if first is None:
        if not case.bundle.events:
            yield row(Cause.PENDING_ERROR, Verdict.NOT_TESTED, NAME,
                      "refusals: no event of this run was recorded")  # fmt: skip
        elif fault.kind in ("error", "crash"):
            is_polled = any(one.armed for one in case.bundle.checks)
            text = (
                "no call before the one that reported it had returned an error: every call was "
                "polled"
            )
            yield row(
                Cause.PENDING_ERROR, Verdict.REFUTED, NAME,
                text if is_polled else "no earlier call is on record with an error",
                would_refute="an earlier call with the same error",
            )  # fmt: skip
        return
    is_memory = bool(_OUT_OF_MEMORY.search(first.outcome))
    reporter = _reporter(case, first) or ""
    if is_memory and not reporter and fault.kind == "crash":
        reporter = "a fault of the device"
    if not reporter or _same_call(reporter, first.call):
        return
    call = first.call or ("an allocation" if is_memory else "an unnamed call")
    cause = Cause.LATE_OUT_OF_MEMORY if is_memory else Cause.PENDING_ERROR
    red = (
        f"{call} returned {first.outcome} (event {first.seq}, {first.site or 'no site'}); "
        f"{reporter} reported it later"
    )
    null = next((claim for claim in case.claims if claim.hypothesis.cause is Cause.NULL_POINTER
                 and claim.root is not None), None) if is_memory else None  # fmt: skip
    used = null.root if null is not None else None
    root = RootCause(
        cause=cause,
        sentence=f"{call} made the error, {reporter} only reported it: {first.outcome}",
        fix=f"Look at {call}{f' ({first.site})' if first.site else ''}, check what it "
        "returns there, and leave the call that reported it alone",
        kernel=used.kernel if used else _kernel_in(first.call),
        argument=used.argument if used else None,
        tensor=used.tensor if used else None,
        file=used.file if used else None,
        line=used.line if used else None,
        expression=used.expression if used else None,
        proof=Proof(
            red, f"{call} without its error",
            f"without the error of {call} no call before {reporter} has one, and {reporter} "
            "has none of its own",
        ),
    )  # fmt: skip
    yield proven(root, NAME, (), "an error of the reporting call's own", first.seq,
                 null.tensors if null is not None else ())  # fmt: skip


def _of_outcome(case: Case, event: Called) -> Claim | None:
    if _NO_CODE.search(event.outcome):
        return _of_rejected(_kernel_in(event.call) or event.call, event.outcome, event.seq)
    kernel = _kernel_in(event.call)
    if kernel is None:
        return None
    return _of_rejected(kernel, event.outcome, event.seq)


def _reporter(case: Case, first: Called) -> str | None:
    """Who told of an error that `first` had made: the next call with the same outcome, the fault's
    own call."""
    for event in case.events(Called):
        if event.seq > first.seq and _same_error(event.outcome, first.outcome):
            return event.call
    fault = case.bundle.fault
    if fault.call and (
        _same_error(fault.message, first.outcome) or _OUT_OF_MEMORY.search(first.outcome)
    ):
        return fault.call
    return None


def _same_error(one: str, other: str) -> bool:
    words = [re.sub(r"\W+", " ", text).strip().lower() for text in (one, other)]
    return bool(words[1]) and (words[1] in words[0] or words[0] in words[1])


def _same_call(one: str, other: str) -> bool:
    return one.split("(")[0].strip() == other.split("(")[0].strip()


def _kernel_in(call: str) -> str | None:
    found = re.search(r"(?:launch of |Kernel ')(\w+)", call)
    return found.group(1).removesuffix("_kernel") if found else None
