"""What a program that knows nothing of this package left behind: how much was seen of it, what not.

`foreign/recorder.py` wrote it; its launches belong to no plan, and each is a step of its own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hypocenter.base.wording import count_text
from hypocenter.record import ring
from hypocenter.record.driver_run import DriverRun
from hypocenter.record.events import (
    AnyEvent,
    Captured,
    Freed,
    GraphReplayed,
    Launched,
    LostLaunch,
    SourceRecord,
)
from hypocenter.record.gap import Gap, GapKind

#: Begins the name of a file that says why a process was not recorded.
NOTE = "unrecorded-"
_MAX_NOTES, _MAX_NOTE_CHARS = 8, 2000

_LIBRARIES = Gap.not_recorded(
    "kernels that are not launched through triton.jit or by torch.compile",
    "those of torch, of libraries, of CUDA and HIP sources, in graphs as well; of torch.compile "
    "those of Triton are",
)
_DEVICE_VALUES = Gap.not_recorded(
    "what tensors on the GPU held",
    "it was not copied, so a kernel that finds its way by such values was replayed with zeros "
    "there; TRITON_INTERPRET=1 and CPU tensors show those",
)
_SMALL_VALUES = Gap.not_recorded(
    "what tensors held, but for integers of up to 65536 bytes outside of captures of graphs, and "
    "for the first small launches of each kernel; the others were replayed as zeros"
)
_HOST_VALUES = Gap.not_recorded(
    "what tensors held, but for integers of up to 4096 bytes, and with --suspect for the first "
    "small launches of each kernel; the others were replayed as zeros"
)
_INTERPRETER = Gap.not_recorded(
    "a GPU", "Triton's interpreter ran the launches one program after the other on the CPU"
)
_MEMORY = Gap.not_recorded(
    "memory that no launch was given, but for what torch's allocator had at the end"
)


def launches(events: Iterable[AnyEvent]) -> list[Launched]:
    """Those of a foreign program; none for a run of this package's engine."""
    found = [event for event in events if isinstance(event, Launched)]
    return [event for event in found if event.step and not event.launch.facts]


def num_launches(run: ring.Run) -> int:
    """How many Triton launches a foreign process made, those that are told of no more as well."""
    made = launches(run.events)
    return made[-1].step if made else 0


def unseen(run: ring.Run, driver_run: DriverRun | None = None) -> Iterator[Gap]:
    """What could not be looked at; nothing of a run of this package's engine.

    `driver_run` is what the process asked of its driver, where that was watched.
    """
    made = launches(run.events)
    yield from lost_launches(run.events)
    if driver_run is not None:
        yield from _of_driver(driver_run)
    if run.plans or not made:
        return
    devices = {event.launch.device for event in made}
    is_interpreted = devices == {"interpreter"}
    is_read_back = any(device.is_read_back for device in run.devices)
    of_device = _SMALL_VALUES if is_read_back else _DEVICE_VALUES
    yield from (_INTERPRETER, _HOST_VALUES) if is_interpreted else (of_device,)
    yield from (_MEMORY,) if driver_run is not None else (_LIBRARIES, _MEMORY)
    num_lost = made[-1].step - len(made)
    if num_lost > 0:
        yield Gap.left_out(
            f"the first {num_lost} of {made[-1].step} launches",
            "the recorder keeps the last ones, and those in graphs",
        )
    yield from _never_replayed(run, made)


def lost_launches(events: Iterable[AnyEvent]) -> Iterator[Gap]:
    """Launches that were made and could not be recorded: how many of each kernel, and why."""
    last = {
        (event.kernel, event.reason): event.num for event in events if isinstance(event, LostLaunch)
    }
    for (kernel, reason), num in last.items():
        made = count_text(num, "launch", "launches")
        yield Gap(GapKind.LOST_LAUNCH, f"{made} of {kernel}", f"not recorded: {reason}")


def _of_driver(run: DriverRun) -> Iterator[Gap]:
    """What of other kernels is not known, where the driver was watched or was to be."""
    if run.why_not:
        yield Gap.not_recorded(_LIBRARIES.what, run.why_not)
    if run.num_graphs:
        yield Gap.not_recorded(
            f"kernels of {count_text(run.num_graphs, 'launch', 'launches')} of graphs one by one",
            "the driver launches a graph as a whole; those of Triton in it are recorded",
        )


def _never_replayed(run: ring.Run, made: Sequence[Launched]) -> Iterator[Gap]:
    """Graphs that took launches which did not run while they were recorded."""
    replayed = {event.graph for event in run.events if isinstance(event, GraphReplayed)}
    captured = Counter(event.graph for event in made if event.graph)
    waiting = {graph: num for graph, num in captured.items() if graph not in replayed}
    if waiting:
        yield Gap.not_examined(
            f"{count_text(sum(waiting.values()), 'launch', 'launches')} captured into "
            f"{count_text(len(waiting), 'graph')}",
            "no replay of it by torch.cuda.CUDAGraph was seen",
        )


def stale_graphs(events: Iterable[AnyEvent]) -> list[int]:
    """Graphs that were replayed over memory which had been freed, as the events tell in order."""
    gone: set[int] = set()
    watched: dict[int, tuple[int, ...]] = {}
    found: dict[int, None] = {}
    for event in sorted(events, key=lambda event: event.seq):
        if isinstance(event, Freed):
            gone.add(event.allocation)
        elif isinstance(event, Captured):
            watched[event.graph] = event.allocations
        elif isinstance(event, GraphReplayed) and gone.intersection(watched.get(event.graph, ())):
            found[event.graph] = None
    return list(found)


def notes(runs: Path) -> Iterator[Gap]:
    """Why processes below a watched folder were not recorded, as they said."""
    for path in sorted(runs.glob(f"{NOTE}*"))[:_MAX_NOTES]:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            with path.open() as file:
                text = " ".join(file.read(_MAX_NOTE_CHARS).split())
            yield Gap.not_recorded(
                f"the launches of process {path.name.removeprefix(NOTE)}",
                f"{text}; install hypocenter there",
            )


def summary(events: Sequence[AnyEvent], sources: Sequence[SourceRecord]) -> str:
    """`3 launches of 2 kernels seen`; empty when nothing of a foreign program was."""
    made = launches(events)
    if not made:
        return ""
    callees = {callee for source in sources for callee in source.callees}
    names = {source.id for source in sources if source.id not in callees}
    names |= {event.launch.source or event.launch.kernel for event in made}
    num_launches = count_text(made[-1].step, "launch", "launches")
    graphs = {event.graph for event in made if event.graph}
    captured = f", some in {count_text(len(graphs), 'graph')}" if graphs else ""
    return f"{num_launches} of {count_text(len(names), 'kernel')} seen{captured}"
