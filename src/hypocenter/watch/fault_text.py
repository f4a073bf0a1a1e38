"""What drivers, runtimes and our own errors say when a program dies, read from its stderr.

Formats: AMD's page fault line is of ROCR-Runtime (runtime.cpp, VMFaultHandler), that of a queue
which was given up of CLR (rocdevice.cpp, callbackQueue), the sentences of
CUDA and HIP by cudaGetErrorString and hipGetErrorString, stacks by Python's faulthandler, Xid lines
by NVIDIA's kernel module, `page fault` blocks by amdgpu (gmc_v9_0.c and its like). Reports of
compute-sanitizer have the two forms that versions of it write.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterator, Sequence

import msgspec

from hypocenter.base.errors import EXIT_ERROR, EXIT_FAULT, EXIT_OK, EXIT_USAGE, ErrorKind
from hypocenter.base.refusals import CaptureError, NoCode
from hypocenter.base.wording import signal_name
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.gpu_stop import SanitizerReport
from hypocenter.record.runtime_text import kind_of_text
from hypocenter.watch.device_dump import PREFIX
from hypocenter.watch.launcher_lines import without_prefixes
from hypocenter.watch.refusal_text import ToldRefusal, refused_in

MAX_MESSAGE_CHARS = 2000
MAX_STACK_CHARS = 20_000
#: Threads whose places are kept.
MAX_WAITING = 16
#: What both vendors' memory management tells an address by.
PAGE_BYTES = 4096

_AMD = re.compile(
    r"Memory access fault by GPU node-\d+ \(Agent handle: [^)]*\) on address "
    r"(0x[0-9a-fA-F]{1,16}|\(nil\))\. Reason: ([^\n]{0,300})"
)
#: A line of CLR's (rocdevice.cpp) beside it. It goes through all queues: a kernel that it names was
#: under way, and may not be the one that faulted.
_AMD_CLR = re.compile(
    r"Memory Fault Error \[(?:[^\]\n]{0,200}?faulting addr: ?(0x[0-9a-fA-F]{1,16}),\s{1,8})?"
    r"[^\]\n]{0,200}?kernel: ([^\n]{1,1000})\]"
)
_AMD_HANG = re.compile(r"HW Exception by GPU node-\d+ [^\n]{0,200}reason ?:([^\n]{0,200})")
_AMD_QUEUE = re.compile(
    r"Queue (?:0x[0-9a-fA-F]{1,16} aborting with error ?: ?|error - )"
    r"(HSA_STATUS_ERROR\w{0,60})(?:: ([^\n]{1,300}))?"
)
_OURS = re.compile(
    r"(?:^hypo: |^error: |^hypocenter\.errors\.DeviceFault: )((?:cuda|hip|sim)(?::\w{1,30})?): (?:"
    r"([^\n]{1,600}?) \(reported at ([^\n]{1,300}), caused by a launch before it\)"
    r"|(\w+Error\w* \(\d+\): [^()\n]{1,300}|[^()\n]{1,300}) \(([^\n]{1,300}?)\)"
    r")(?:;[^\n]{0,200})?$",
    re.M,
)
_BAD_LOGITS = re.compile(
    r"^[^\n]{0,600}logits row \d+: (?:\d+ of \d+ values are NaN|all \d+)[^\n]*", re.M
)
_RUNTIME = re.compile(
    r"^[^\n]{0,300}?\b(CUDA|HIP|ROCm|Triton) [Ee]rror(?: \[(?:CUDA|HIP)\])?:? ?([^\n]{1,400})", re.M
)
_DEVICE_ASSERT = re.compile(r"^[^\n]{0,400}Assertion `[^\n]{0,300}` failed\.?", re.M)
_REFUSED = re.compile(r"^(?:hypo|error): ([^\n]{1,2000})$", re.M)
_EXCEPTION = re.compile(
    r"^(?:\w+\.)*(\w*(?:Error|Exception|Fault|Rejected)): ([^\n]{0,1000})", re.M
)
_XID = re.compile(r"NVRM: Xid [^\n]*?pid=\'?(\d+)[^\n]*?faulted @ (0x[0-9a-fA-F_]+)")
_ACCESS = re.compile(r"ACCESS_TYPE_\w*?(READ|WRITE|ATOMIC)")
_AMDGPU_ADDRESS = re.compile(r"(?:in page starting at address|at page|at address) (0x[0-9a-fA-F]+)")
_AMDGPU_PID = re.compile(r"\bpid[: ]+(\d+)")

#: How a call is told of that launched a kernel.
_LAUNCH = re.compile(r"(?:launch of |Kernel ')(\w+)")
#: Sentences about a launch that was ended: of ours, of CUDA (702).
_ENDLESS = ("the launch did not finish", "the launch timed out")

#: What compute-sanitizer says of an access: a head, and below it a few lines in any order.
MEMCHECK_NAME = "compute-sanitizer"
_MEMCHECK_OPERATIONS = {"read": "load", "write": "store", "atomic": "atomic"}
_HEAD = re.compile(
    r"^=+ +Invalid __(?P<space>\w+)__ (?P<access>read|write|atomic) of size (?P<bytes>[\d,]{1,9})",
    re.M,
)
_AT_KERNEL = re.compile(
    r"^=+ +at (?P<kernel>[^\n]{1,400}?)\+0x[0-9a-f]+(?: in (?P<place>[^\n]+))?$"
)
_AT_OFFSET = re.compile(r"^=+ +at 0x[0-9a-f]+ in (?P<place>[^\n]+):(?P<kernel>[^:\n]{1,400})$")
_PLACE = re.compile(r"^(?P<file>.+):(?P<line>\d{1,9})$")
_BY = re.compile(r"^=+ +by thread \(([\d,]+)\) in block \(([\d,]+)\)")
_ADDRESS = re.compile(r"^=+ +(?:Address|Access to) (0x[0-9a-f]{1,16}) is ([^\n]{1,100})$")
_NEAR = re.compile(
    r"^=+ +and is (?P<far>[\d,]{1,24}) bytes (?P<side>after|before) the nearest allocation at "
    r"(?P<base>0x[0-9a-f]{1,16})"
)

#: Signals by which someone ends a program on purpose.
ENDED_BY_HAND = frozenset({signals.SIGINT, signals.SIGTERM, signals.SIGHUP, signals.SIGPIPE})
#: Signals that end a program which did something wrong, or that had to be ended.
_OF_A_FAULT = frozenset(
    {
        signals.SIGSEGV,
        signals.SIGABRT,
        signals.SIGBUS,
        signals.SIGILL,
        signals.SIGFPE,
        signals.SIGKILL,
        signals.SIGTRAP,
        signals.SIGSYS,
    }
)
#: What a shell adds to the number of the signal that ended its last command.
_SHELL_ADDS = 128
#: How faulthandler begins; it writes to stderr of a process that dies of a fault.
_FATAL = re.compile(r"^Fatal Python error: (.*)$", re.M)


def signal_below(exit_code: int | None) -> int | None:
    """The signal of a fault that a shell tells of by its own exit code, such as 139 for SIGSEGV."""
    number = (exit_code or 0) - _SHELL_ADDS
    return number if number in _OF_A_FAULT else None


def is_by_hand(exit_code: int | None, signal: int | None) -> bool:
    """Whether someone ended the program on purpose, as far as its end tells."""
    return (signal or (exit_code or 0) - _SHELL_ADDS) in ENDED_BY_HAND


def fatal_error(stderr: str) -> str:
    """What Python said when a process died of a signal, such as `Segmentation fault`."""
    found = _FATAL.search(without_prefixes(stderr))
    return found[1] if found else ""


def fault_in(stderr: str, exit_code: int | None, signal: int | None) -> FaultRecord:
    """How a process ended, from what it wrote and how it left; kind none when nothing was wrong."""
    stderr = without_prefixes(stderr)
    found = _spoken(stderr)
    if signal is not None and signal not in ENDED_BY_HAND:
        found = msgspec.structs.replace(
            found or FaultRecord(kind="crash", message=f"ended by {_signal_text(signal)}"),
            kind="crash",
        )
        if signal == signals.SIGKILL and not found.error:
            found = _with_traceback(found, stderr)
    if found is None and exit_code not in (None, 0):
        found = _last_words(stderr)
    if found is None:
        found = FaultRecord(kind="none", message="")
    stack = stack_in(stderr) if found.kind != "none" else ""
    return msgspec.structs.replace(found, signal=signal, exit_code=exit_code, stack=stack)


def _with_traceback(fault: FaultRecord, stderr: str) -> FaultRecord:
    """The same with the exception that a process wrote before SIGKILL came, if one did.

    Who starts processes ends them all when one fails: the signal then says nothing of why.
    """
    said = _TRACEBACK.findall(stderr)
    if not said:
        return fault
    frames, exception = said[-1]
    at = _FRAME.findall(frames)
    place = f"{at[-1][2]} ({at[-1][0]}:{at[-1][1]})" if at else ""
    told = exception[:MAX_MESSAGE_CHARS]
    message = f"a process below it ended with {told!r}, and then {fault.message}"
    return msgspec.structs.replace(fault, call=place, error=told, message=message)


def is_fault(stderr: str, exit_code: int | None, signal: int | None) -> bool:
    """Whether that end is one to examine, and no wrong usage or Ctrl-C."""
    if signal is not None:
        return signal not in ENDED_BY_HAND
    if exit_code in (None, EXIT_OK, EXIT_USAGE):
        return False
    stderr = without_prefixes(stderr)
    is_refusal = exit_code == EXIT_ERROR and _REFUSED.search(stderr) is not None
    return exit_code == EXIT_FAULT or is_refusal or _spoken(stderr) is not None


def _signal_text(number: int) -> str:
    """A signal's name, and what it means for a program that used a GPU."""
    name = signal_name(number)
    meaning = {
        "SIGKILL": " (from outside: the kernel when memory ran out, or a person)",
        "SIGSEGV": " (an access of the host's own memory that is not there)",
        "SIGABRT": " (a library or driver gave up)",
        "SIGBUS": " (a mapped file became shorter or could not be read, or memory is broken)",
    }
    return name + meaning.get(name, "")


def stack_in(stderr: str) -> str:
    """The last stacks that faulthandler wrote, or the last traceback."""
    stderr = without_prefixes(stderr)
    starts = [match.start() for match in re.finditer(r"^Fatal Python error: ", stderr, re.M)]
    if not starts:
        starts = [match.start() for match in re.finditer(r"^Traceback \(most recent", stderr, re.M)]
    return stderr[starts[-1] :][:MAX_STACK_CHARS].rstrip() if starts else ""


#: A traceback of a process, as Python writes it: its frames, and the exception.
_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):\n((?:[ \t][^\n]*\n)+)(\w[^\n]*)$", re.M
)
_FRAME = re.compile(r'^  File "[^"\n]*?([^"/\n]+)", line (\d+),? in ([^\n]+)$', re.M)


def innermost_call(stderr: str) -> str:
    """Function and place where the thread stood that faulthandler names first; "" without one."""
    return _innermost(stack_in(stderr).partition("Current thread ")[2])


def waiting_calls(stderr: str) -> tuple[str, ...]:
    """Function and place of each thread of each process whose stacks faulthandler wrote."""
    text = without_prefixes(stderr)
    threads = re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.M)[1:]
    # The main thread comes last in what faulthandler writes.
    calls = dict.fromkeys(filter(None, map(_innermost, reversed(threads))))
    return tuple(calls)[:MAX_WAITING]


def _innermost(stack: str) -> str:
    found = _FRAME.search(stack)
    return f"{found[3]} ({found[1]}:{found[2]})" if found else ""


#: Of VM_L2_PROTECTION_FAULT_STATUS: whether it was a write.
_STATUS_WRITES = 18


def with_kernel_log(fault: FaultRecord, lines: Sequence[str], pid: int | None) -> FaultRecord:
    """The record with the address that the kernel's log gives for this process, if it lacks one."""
    if fault.address is not None or fault.kind == "none" or pid is None:
        return fault
    for number, line in enumerate(lines):
        if match := _XID.search(line):
            if match[1] == str(pid):
                access = _ACCESS.search(line)
                return msgspec.structs.replace(
                    fault,
                    address=int(match[2].replace("_", ""), 16),
                    address_bytes=PAGE_BYTES,
                    access=access[1].lower() if access else fault.access,
                )
        elif line.startswith(f"{PREFIX}process_name: "):
            made = _with_device_dump(fault, " ".join(lines[number : number + 12]), pid)
            if made is not None:
                return made
        elif "page fault" in line and "amdgpu" in line:
            block = " ".join(lines[number : number + 12])
            owner, address = _AMDGPU_PID.search(block), _AMDGPU_ADDRESS.search(block)
            if owner and address and owner[1] == str(pid):
                access = re.search(r"\bRW: 0x([01])", block)
                return msgspec.structs.replace(
                    fault,
                    address=int(address[1], 16),
                    address_bytes=PAGE_BYTES,
                    access=("read", "write")[int(access[1])] if access else fault.access,
                )
    return fault


def _with_device_dump(fault: FaultRecord, block: str, pid: int) -> FaultRecord | None:
    """The same by a devcoredump of this process. One without a fault has zeros in its place."""
    owner, address, status = (
        re.search(pattern, block)
        for pattern in (
            r"process_name: .{0,64}? PID: (\d{1,10})",
            r"Faulty page starting at address: 0x([0-9a-f]{1,16})",
            r"Protection fault status register: ?0x([0-9a-f]{1,8})",
        )
    )
    if owner is None or address is None or status is None or owner[1] != str(pid):
        return None
    bits = int(status[1], 16)
    if not bits:
        return None
    access = "write" if bits >> _STATUS_WRITES & 1 else "read"
    page = int(address[1], 16)
    return msgspec.structs.replace(fault, address=page, address_bytes=PAGE_BYTES, access=access)


def _under_way(stderr: str) -> str:
    """The kernels that CLR names, with the doubt that belongs to them; "" where it names none."""
    named = dict.fromkeys(match[2].strip() for match in _AMD_CLR.finditer(stderr))
    known = [name for name in named if name != "<unknown>"][:4]
    if not known:
        return ""
    return f" (the runtime names {', '.join(known)}: under way, not surely the kernel that faulted)"


def _spoken(stderr: str) -> FaultRecord | None:
    """What a driver, a runtime or the engine said of a fault."""
    if match := _AMD.search(stderr):
        page = 0 if match[1] == "(nil)" else int(match[1], 16)
        return FaultRecord(
            kind="crash",
            message=match[0] + _under_way(stderr),
            error=match[2].strip(),
            address=page,
            address_bytes=PAGE_BYTES,
            access="write" if "write" in match[2].lower() else "",
            error_kind=ErrorKind.FOUND_LATER,
        )
    if match := _AMD_CLR.search(stderr):
        return FaultRecord(
            kind="crash",
            message=f"Memory Fault Error{_under_way(stderr)}",
            error="memory fault",
            address=int(match[1], 16) if match[1] else None,
            address_bytes=PAGE_BYTES,
            error_kind=ErrorKind.FOUND_LATER,
        )
    if match := _AMD_HANG.search(stderr):
        return FaultRecord(kind="hang", message=match[0], error=match[1].strip())
    if match := _AMD_QUEUE.search(stderr):
        return FaultRecord(
            kind="crash",
            message=match[0],
            error=f"{match[1]}: {(match[2] or '').partition(' code: ')[0].strip()}".rstrip(": "),
            error_kind=ErrorKind.FOUND_LATER,
        )
    if matches := list(_OURS.finditer(stderr)):
        match = matches[0]  # what follows a first fault is its echo
        reason, call = match[2] or match[4], match[3] or match[5]
        is_endless = any(words in reason for words in _ENDLESS)
        launched = _LAUNCH.search(call)
        return FaultRecord(
            kind="hang" if is_endless else "error",
            message=_show(match),
            call=call,
            kernel=launched[1] if launched else "",
            error=reason,
            error_kind=ErrorKind.ENDLESS if is_endless else kind_of_text(reason),
            is_asynchronous=match[3] is not None,
        )
    if match := _BAD_LOGITS.search(stderr):
        return FaultRecord(kind="nonfinite", message=_show(match), is_asynchronous=False)
    if refused := refused_in(stderr):
        return FaultRecord(
            kind="error",
            message=refused.message[:MAX_MESSAGE_CHARS],
            error=_error_of(refused),
            error_kind=refused.error_kind,
            kernel=refused.kernel,
            call=refused.call,
            is_statement=bool(refused.call),
            site=refused.site,
            refusal=refused.refusal,
            is_asynchronous=refused.error_kind is ErrorKind.FOUND_LATER,
        )
    if match := _DEVICE_ASSERT.search(stderr):
        return FaultRecord(
            kind="error",
            message=match[0],
            error="device-side assert",
            error_kind=ErrorKind.FOUND_LATER,
        )
    if match := _RUNTIME.search(stderr):
        return FaultRecord(
            kind="error",
            message=_show(match),
            error=match[2].strip(),
            error_kind=kind_of_text(match[2]),
        )
    return None


def _error_of(refused: ToldRefusal) -> str:
    """What the runtime said, without the facts that have fields of their own."""
    if refused.error_kind is ErrorKind.FOUND_LATER:
        return "device-side assert"
    refusal = refused.refusal
    return refusal.sentence if isinstance(refusal, NoCode | CaptureError) else str(refusal)


def _last_words(stderr: str) -> FaultRecord | None:
    for pattern in (_REFUSED, _EXCEPTION):
        if matches := list(pattern.finditer(stderr)):
            message = _show(matches[-1])
            return FaultRecord(
                kind="error",
                message=message,
                is_asynchronous=False,
                error_kind=kind_of_text(message),
            )
    lines = [line for line in stderr.splitlines() if line.strip()]
    message = lines[-1][:MAX_MESSAGE_CHARS] if lines else "it said nothing"
    return FaultRecord(kind="error", message=message, is_asynchronous=False)


def _show(match: re.Match[str]) -> str:
    text = match[0].removeprefix("hypo: ").removeprefix("error: ")
    return text.removeprefix("hypocenter.base.errors.")[:MAX_MESSAGE_CHARS]


def num_heads_in(text: str) -> int:
    """How many accesses compute-sanitizer tells of, to any memory."""
    return sum(_HEAD.match(line) is not None for line in text.splitlines())


def reports_in(text: str) -> Iterator[SanitizerReport]:
    """The accesses to global memory that compute-sanitizer tells of, in its order."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        head = _HEAD.match(line)
        if head is not None and head["space"] == "global":
            yield _report(head, lines[number + 1 : number + 6])


def _report(head: re.Match[str], lines: Sequence[str]) -> SanitizerReport:
    found = {
        name: next(filter(None, (form.match(line) for line in lines for form in forms)), None)
        for name, forms in (
            ("at", (_AT_OFFSET, _AT_KERNEL)),
            ("by", (_BY,)),
            ("address", (_ADDRESS,)),
            ("near", (_NEAR,)),
        )
    }
    at, by, address, near = found["at"], found["by"], found["address"], found["near"]
    place = _PLACE.match(at["place"] or "") if at is not None else None
    far = int(near["far"].replace(",", "")) if near is not None else None
    return SanitizerReport(
        tool=MEMCHECK_NAME,
        problem=address[2] if address is not None else "wrong",
        operation=_MEMCHECK_OPERATIONS[head["access"]],
        width_bytes=int(head["bytes"].replace(",", "")),
        kernel=at["kernel"] if at is not None else "",
        file=place["file"] if place is not None else "",
        line=int(place["line"]) if place is not None else 0,
        thread=_three(by[1]) if by is not None else None,
        block=_three(by[2]) if by is not None else None,
        address=int(address[1], 16) if address is not None else None,
        near_address=int(near["base"], 16) if near is not None else None,
        near_bytes=(-far if near["side"] == "before" else far)
        if near is not None and far is not None
        else None,
    )


def _three(text: str) -> tuple[int, int, int] | None:
    numbers = [int(part[:10]) for part in text.split(",") if part.isdigit()]
    return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else None
