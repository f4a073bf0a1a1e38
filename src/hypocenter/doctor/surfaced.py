"""In words: how a fault showed, where it was reported, and why there of all places."""

from __future__ import annotations

import signal

from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import RootCause
from hypocenter.doctor.rungs.driver.logged_launch import launch_text
from hypocenter.record.events import OUTSIDE_PLANS, Called, CodePlace, Place
from hypocenter.record.fault_record import FaultRecord, MemoryKill
from hypocenter.settings.environment import launch_blocking

#: What a driver does not send.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

#: Who reported, where the cause itself says why it was that one.
_EARLIER = "at {call}, which asked the runtime and got the error of an earlier call"
_BY_CAUSE = {
    Cause.CARD_HARDWARE: "at {call}, which met a card that had failed; what was under way is "
    "innocent",
    Cause.PENDING_ERROR: _EARLIER,
    Cause.LATE_OUT_OF_MEMORY: _EARLIER,
    Cause.LOST_RANK: "by the first rank, whose {call} ended when the other process did",
}


def symptom(case: Case) -> str:
    """One sentence: how the run ended, and how it did before, when it was run as it is."""
    now, before = case.bundle.fault, case.bundle.fault_before
    if before is None or before.kind == "none":
        return symptom_of(now)
    return f"run as it is: {symptom_of(before)}; run again to examine it: {symptom_of(now)}"


def symptom_of(fault: FaultRecord) -> str:
    """One sentence: how a run ended that ended so."""
    message = " ".join(fault.message.split()) or fault.error or "no message"
    if fault.signal in _FROM_OUTSIDE and fault.kind == "crash" and not fault.call:
        return f"ended from outside, by {signal.Signals(fault.signal).name}: {message}"
    if fault.kind == "crash":
        ended = f", ended by signal {fault.signal}" if fault.signal else ""
        where = f" at {fault.call}" if fault.call else ""
        return f"crash{where}{ended}: {message}"
    if fault.kind == "hang":
        return f"hang: {message}"
    if fault.kind == "error":
        return f"error{f' from {fault.call}' if fault.call else ''}: {message}"
    if fault.kind == "nonfinite":
        return f"NaN or infinity: {message}"
    if fault.kind == "differs":
        return f"an answer that differs from the good run: {message}"
    if fault.exit_code:
        return f"no fault of a GPU: the run ended by itself, with exit code {fault.exit_code}"
    return "no symptom: the run ended by itself"


def describe_surface(case: Case, roots: tuple[RootCause, ...]) -> str:
    """Where the fault was reported, and why there: the interval that nobody had waited for."""
    run, call = case.bundle.driver_run, case.bundle.fault.call
    if (logged := case.bundle.logged_launch) is not None and not case.launches:
        return (
            f"with {logged.variable} each launch is waited for, and by the runtime's own log "
            f"{launch_text(logged)}"
        )
    is_refused = bool(roots) and roots[0].blames is Blame.LAUNCH and not case.launches
    if run is not None and run.refusals and is_refused:
        by = f" by {call}" if call else ""
        return f"reported{by} after a launch that the driver had refused, and not by it"
    return _describe_interval(case, roots)


def _of_launches(case: Case) -> str:
    run = case.bundle.driver_run
    if run is None or not run.num_launches:
        return "none of its launches was recorded"
    return f"{count_text(run.num_launches, 'launch', 'launches')} were recorded by the driver alone"


def _describe_interval(case: Case, roots: tuple[RootCause, ...]) -> str:
    fault = case.bundle.fault
    if fault.kind in ("none", "differs", "nonfinite"):
        return "nothing was reported by the device; the run was examined for what it left behind"
    if (variable := launch_blocking(case.bundle.environment)) and case.kind == "crash":
        return (
            f"reported at {fault.call or 'the launch'}: with {variable} each launch is waited for, "
            f"so nothing but {_last(case)} was under way"
        )
    call = fault.call or "a call that is not known"
    if told := next((_BY_CAUSE[root.cause] for root in roots if root.cause in _BY_CAUSE), ""):
        return f"reported {told.format(call=call)}"
    if fault.signal in _FROM_OUTSIDE and not fault.call:
        name = signal.Signals(fault.signal).name
        return (
            f"nowhere: {name} comes from outside and not from the driver; "
            f"{_who_killed(fault)}; what was under way need not be at fault"
        )
    if case.kind == "error" and fault.is_statement:
        return f"the program itself ended at {call}, after {_last(case)}"
    if case.kind == "error" and (raised := _raised_at(case)) is not None:
        made = count_text(len(case.launches), "launch", "launches")
        return f"the engine's own Python ended it, at {_place_text(raised)}, after {made}"
    if case.kind == "crash" and case.launches and case.launches[-1].launch.device == "interpreter":
        return (
            f"the process that ran Triton's interpreter was ended, during or after {_last(case)}: "
            "memory of the host's own was read or overwritten, which shows wherever it is used next"
        )
    if case.kind == "error":
        by = f"by {fault.call} itself, " if fault.call else ""
        return f"reported {by}{_after(case)}"
    if fault.waiting:
        threads = ", ".join(fault.waiting)
        told = (
            f"between steps and launches: threads stood at {threads}. What a GPU runs was not "
            "waited for there; look at what each of them waits for, and which of them has it"
        )
    elif fault.kind == "hang":
        told = f"the step did not end; the host was waiting in {call}"
    elif not fault.call and not fault.signal:
        told = (
            "it is not known where it was reported: the doctor did not run this program; "
            f"{_who_killed(fault)}"
        )
    elif not case.launches:
        told = (
            f"the process was ended{f' at {fault.call}' if fault.call else ''}; "
            f"{_of_launches(case)}"
        )
    elif not fault.call:
        told = "reported by the driver, which ended the process while the host went on"
    else:
        told = f"reported at {call}, which only waited"
    if not case.launches:
        return told
    why = (
        "launches run later than the host makes them, so a fault shows at whatever the host does "
        "next, and the call that shows it is innocent"
    )
    root = next((root for root in roots if root.place is not None), None)
    cause = f"the cause lies in {_place(case, root.place)}" if root and root.place else ""
    parts = (told, why if fault.kind != "hang" else "", _interval(case), cause)
    return "; ".join(part for part in parts if part)


def _raised_at(case: Case) -> CodePlace | None:
    """The innermost statement of the engine that raised what it never raises on purpose."""
    places = (place for event in case.index.events_of(Called) for place in event.raised_in)
    return next(places, None)


def _place_text(place: CodePlace) -> str:
    return f"{place.function} ({place.module}:{place.line})"


def _who_killed(fault: FaultRecord) -> str:
    """Who may have ended a process that said nothing, by what is known of the kernel's killer."""
    if fault.signal not in (None, signal.SIGKILL):
        return "a person or a supervisor sent it"
    return _KILLED[fault.memory_kill]


_KILLED = {
    MemoryKill.LOGGED: "the kernel's log says that its out-of-memory killer ended this process: "
    "give it more memory, or a smaller context (-c) or model",
    MemoryKill.COUNTED: "the kernel's out-of-memory killer ended a process of this control group "
    "while the run lasted: give it more memory, or a smaller context (-c) or model",
    MemoryKill.NOT_COUNTED: "the kernel's out-of-memory killer ended no process of this control "
    "group while the run lasted, so a person or a supervisor sent it",
    MemoryKill.UNKNOWN: "a process that ends without a word was usually ended by the kernel's "
    "out-of-memory killer (`dmesg` tells, as root), else by a person or a supervisor",
}


def _last(case: Case) -> str:
    """The launch that was made last, in words."""
    if not case.launches:
        return "no launch that was recorded"
    use = case.launches[-1]
    at = f" at {use.launch.site}" if use.launch.site else ""
    return f"launch {use.step} ({use.launch.kernel}{at})"


def _interval(case: Case) -> str:
    progress = case.bundle.progress
    if progress.submitted is None:
        return ""
    done = "nothing is known to have ended"
    if progress.completed is not None:
        done = f"everything up to {_place(case, progress.completed)} had ended"
    return f"{done}, launches up to {_place(case, progress.submitted)} had been made"


def _place(case: Case, place: Place) -> str:
    if place.plan == OUTSIDE_PLANS:
        use = next((use for use in case.launches if use.place == place), None)
        if use is not None:
            at = f" at {use.launch.site}" if use.launch.site else ""
            return f"launch {use.step} ({use.launch.kernel}{at})"
    plan = case.plan_of(place)
    text = f"step {place.step}, launch {place.launch}"
    if plan is None or not 0 <= place.launch < len(plan.launches):
        return text
    return f"{text} ({plan.launches[place.launch].kernel})"


def _after(case: Case) -> str:
    if not case.launches:
        return "before anything was launched"
    return f"after {count_text(len(case.launches), 'launch', 'launches')}"
