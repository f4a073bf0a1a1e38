"""Rung: kernels that are not Triton's: launches that the driver refused, and addresses of a dump.

The driver's own record has what a launch asked for and which memory there was. A refusal is proven
by the limit that it exceeds. An address is proven to be outside by ranges, and to be of a parameter
by the machine code that made it. What led to it is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Claim, Culprit, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.gpu_sight import grid_of, own_frame, sight_of, sight_text
from hypocenter.doctor.rungs.driver.launch_sight import (
    DriverSight,
    KnownMemory,
    Parameter,
    driver_memory,
    driver_sight,
    parameters_of,
)
from hypocenter.record.driver_run import DriverLaunch, DriverRefusal, DriverRun
from hypocenter.record.gpu_stop import GpuAccess, GpuFrame, GpuStop, GpuWarp
from hypocenter.settings.environment import launch_blocking

NAME = "driver"
#: An address below this is that of nothing.
NULL_BYTES = 1 << 16
_WHOLE = (1 << 64) - 1
_OPEN = "what leads there is not known: values on the GPU and branches of the kernel are not read"


def driver_launches(case: Case) -> list[Claim]:
    """What the driver refused, and which parameter led outside, of kernels of any language."""
    run = case.bundle.driver_run or DriverRun()
    if any(claim.root is not None for claim in case.claims):
        return []
    return [*_claims_of_refusals(case, run), *_claims_of_stops(case, run)]


# -- what the driver refused ----------------------------------------------------------------------

#: What a program says that ended by such an answer of the driver's, in small letters.
_SAID = {
    1: ("invalid argument", "invalid configuration", "invalid_value"),
    701: ("too many resources", "out of resources"),
}


@dataclass(frozen=True, slots=True)
class _Limit:
    """A limit that a launch exceeds, in words for a report."""

    cause: Cause
    argument: str
    asked: int
    limit: int
    what: str
    fix: str


def _claims_of_refusals(case: Case, run: DriverRun) -> Iterator[Claim]:
    """Launches that were not made because they exceed a limit."""
    launches = {launch.seq: launch for launch in run.launches}
    found = [
        (launches[refusal.seq], refusal)
        for refusal in run.refusals
        if refusal.code in _SAID and refusal.seq in launches
    ]
    names = {launch.kernel for launch, _ in found}
    for number in names:
        launch, refusal = next(pair for pair in reversed(found) if pair[0].kernel == number)
        kernel = run.kernel_of(launch)
        name = (kernel.name or kernel.symbol) if kernel is not None else "a kernel"
        limit = _limit_of(launch, refusal)
        is_told = _has_said(case, refusal)
        if limit is not None and is_told and len(names) == 1:
            yield _of_limit(case, launch, refusal, name, limit)
        else:
            yield _claim_not_made(launch, refusal, name, limit, is_told=is_told)


def _has_said(case: Case, refusal: DriverRefusal) -> bool:
    """Whether the run ended by the driver's answer: another call of the runtime passed it on."""
    fault = case.bundle.fault
    said = f"{fault.error} {fault.message}".lower()
    return fault.kind in ("error", "crash") and any(
        words in said for words in (*_SAID[refusal.code], refusal.name.lower())
    )


def _limit_of(launch: DriverLaunch, refusal: DriverRefusal) -> _Limit | None:
    """The limit of the GPU, or of the kernel, that a launch exceeds."""
    limits = refusal.limits
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    most = [
        limits[name]
        for name in ("threads of a block", "threads of a block of the kernel")
        if limits.get(name)
    ]
    if 0 in (*launch.grid, *launch.block):
        return _Limit(
            Cause.EMPTY_LAUNCH,
            "grid",
            0,
            1,
            f"grid {launch.grid} with blocks of {launch.block} threads is empty",
            "Do not launch where there is nothing to do",
        )
    if most and threads > min(most):
        return _Limit(
            Cause.THREAD_LIMIT,
            "block",
            threads,
            min(most),
            f"a block of {launch.block} has {threads} threads, and {min(most)} are allowed",
            f"Launch blocks of at most {min(most)} threads",
        )
    for axis, asked in zip("xyz", launch.block, strict=True):
        limit = limits.get(f"threads of a block along {axis}", asked)
        if asked > limit:
            return _Limit(
                Cause.THREAD_LIMIT,
                "block",
                asked,
                limit,
                f"a block has {asked} threads along {axis}, and {limit} are allowed",
                f"Launch blocks of at most {limit} threads along {axis}",
            )
    for axis, asked in zip("xyz", launch.grid, strict=True):
        limit = limits.get(f"blocks along {axis}", asked)
        if asked > limit:
            return _Limit(
                Cause.GRID_LIMIT,
                "grid",
                asked,
                limit,
                f"the grid has {asked} blocks along {axis}, and {limit} are allowed",
                f"Keep the grid at or below {limit} blocks along {axis}",
            )
    return _shared_limit(launch, limits)


def _shared_limit(launch: DriverLaunch, limits: dict[str, int]) -> _Limit | None:
    allowed = limits.get("dynamic shared bytes of the kernel")
    if allowed is None or launch.shared_bytes <= allowed:
        return None
    whole = limits.get("shared bytes of a block", allowed)
    room = whole - limits.get("static shared bytes of the kernel", 0)
    fix = (
        f"Ask for them with cudaFuncSetAttribute (up to {room}), or use fewer"
        if launch.shared_bytes <= room
        else f"Use at most {room} bytes of dynamic shared memory"
    )
    return _Limit(
        Cause.SHARED_MEMORY,
        "shared memory",
        launch.shared_bytes,
        allowed,
        f"{launch.shared_bytes} bytes of dynamic shared memory were asked for, and the kernel may "
        f"have {allowed}",
        fix,
    )


def _of_limit(
    case: Case, launch: DriverLaunch, refusal: DriverRefusal, name: str, limit: _Limit
) -> Claim:
    answer = f"the driver answered {refusal.name} ({refusal.sentence}) to the launch of {name}"
    at = f" at {launch.site}" if launch.site else ""
    root = RootCause(
        cause=limit.cause,
        sentence=f"{name}: {limit.what}, so it was not launched",
        fix=limit.fix,
        proof=Proof(
            f"{answer}{at}: {limit.what}",
            f"{limit.limit} instead of {limit.asked}",
            f"the same check holds for {limit.limit} and not for {limit.asked}",
        ),
        kernel=name,
        argument=limit.argument,
        blames=Blame.LAUNCH,
        launched_at=launch.site,
    )
    return proven(root, NAME, (), "a launch of that size that the driver makes", _last_seq(case))


def _claim_not_made(
    launch: DriverLaunch, refusal: DriverRefusal, name: str, limit: _Limit | None, *, is_told: bool
) -> Claim:
    """A launch that was refused, where it is not sure that the program minded."""
    at = f" at {launch.site}" if launch.site else ""
    size = f"grid {launch.grid}, blocks of {launch.block} threads, {launch.shared_bytes} bytes"
    return row(
        limit.cause if limit is not None else Cause.PENDING_ERROR,
        Verdict.INCONCLUSIVE,
        NAME,
        f"the driver answered {refusal.name} ({refusal.sentence}) to a launch of {name}{at}: "
        + (limit.what if limit is not None else f"{size}, and no limit that is known is exceeded"),
        "other launches were refused as well"
        if is_told
        else "the program did not end by that answer: it may have tried another way",
        would_refute="a launch of that size that the driver makes",
        kernel=name,
    )


def _last_seq(case: Case) -> int:
    """The driver's calls are counted by themselves: what it refused comes behind what is told."""
    return max((event.seq for event in case.bundle.events), default=0)


# -- where the GPU stopped ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stop:
    """A warp at fault in a launch that the driver recorded."""

    case: Case
    warp: GpuWarp
    access: GpuAccess
    sight: DriverSight
    frame: GpuFrame | None
    told: str

    @property
    def addresses(self) -> list[int]:
        """Those of its lanes, the lowest first; empty where registers hold none any more."""
        return sorted(self.access.addresses.values()) if self.access.known_bits == _WHOLE else []

    def addresses_by(self, pointer: Parameter) -> list[int]:
        """The same, as they would be in this run, made of that pointer."""
        moved = (self.sight.here(address, pointer) for address in self.addresses)
        return [address for address in moved if address is not None]

    @property
    def made_of(self) -> list[Parameter]:
        """What may be an address and goes into the one at fault, by the machine code."""
        return self._made_of(self.sight.parameters)

    def _made_of(self, parameters: Sequence[Parameter]) -> list[Parameter]:
        return [
            parameter
            for parameter in parameters
            if parameter.may_point
            and any(parameter.offset <= at < parameter.offset + 8 for at in self.access.parameters)
        ]

    @property
    def pointer(self) -> Parameter | None:
        """The one of them that points into known memory; None unless it is one."""
        pointing = [parameter for parameter in self.made_of if parameter.region is not None]
        return pointing[0] if len(pointing) == 1 and self._is_sure(pointing[0]) else None

    def _is_sure(self, parameter: Parameter) -> bool:
        """Whether each launch that it may have been has the same for a parameter."""
        return all(parameter in parameters for parameters in self.sight.others)

    @property
    def null(self) -> Parameter | None:
        """The one of them that is null, where no other can be the pointer: none points anywhere,
        and nothing that was loaded has the size of an address."""
        made_of = self.made_of
        nulls = [p for p in made_of if not p.value and self._is_sure(p)]
        if self.access.is_of_loaded or any(parameter.region for parameter in made_of):
            return None
        return nulls[0] if len(nulls) == 1 else None


def _claims_of_stops(case: Case, run: DriverRun) -> Iterator[Claim]:
    for stop in case.bundle.gpu_stops:
        at = _stop_of(case, stop)
        if at is None:
            continue
        claim = _claim_of_misaligned(at) or _claim_of_null(at)
        claim = claim or _claim_of_freed(at, run) or _claim_of_outside(at, run)
        yield claim or _claim_left_open(at)
        return
    if not any(stop.exception for stop in case.bundle.gpu_stops):
        yield from _claim_of_failed(case, run)


def _claim_of_failed(case: Case, run: DriverRun) -> Iterator[Claim]:
    """Without a dump: the launch that failed while each was waited for, and what it was given."""
    launch = run.failed_launch
    kernel = run.kernel_of(launch) if launch is not None else None
    if launch is None or kernel is None or not launch_blocking(case.bundle.environment):
        return
    if any(kernel.symbol == use.launch.kernel for use in case.launches):
        return  # of Triton's the replay knows more
    name = kernel.name or kernel.symbol
    at = f" at {launch.site}" if launch.site else ""
    code = next((r.name for r in run.refusals if r.seq == launch.seq), f"error {launch.code}")
    given = list(parameters_of(case, run, kernel.parameters, launch.data))
    freed = [each for each in given if each.region is not None and each.region.is_freed]
    only = freed[0] if len(freed) == 1 else None
    shown = [f"{each.name} points into {_where_text(each)}" for each in given if each.region]
    yield row(
        Cause.USE_AFTER_FREE if only is not None else Cause.ACCESS_OUTSIDE,
        Verdict.INCONCLUSIVE,
        NAME,
        f"{name}, launched{at}, failed with {code} while each launch was waited for",
        *shown,
        "no core dump says which address it used, so no parameter is proven to be at fault",
        would_refute="another address at which the GPU stopped",
        kernel=name,
        argument=only.name if only is not None else None,
    )


def _where_text(parameter: Parameter) -> str:
    region = parameter.region
    assert region is not None
    freed = f", freed{f' at {region.freed_site}' if region.freed_site else ''}"
    return f"{region.what}{_maker_text(region)}{freed if region.is_freed else ''}"


def _stop_of(case: Case, stop: GpuStop) -> _Stop | None:
    warp = stop.faulting
    grid = grid_of(stop, warp) if warp is not None else None
    sight = sight_of(case, stop)
    if warp is None or warp.access is None or sight is None or sight.is_triton:
        return None
    if not (stop.exception or warp.exception):
        return None
    found = driver_sight(case, stop, warp, grid)
    if found is None or any(warp.symbol == use.launch.kernel for use in case.launches):
        return None  # of Triton's the replay knows more
    return _Stop(case, warp, warp.access, found, own_frame(case, warp, None), sight_text(sight))


def _claim_of_misaligned(at: _Stop) -> Claim | None:
    """A pointer that is no multiple of what is read through it at a time."""
    width, pointer = at.access.width_bytes, at.pointer
    if "misaligned" not in f"{at.told} {at.warp.exception}" or not width or pointer is None:
        return None
    if pointer.value % width == 0:
        return None
    rest = pointer.value % width
    return _root(
        at,
        Cause.MISALIGNMENT,
        pointer,
        f"{pointer.name} ({_region_text(pointer)}) is {pointer.value:#x}, no multiple of the "
        f"{width} bytes that are {_verb_of(at)} at a time",
        _Mend(
            f"Pass an address that is a multiple of {width}: this one lies {rest} bytes behind one",
            f"the address of a multiple of {width}",
            f"the same test holds for {pointer.value - rest:#x} and not for {pointer.value:#x}",
        ),
        "an access of that width through that address that goes well",
    )


def _claim_of_null(at: _Stop) -> Claim | None:
    pointer, addresses = at.null, at.addresses
    if pointer is None or (addresses and addresses[0] >= NULL_BYTES):
        return None
    where = f"{addresses[0]:#x} is {_verb_of(at)} through it" if addresses else _access_text(at)
    return _root(
        at,
        Cause.NULL_POINTER,
        pointer,
        f"{pointer.name} is null, and {where}",
        _Mend(
            f"Pass memory for {pointer.name}, or do not launch",
            f"memory for {pointer.name}",
            "no other parameter that may be an address is in this one, and at null there is no "
            "memory",
        ),
        "another parameter in the address",
    )


def _claim_of_freed(at: _Stop, run: DriverRun) -> Claim | None:
    """Memory that the driver had taken back, and that a parameter still points into."""
    pointer = at.pointer
    region = pointer.region if pointer is not None else None
    if pointer is None or region is None or not region.is_freed:
        return None
    addresses = at.addresses_by(pointer)
    inside = [address for address in addresses if region.first <= address < region.past]
    if addresses and (not inside or _is_there(run, inside[0])):
        return None
    where = f"{inside[0]:#x}" if inside else f"{pointer.value:#x}"
    return _root(
        at,
        Cause.USE_AFTER_FREE,
        pointer,
        f"{pointer.name} points into {region.what}{_maker_text(region)}, which was freed"
        f"{f' at {region.freed_site}' if region.freed_site else ''}",
        _Mend(
            "Free it once the last launch that uses it has ended",
            f"{region.what} not freed",
            f"{where} lies in it, and in nothing that the driver gave since",
        ),
        "memory at that address that is there",
        Culprit(region.freed_site, "frees it") if region.freed_site else None,
    )


def _claim_of_outside(at: _Stop, run: DriverRun) -> Claim | None:
    """An address outside of what its pointer points into, and in nothing that is there."""
    pointer = at.pointer
    region = pointer.region if pointer is not None else None
    if pointer is None or region is None or region.is_freed:
        return None
    addresses = at.addresses_by(pointer)
    if not addresses:
        return _claim_of_somewhere(at, pointer, region)
    outside = [address for address in addresses if not region.first <= address < region.past]
    gone = [address for address in outside if not _is_there(run, address)]
    if not gone:
        return None
    address = gone[0] if gone[0] < region.first else gone[-1]
    far = address - region.past if address >= region.past else region.first - address
    side = "behind its end" if address >= region.past else "before its start"
    name = pointer.name
    what = f"{name} points into {region.what}{_maker_text(region)}"
    return _root(
        at,
        Cause.ACCESS_OUTSIDE,
        pointer,
        f"{name}, {region.what}{_maker_text(region)}: {address:#x} is {_verb_of(at)}, {far} bytes "
        f"{side}",
        _Mend(
            _fix_of(at, pointer, region),
            f"an address inside {region.what}",
            f"{what}: the same test, {region.first:#x} <= address < {region.past:#x}, holds for "
            f"each address in it, and not for {address:#x}",
        ),
        "memory at that address, or another parameter in it",
    )


def _claim_of_somewhere(at: _Stop, pointer: Parameter, region: KnownMemory) -> Claim | None:
    """An access that left its memory, for that is there; how far is not known any more."""
    if "illegal address" not in f"{at.told} {at.warp.exception}":
        return None
    name = pointer.name
    return _root(
        at,
        Cause.ACCESS_OUTSIDE,
        pointer,
        f"{name}, {region.what}{_maker_text(region)}: memory outside of it is {_verb_of(at)}; how "
        "far, the registers do not tell any more",
        _Mend(
            _fix_of(at, pointer, region),
            f"an address inside {region.what}",
            f"{region.first:#x} to {region.past:#x} was there at the end, so an address in it is "
            "none at which a GPU stops",
        ),
        "another parameter in the address",
    )


def _fix_of(at: _Stop, pointer: Parameter, region: KnownMemory) -> str:
    text = at.frame.text if at.frame is not None else ""
    if text:
        return f"Keep what `{text}` reaches inside the {region.num_bytes} bytes of {pointer.name}"
    return f"Keep what is {_verb_of(at)} through {pointer.name} inside its {region.num_bytes} bytes"


def _access_text(at: _Stop) -> str:
    return f"memory is {_verb_of(at)} through it"


def _is_there(run: DriverRun, address: int) -> bool:
    """Whether an address lies in memory that the driver gave and has not taken back."""
    region = driver_memory(run, address)
    return region is not None and not region.is_freed


def _claim_left_open(at: _Stop) -> Claim:
    addresses = at.addresses
    shown = f"{addresses[0]:#x} to {addresses[-1]:#x}" if addresses else "not in registers any more"
    known = "" if at.pointer is None else f"; the code makes them of {at.pointer.name}"
    # That there is nothing is certain, as where a sanitizer says so, which knows no more of it.
    is_outside = "illegal address" in f"{at.told} {at.warp.exception}"
    return row(
        Cause.ACCESS_OUTSIDE,
        Verdict.CONFIRMED if is_outside else Verdict.INCONCLUSIVE,
        NAME,
        at.told,
        f"launched at {at.sight.site or 'a line that is not known'}; the addresses of the warp are "
        f"{shown}{known}",
        "which parameter they belong to, and how far outside they are, does not follow",
        would_refute="a parameter that the machine code makes the address of",
        kernel=at.sight.kernel,
    )


@dataclass(frozen=True, slots=True)
class _Mend:
    """What makes it right, the thing as it is then, and which test shows that it is."""

    fix: str
    corrected: str
    green: str


def _root(
    at: _Stop,
    cause: Cause,
    parameter: Parameter,
    sentence: str,
    mend: _Mend,
    would_refute: str,
    culprit: Culprit | None = None,
) -> Claim:
    frame = at.frame
    launched = f"launched at {at.sight.site}; " if at.sight.site else ""
    made_of = f"{launched}the machine code makes the address of {parameter.name}"
    root = RootCause(
        cause=cause,
        sentence=f"{at.sight.kernel}: {sentence}",
        fix=mend.fix,
        proof=Proof(f"{at.told}; {made_of}; {sentence}", mend.corrected, mend.green),
        kernel=at.sight.kernel,
        argument=parameter.name,
        tensor=parameter.region.what if parameter.region is not None else None,
        file=frame.file if frame is not None else None,
        line=frame.line if frame is not None else None,
        expression=frame.text if frame is not None and frame.text else None,
        launched_at=at.sight.site,
        culprit=culprit,
    )
    return proven(root, NAME, (_OPEN,), would_refute, _last_seq(at.case))


def _verb_of(at: _Stop) -> str:
    verbs = {"load": "read", "store": "written", "atomic": "changed"}
    return verbs.get(at.access.operation, "accessed")


def _maker_text(region: KnownMemory) -> str:
    return f", made at {region.made_at}" if region.made_at else ""


def _region_text(parameter: Parameter) -> str:
    return parameter.region.what if parameter.region is not None else f"{parameter.value:#x}"
