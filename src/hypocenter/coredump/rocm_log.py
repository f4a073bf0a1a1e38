"""Reads the log that ROCm's runtimes write with AMD_LOG_LEVEL: the launch that it ends in.

Lines of CLR, the runtime of HIP (`hip_*.cpp` for calls, `rocvirtual.cpp` for kernels), as logs of
ROCm 5.7 to 7.1 have them:

    :3:hip_module.cpp :550 : 3872 us: [pid:9 tid: 0x7f]  hipLaunchKernel ( 0x55, {32,1,1}, ... )
    :3:rocvirtual.cpp :790 : 3877 us: [pid:9 tid: 0x7f] Arg0:  x = ptr:0x7a0 obj:[0x7a0-0x7b0]
    :3:rocvirtual.cpp :883 : 3879 us: [pid:9 tid: 0x7f] Arg1:  n = val:0x1 (size:0x4)
    :3:rocvirtual.cpp :3344: 3880 us: [pid:9 tid: 0x7f] ShaderName : _Z4ropePfi
    :4:rocvirtual.cpp :1076: 3886 us: [pid:9 tid: 0x7f] ... grid=[2560, 1, 1], workgroup=[64, ...
    :3:hip_module.cpp :813 : 3891 us: [pid:9 tid: 0x7f] hipLaunchKernel: Returned hipSuccess :

Where each launch is waited for, its call returns once its kernel has ended. So the call that is
open at the end has the kernel that was under way, as far as one thread is concerned. A fault of the
GPU reaches the process a moment later than it is made, and a launch may have been begun meanwhile.
Never seen from a GPU here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hypocenter.coredump.names import source_name
from hypocenter.record.driver_run import Dims
from hypocenter.record.logged_launch import MAX_ARGUMENTS, LoggedArgument, LoggedLaunch

#: Of each file so much of its end is read, and so many files.
MAX_LOG_BYTES, MAX_LOGS = 16 << 20, 64

_LINE = re.compile(
    r"^:\d:\w{1,60}\.\w{1,4} *:\d{1,6} *: *\d{1,20}d? us:(?: *\d{1,10} *:)?"
    r"(?: *\[(?:pid: ?(\d{1,10}) *)?tid: *(?:0x)?([0-9a-f]{1,16})\])? *(.*)$"
)
_BEGUN = re.compile(r"(_{0,2}hip\w{1,80}) \( ")
_RETURNED = re.compile(r"(_{0,2}hip\w{1,80}): Returned (hip\w{1,60})")
#: What a call returns that waited for a kernel which then failed.
_FAULTS = frozenset(
    {"hipErrorIllegalAddress", "hipErrorLaunchFailure", "hipErrorLaunchTimeOut", "hipErrorAssert"}
)
_KERNEL = re.compile(r"ShaderName : (.{1,4000}?)(?:, device id : \d{1,3})?$")
_ARGUMENT = re.compile(
    r"Arg(\d{1,4}): ([^=]{0,300}) = (ptr|val):(\S{0,40})(?: obj:\[(\S{1,40})\])?"
)
_SIZES = re.compile(
    r"Dispatch Header .*? grid=\[(\d{1,10}), (\d{1,10}), (\d{1,10})\], "
    r"workgroup=\[(\d{1,10}), (\d{1,10}), (\d{1,10})\](?:.*? group_seg_size=(\d{1,10}))?"
)
#: What has a launch return when its kernel has ended: the variable, and the bit that says so.
_WAITING = (("AMD_SERIALIZE_KERNEL", 2), ("HIP_LAUNCH_BLOCKING", 1))


@dataclass(slots=True)
class _Open:
    """A call of a thread that has not returned, and the last kernel that it launched."""

    call: str
    arguments: dict[int, LoggedArgument] = field(default_factory=dict)
    kernel: str = ""
    grid: Dims = (0, 0, 0)
    block: Dims = (0, 0, 0)
    shared_bytes: int = 0


def waiting_variable(environment: Mapping[str, str]) -> str:
    """`NAME=value` of what has each launch waited for; "" where nothing has."""
    for name, bit in _WAITING:
        value = environment.get(name, "")
        if value.isdigit() and int(value[:9]) & bit:
            return f"{name}={value}"
    return ""


def launch_at_end(
    paths: Sequence[Path], stderr: str, environment: Mapping[str, str]
) -> LoggedLaunch | None:
    """The launch that the logs of some processes end in; None unless it is one alone.

    Where no log has a line, one is looked for in stderr, which has no prefixes of launchers any
    more.
    `environment` is that of the processes: without a wait for each launch nothing is told.
    """
    variable = waiting_variable(environment)
    if not variable:
        return None
    texts = [text for path in paths[:MAX_LOGS] if (text := _end_of(path))]
    texts = texts or [stderr]
    found = [launch for text in texts for launch in _open_in(text, variable)]
    return found[0] if len(found) == 1 else None


def _end_of(path: Path) -> str:
    """The last lines of a file; "" of one that cannot be read."""
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path, flags), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - MAX_LOG_BYTES, 0))
            return file.read(MAX_LOG_BYTES).decode(errors="replace")
    return ""


def _open_in(text: str, variable: str) -> Iterator[LoggedLaunch]:
    """What each thread of each process was launching when its log ended.

    A log without threads is one of a single thread, as far as can be told; where calls of several
    lie in it, their returns do not fit, and nothing is told.
    """
    threads: dict[tuple[str, str], list[_Open]] = {}
    num_launches: dict[str, int] = {}
    failed: dict[str, LoggedLaunch] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        process, thread, said = found[1] or "", found[2] or "", found[3]
        calls = threads.setdefault((process, thread), [])
        if begun := _BEGUN.match(said):
            calls.append(_Open(begun[1]))
        elif returned := _RETURNED.match(said):
            call = _close(calls, returned[1])
            if call is not None and call.kernel and returned[2] in _FAULTS:
                launch = _launch(call, variable, num_launches[process], returned[2])
                failed.setdefault(process, launch)
        elif calls and _note(calls[-1], said):
            num_launches[process] = num_launches.get(process, 0) + 1
    yield from failed.values()
    for (process, _), calls in threads.items():
        if process not in failed and calls and calls[-1].kernel:
            yield _launch(calls[-1], variable, num_launches[process])


def _close(calls: list[_Open], name: str) -> _Open | None:
    """The call of that name, which has returned with all that it had called; None without one."""
    for number in range(len(calls) - 1, -1, -1):
        if calls[number].call == name:
            call = calls[number]
            del calls[number:]
            return call
    return None


def _note(call: _Open, said: str) -> bool:
    """Keep what a line tells of a launch; whether it names the kernel."""
    if argument := _ARGUMENT.match(said):
        number = int(argument[1])
        if number == 0:
            call.arguments.clear()
        if len(call.arguments) < MAX_ARGUMENTS:
            call.arguments[number] = _argument(number, argument)
    elif kernel := _KERNEL.match(said):
        call.kernel, call.grid, call.block, call.shared_bytes = kernel[1], (0,) * 3, (0,) * 3, 0
        return True
    elif (sizes := _SIZES.search(said)) and call.kernel:
        x, y, z, *block = map(int, sizes.groups()[:6])
        if all(block):
            blocks = [-(-size // own) for size, own in zip((x, y, z), block, strict=True)]
            call.grid = blocks[0], blocks[1], blocks[2]
            call.block = block[0], block[1], block[2]
            call.shared_bytes = int(sizes[7] or 0)
    return False


def _argument(number: int, found: re.Match[str]) -> LoggedArgument:
    first, _, past = (found[5] or "").partition("-")
    return LoggedArgument(
        number=number,
        # A type may stand before it; of most kernels both are empty.
        name=found[2].split()[-1] if found[2].split() else "",
        value=_number(found[4]),
        is_address=found[3] == "ptr",
        first=_number(first),
        past=_number(past),
    )


def _number(text: str) -> int | None:
    """A number as C prints it; None where there is none."""
    if text == "(nil)":
        return 0
    text = text.removeprefix("0x0x") if text.startswith("0x0x") else text
    if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text):
        return int(text, 16)
    return int(text) if re.fullmatch(r"-?[0-9]{1,20}", text) else None


def _launch(call: _Open, variable: str, num_launches: int, outcome: str = "") -> LoggedLaunch:
    return LoggedLaunch(
        kernel=source_name(call.kernel),
        call=call.call,
        outcome=outcome,
        variable=variable,
        num_launches=num_launches,
        grid=call.grid,
        block=call.block,
        shared_bytes=call.shared_bytes,
        arguments=tuple(call.arguments[number] for number in sorted(call.arguments)),
    )
