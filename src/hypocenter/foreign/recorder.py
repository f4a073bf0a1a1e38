"""Records a program that knows nothing of this package: its Triton launches, the memory they got.

What calls it is in `hooks.py`, what it knows of tensors in `seen_memory.py`. Knows torch's and
Triton's objects by what they answer, and imports neither.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from hypocenter.base.refusals import AnyRefusal
from hypocenter.foreign.argument_facts import (
    INTERPRETER,
    MAX_LOOKED_AT_BYTES,
    dtype_of,
    scalar_of,
    values_of,
)
from hypocenter.foreign.asked_addresses import ASKED
from hypocenter.foreign.known_launches import KnownLaunches, Looked
from hypocenter.foreign.repeats import Repeat, Repeats
from hypocenter.foreign.run_log import STATIC_BYTES, RunLog
from hypocenter.foreign.seen_graphs import SeenGraphs, Segment
from hypocenter.foreign.seen_memory import (
    FLOATS,
    INTEGERS,
    Given,
    SeenMemory,
)
from hypocenter.foreign.seen_reads import SeenRead, SeenReads
from hypocenter.record import ring
from hypocenter.record.catalogue import sources_of
from hypocenter.record.compared import ComparedEqual, ComparedUnequal
from hypocenter.record.compiled_graph import FusedKernel
from hypocenter.record.contents import LaunchOutcome, OtherBits
from hypocenter.record.events import (
    Called,
    Launched,
    LaunchRecord,
    LostLaunch,
    MaskedOff,
    RanUnguarded,
    Rejected,
    SourceRecord,
    StaleAddress,
    StreamEvent,
    Tuned,
    UnwrittenRead,
    Values,
)
from hypocenter.record.guard_faults import AccessFault
from hypocenter.record.order_events import Disordered, OrderWatched
from hypocenter.record.run_records import DeviceRecord
from hypocenter.record.runtime_text import kind_of_end

MAX_KERNELS = 1024
#: At hand, for they are written to in each launch.
_CELL_STEP, _CELL_STEP_STARTED = ring.CELL_STEP, ring.CELL_STEP_STARTED
#: What is kept of a tensor of integers of a launch that left one of its tensors, and how many
#: findings of a guarded run are.
GUARD_BYTES, MAX_OF_GUARD = 1 << 20, 512


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What is the same in every launch of a kernel; `jit` is kept so that its id stays its own."""

    jit: Any
    number: int
    name: str
    defaults: Mapping[str, Any]
    #: By its parameters whether they are constants.
    constants: Mapping[str, bool]
    sources: tuple[SourceRecord, ...]
    #: Of its parameters.
    names: tuple[str, ...]

    @property
    def source(self) -> str:
        return self.sources[0].id if self.sources else ""

    @property
    def casts(self) -> bool:
        """Whether it may read a tensor as another type."""
        return any("pointer_type" in source.text for source in self.sources)


@dataclass(slots=True)
class LaunchPlace:
    """Where a launch is made: device, stream, and `site`, which is a line of the frame `caller`.

    `ask_limits` gives those of a device that is new.
    """

    device: str
    stream: str = ""
    site: str = ""
    caller: FrameType | None = None
    ask_limits: Callable[[], Any] | None = None


class ForeignRecorder:
    """Records one process; raises what goes wrong, which `hooks.py` keeps to itself.

    `sees_frees`: torch's object for a storage lives as long as the storage, and can be watched.
    `is_guarded`: what a launch was is asked for when it has come back. `looks_closely`: what small
    tensors of a GPU hold is read back before each launch.
    """

    def __init__(
        self,
        base: Path,
        static_bytes: int = STATIC_BYTES,
        *,
        sees_frees: bool = True,
        is_guarded: bool = False,
        looks_closely: bool = False,
    ) -> None:
        self.keeps_contents = self._looks_closely = looks_closely
        self._log = RunLog(base, static_bytes)
        #: Told of a folder in which the recording begins anew.
        self.on_moved: Callable[[Path], None] = lambda _: None
        self.reads = SeenReads(self._record_read)
        self._memory = SeenMemory(self._log, self.reads, sees_frees=sees_frees)
        self._launches = KnownLaunches(self._log, self._memory.tensor_types)
        self._is_guarded = is_guarded
        self._num_kernels = 0
        self._graphs = SeenGraphs(self._log, self._memory)
        self._lock = threading.RLock()
        self._has_failed = False
        self._devices: dict[str, Any] = {}
        #: What a guarded run found and could not guard, which outlives a log that begins anew.
        self._of_guard: list[MaskedOff | RanUnguarded] = []
        #: What torch.compile's kernels were made of, which outlives it as well.
        self._compiled: list[FusedKernel] = []
        #: The launch that is being made, if it is to be made again.
        self._repeats = Repeats()
        self.repeat: Repeat | None = None
        #: Whether Triton's autotuner is taking the time of a kernel.
        self._is_trial = False
        #: Of the launch that is being made, what its tensors held before: number, and values.
        self._held: tuple[int, list[Values]] = (0, [])
        self._begin()

    def _begin(self) -> None:
        self._kernels: dict[int, _Kernel] = {}
        self._written: set[str] = set()
        for event in (*self._of_guard, *self._compiled):
            self._log.keep_event(event)

    def _make_room(self, graph: Any) -> None:
        """Tell of the memory that died; where the log is full, what matters is what came last.

        Not while `graph` is captured: what it takes is to stay together.
        """
        self._memory.drain()
        if not self._log.is_full or graph is not None:
            return
        self._memory.forget()
        self._launches.forget()
        self._log.begin_anew()
        self.on_moved(self.folder)
        self._begin()
        for name, limits in self._devices.items():
            self._tell_device(name, limits)
        self._graphs.write_again()

    def _tell_device(self, name: str, limits: Any) -> None:
        back, sees = self._looks_closely and name != INTERPRETER, self.reads.is_watching
        record = DeviceRecord(name=name, limits=limits, is_read_back=back, sees_reads=sees)
        self._log.static(record)

    @property
    def folder(self) -> Path:
        """Where this is recorded."""
        return self._log.folder

    @property
    def num_launches(self) -> int:
        """How many launches the program has made."""
        return self._log.num_launches

    # -- what the program does --------------------------------------------------------------------

    def record_launch(
        self,
        jit: Any,
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        grid: Any,
        place: LaunchPlace,
        graph: Any = None,
        *,
        is_compiled: bool = False,
    ) -> Launched | None:
        """A launch is about to be made at `place`: `options` are its keywords.

        It is captured into `graph`, if that is not None; `is_compiled`: its kernel has just been.
        It begins; whoever calls says when it is over, by `end`. Returns how it was told, but for
        one that was told in short.
        """
        device = place.device
        with self._lock:
            self.reads.is_in_launch = True
            log = self._log
            if log.is_full or self._memory.gone:
                with log.writer.together():
                    self._make_room(graph)
            log.num_launches = number = log.num_launches + 1
            header = log.writer.header
            header[_CELL_STEP], header[_CELL_STEP_STARTED] = number, time.monotonic_ns()
            if device not in self._devices:
                ask = place.ask_limits
                limits = self._devices[device] = ask() if ask is not None else None
                self._tell_device(device, limits)
            kernel = self._kernels.get(id(jit)) or self._new_kernel(jit)
            size = (grid,) if isinstance(grid, int) else tuple(map(int, grid))
            told: Looked | bool = False
            is_short = not (self._is_guarded or self._looks_closely)
            if device != INTERPRETER and graph is None and is_short:
                where = (place.site, device, place.stream)
                told = self._launches.tell(kernel, where, args, options, size)
                if told is True:
                    return None
            num_seen = self._memory.num_tensors
            with log.writer.together():
                event = self._tell_in_full(
                    kernel, args, options, size, place, graph, is_compiled=is_compiled
                )
            # One with a new tensor is not told again where tensors are new in each launch.
            if isinstance(told, Looked) and self._memory.num_tensors == num_seen:
                self._launches.learn(told, event.launch)
            return event

    def _tell_in_full(
        self,
        kernel: _Kernel,
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        grid: tuple[int, ...],
        place: LaunchPlace,
        graph: Any,
        *,
        is_compiled: bool,
    ) -> Launched:
        """Write a launch as `record_launch` got it."""
        given = Given(kernel.names, place.device, place.caller, [], [])
        # A copy to the host is no part of a graph.
        given.may_look = self._looks_closely and given.device != INTERPRETER and graph is None
        record = self._describe(kernel, args, options, grid, given, place)
        if self._looks_closely:
            tensors = dict(zip(kernel.names, args, strict=False)) | dict(options)
            casts = kernel.casts
            self.reads.lineage.note_launch(kernel.jit, kernel.name, tensors, casts=casts)
        if self._memory.has_passed_on:
            # A resized storage may come back to its place, and is another allocation then.
            self._memory.has_passed_on = False
            self._launches.forget()
        number = self._graphs.number_of(graph) if graph is not None else 0
        event = Launched(
            **self._log.now(), launch=record, graph=number, compiled=is_compiled and number > 0
        )
        if given.values:
            self._log.hold_recent(event.seq, given.values)
        self._held = event.seq, given.values
        self.repeat = None
        if self._looks_closely and graph is None and not self._is_guarded:
            self.repeat = self._repeat_of(kernel, args, options, given, event)
        if number:
            self._graphs.take(graph, event, kernel.sources, given.storages)
        else:
            self._log.event(event)
            self._note_stale(event, given.values)
        return event

    def _repeat_of(
        self,
        kernel: _Kernel,
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        given: Given,
        event: Launched,
    ) -> Repeat | None:
        """The launch that is about to be made, if it is to be made again."""
        if not self._repeats.has_room:
            return None
        types = [str(getattr(value, "dtype", "")) for value in (*args, *options.values())]
        record = event.launch
        form = f"{kernel.number} {record.num_warps} {record.constants} {record.options} {types}"
        if self._is_trial:  # the first trial of all has what the tensors held before tuning
            form = f"trial of {kernel.number} {types}"
        found = self._repeats.prepare(
            form, kernel.jit, kernel.sources, args, options, given.numbers
        )
        return found and replace(found, seq=event.seq)

    def _note_stale(self, made: Launched, held: Sequence[Values]) -> None:
        """Tell of tables whose addresses lead to memory that is gone, each launch of one."""
        for values in held:
            if (found := ASKED.first_stale(values)) is None:
                continue
            index, asked = found
            stale = StaleAddress(
                **self._log.now(),
                launched=made.seq,
                tensor=values.tensor,
                index=index,
                address=asked.address,
                num_bytes=asked.num_bytes,
                asked_at=asked.asked_at,
                freed_at=asked.freed_at,
            )
            self._log.keep_event(stale)

    def _describe(
        self,
        kernel: _Kernel,
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        grid: tuple[int, ...],
        kept: Given,
        place: LaunchPlace,
    ) -> LaunchRecord:
        """All there is to tell of a launch; `kept` takes the memory behind its tensors."""
        given = {**kernel.defaults, **dict(zip(kernel.names, args, strict=False)), **options}
        arguments, constants = [], {}
        for name, is_constant in kernel.constants.items():
            value = given.get(name)
            if is_constant:
                constants[name] = scalar_of(value)
            else:
                arguments.append(self._memory.argument(name, value, kept))
        return LaunchRecord(
            kernel=kernel.name,
            function=kernel.name,
            device=kept.device,
            grid=grid,
            num_warps=int(options.get("num_warps") or (0 if kept.device == INTERPRETER else 4)),
            arguments=tuple(arguments),
            constants=constants,
            options={
                name: scalar_of(value)
                for name, value in options.items()
                if name not in kernel.constants and name != "num_warps"
            },
            source=kernel.source,
            site=place.site,
            stream=place.stream,
        )

    def record_outcome(
        self, made: Launched, repeat: Repeat, launch: Callable[..., Any] | None, compiled: Any
    ) -> None:
        """A launch has been made, of which Triton answered `compiled`: make it again by `launch`,
        and keep what it gives; not where another thread has launched meanwhile.

        None for a launch that says nothing when it is made again; what it was given is kept. Nor
        is one made again while its time is taken.
        """
        if repeat.seq != made.seq:
            return
        found: tuple[tuple[Values, ...], list[list[OtherBits]]] | None = (), []
        if launch is not None and not self._is_trial:
            self.reads.is_in_launch = True
            try:
                found = self._repeats.make(repeat, launch)
            finally:
                self.reads.is_in_launch = False
        if found is None:
            return
        gave, others = found[0], [others for others in found[1] if others]
        with self._lock:
            self._log.keep_outcome(
                LaunchOutcome(
                    step=made.step,
                    launch=made.seq,
                    given=repeat.given,
                    gave=gave,
                    num_again=len(found[1]),
                    num_other=len(others),
                    others=tuple(others[0]) if others else (),
                    code=self._repeats.code_of(compiled),
                )
            )

    def begin_trial(self) -> int:
        """Triton's autotuner runs a configuration; for `end_trial`."""
        with self._lock:
            self._is_trial = True
            return self._log.next_number()

    def end_trial(self, began: int, **fields: Any) -> None:
        """It has run it; `fields` are the others of a Tuned."""
        with self._lock:
            self._is_trial = False
            self._log.keep_event(Tuned(**self._log.now(), began=began, **fields))

    def record_capture(self, graph: Any) -> None:
        """A capture into `graph` has begun."""
        with self._lock:
            self._make_room(None)
            self._graphs.begin(graph)

    def record_captured(self, graph: Any, segments: Sequence[Segment], site: str) -> None:
        """A capture has ended well; `segments` is all memory that torch has by now."""
        with self._lock:
            self._memory.drain()
            self._graphs.end(graph, segments, site)

    def record_replay(self, graph: Any, site: str, stream: str) -> None:
        """A graph is about to run again."""
        with self._lock:
            self._make_room(None)
            self._graphs.replay(graph, site, stream)

    def record_guarded(
        self, made: Launched, faults: Sequence[AccessFault], given: Mapping[str, Any]
    ) -> None:
        """Accesses of a launch were masked off; `given` are its tensors, of which what a kernel may
        find its way by is kept: integers, and small ones of floats.

        Of a tensor that the launch itself has changed the later values are all there is, but where
        Triton's interpreter ran it.
        """
        with self._lock:
            before = self._held[1] if self._held[0] == made.seq else []
            held = {values.tensor: values for values in before}
            for argument in made.launch.arguments:
                tensor = given.get(argument.name)
                if argument.tensor is None or tensor is None or argument.tensor in held:
                    continue
                kind = dtype_of(tensor.dtype)
                most = GUARD_BYTES if kind in INTEGERS else MAX_LOOKED_AT_BYTES * (kind in FLOATS)
                if 0 < tensor.numel() * tensor.element_size() <= most:
                    held[argument.tensor] = values_of(tensor, argument.tensor, kind)
            if held:
                self._log.hold(made.step, made.seq, tuple(held.values()))
            for fault in faults:
                self._keep_of_guard(
                    MaskedOff(**self._log.now(), fault=fault, launched=made.seq, launch=made.launch)
                )

    def record_unguarded(
        self, kernel: str, reason: str, file: str = "", line: int = 0, expression: str = ""
    ) -> None:
        """Launches of a kernel run as they are."""
        with self._lock:
            self._keep_of_guard(
                RanUnguarded(
                    **self._log.now(),
                    kernel=kernel,
                    reason=reason,
                    file=file,
                    line=line,
                    expression=expression,
                )
            )

    def record_compiled(self, jit: Any, facts: Mapping[str, Any]) -> None:
        """What a kernel of torch.compile's that was launched was made of; fields of the event."""
        with self._lock:
            kernel = self._kernels.get(id(jit))
            if kernel is None or len(self._compiled) >= MAX_KERNELS:
                return
            now = self._log.now()
            event = FusedKernel(**now, kernel=kernel.name, source=kernel.source, **facts)
            self._compiled.append(event)
            self._log.keep_event(event)

    def count_guarded(self) -> None:
        """Another launch was made in its guarded form."""
        number = ring.CHECKS.index("guard")
        self._log.writer.header[ring.CELL_ARMED] |= 1 << number
        self._log.writer.header[ring.CELL_CHECK_RUNS + number] += 1

    def _keep_of_guard(self, event: MaskedOff | RanUnguarded) -> None:
        if len(self._of_guard) < MAX_OF_GUARD:
            self._of_guard.append(event)
            self._log.keep_event(event)

    def record_number(self, event: Any, **fields: Any) -> None:
        """An event of `record/nonfinite.py`, with its own fields."""
        with self._lock:
            self._log.keep_event(event(**self._log.now(), **fields))

    def record_compared(self, **fields: Any) -> None:
        """A failed assertion has compared two tensors; fields of the event."""
        with self._lock:
            self._log.keep_event(ComparedUnequal(**self._log.now(), **fields))

    def record_equal(self, **fields: Any) -> None:
        """A comparison has passed; fields of the event."""
        with self._lock:
            self._log.keep_event(ComparedEqual(**self._log.now(), **fields))

    def allocation_of(self, tensor: Any) -> int:
        """The number of a tensor's memory, 0 where no launch was given it."""
        with self._lock:
            return self._memory.number_of(tensor.untyped_storage())

    def keep_outcome(self, outcome: LaunchOutcome) -> None:
        """What a launch was given, or gave, which others have put together."""
        with self._lock:
            self._log.keep_outcome(outcome)

    def begin(self) -> None:
        """A wait for the GPU begins, which may take longer than anyone waits for."""
        self.reads.is_in_launch = True
        self._log.writer.header[_CELL_STEP_STARTED] = time.monotonic_ns()

    def end(self) -> None:
        """The wait or the launch that began is over."""
        self._log.writer.header[_CELL_STEP_STARTED] = 0
        self.reads.is_in_launch = False

    def _record_read(self, read: SeenRead) -> None:
        with self._lock:
            self._log.keep_event(UnwrittenRead(**self._log.now(), **read.fields()))

    def record_lost(self, kernel: str, reason: str, num: int) -> None:
        """So many launches of a kernel were made by now that could not be recorded."""
        with self._lock:
            lost = LostLaunch(**self._log.now(), kernel=kernel, reason=reason, num=num)
            self._log.keep_event(lost)

    def record_order(self, kind: type[Disordered | OrderWatched], fields: dict[str, Any]) -> None:
        """Of the order of the program's work: the fields of such an event but for its number."""
        with self._lock:
            self._log.keep_event(kind(**self._log.now(), **fields))

    def record_synchronisation(self, site: str) -> None:
        """The host has waited for everything."""
        with self._lock:
            self._log.event(
                StreamEvent(**self._log.now(), action="synchronise", event=0, stream="", site=site)
            )

    def record_failure(self, call: str, outcome: str, site: str, *, is_statement: bool) -> None:
        """An exception ends the program; see Called."""
        with self._lock:
            self._has_failed = True
            self._memory.drain()
            self._log.keep_event(
                Called(
                    **self._log.now(),
                    call=call,
                    outcome=outcome,
                    site=site,
                    kind=kind_of_end(outcome, call),
                    is_statement=is_statement,
                )
            )

    def record_refusal(self, refusal: AnyRefusal, kernel: str, site: str) -> None:
        """A launch was refused, and that ends the program; `site` is the program's own line."""
        with self._lock:
            self._log.keep_event(
                Rejected(
                    **self._log.now(),
                    refusal=refusal,
                    kernel=kernel,
                    site=site,
                )
            )

    def blocks(self, device: str, blocks: list[tuple[int, int, bool]]) -> None:
        """Memory of torch's allocator, as (address, bytes, whether it is in use)."""
        with self._lock:
            self._memory.blocks(device, blocks)

    def close(self) -> None:
        """The program ends by itself."""
        with self._lock:
            self._memory.drain()
            self._log.writer.close(ring.FAILED if self._has_failed else ring.ENDED)

    def abandon(self) -> None:
        """In the child of a fork: the folder is the parent's."""
        self._log.writer.release()

    # -- kernels ----------------------------------------------------------------------------------

    def _new_kernel(self, jit: Any) -> _Kernel:
        # torch.compile drops the function where the text was compiled in another process.
        is_whole = jit.fn is not None
        signature = inspect.signature(jit.fn) if is_whole else jit.signature
        parameters = signature.parameters
        records: tuple[SourceRecord, ...] = sources_of.__wrapped__(jit)
        for record in records:
            if record.id not in self._written:
                self._written.add(record.id)
                self._log.static(record)
        self._num_kernels += 1
        kernel = _Kernel(
            jit,
            self._num_kernels,
            jit.fn.__name__ if is_whole else jit.__name__,
            {n: p.default for n, p in parameters.items() if p.default is not p.empty},
            {n: "constexpr" in str(p.annotation) for n, p in parameters.items()},
            records,
            tuple(parameters),
        )
        if len(self._kernels) >= MAX_KERNELS:
            self._kernels.clear()
        self._kernels[id(jit)] = kernel
        return kernel
