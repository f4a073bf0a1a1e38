"""Writes down what the process is about to do, where it survives the process; on by default.

`current()` is the recorder of this process, or what stands in its place. Nothing here may break a
run: what cannot be written is told once and left out.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ParamSpec
from weakref import WeakKeyDictionary, ref

import msgspec
import numpy as np

from hypocenter.base.errors import (
    BadModelFile,
    CopyRejected,
    DeviceFault,
    ErrorKind,
    HypoError,
    LaunchRejected,
    OutOfMemory,
    RankLost,
    TokenizerError,
)
from hypocenter.base.refusals import AnyRefusal, Refused
from hypocenter.base.tensor import Allocation, Tensor
from hypocenter.record import ring, run_folder
from hypocenter.record.catalogue import Catalogue
from hypocenter.record.engine_events import (
    Answered,
    BlockChanged,
    BlocksNamed,
    Drawn,
    Entered,
    LostRank,
    TextAsked,
)
from hypocenter.record.events import (
    Allocated,
    AllocationRecord,
    AnyEvent,
    Called,
    Captured,
    Copied,
    Freed,
    HostWrote,
    IdsLearned,
    Launched,
    LaunchRecord,
    Now,
    PlanRecord,
    Rejected,
    RequestRecord,
    Stepped,
    StreamEvent,
    Values,
    Waited,
)
from hypocenter.record.keyed_digest import KeyedDigest
from hypocenter.record.module_texts import digests_of_modules
from hypocenter.record.not_recording import UNREAD_HEADER, Header, NotRecording
from hypocenter.record.raised import raised_in
from hypocenter.record.recordable import Launchable, Planned
from hypocenter.record.ring_writer import MarkRuns, RingWriter
from hypocenter.record.run_folder import claim_folder, process_record
from hypocenter.record.run_records import DeviceRecord, ModelRecord
from hypocenter.settings.environment import Environment

log = logging.getLogger("hypocenter.recorder")

_CHECK_NUMBERS = {name: number for number, name in enumerate(ring.CHECKS)}
#: Of so many tensors that steps fill is the number kept at hand.
_MAX_INPUTS = 64
_ALWAYS_ARMED = ("contracts", "step indices", "host copies")


_MAX_CHARS = 2000


_NOT_RECORDING = NotRecording()
_current: Recorder | NotRecording = _NOT_RECORDING
_was_opened = False
_opening = threading.Lock()


def current() -> Recorder | NotRecording:
    """The recorder of this process: one that does nothing before `open_recorder`, and where
    recording is off."""
    return _current


@contextlib.contextmanager
def recording_defects() -> Iterator[None]:
    """Within, what nobody raises on purpose is recorded on its way up, and so is a refusal."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, HypoError) or getattr(error, "refusal", None) is not None:
            current().record_failure(error)
        raise


def open_recorder() -> Recorder | NotRecording:
    """Begin to record, unless that was tried before or HYPO_RECORD is 0."""
    global _current, _was_opened
    with _opening:
        if not _was_opened:
            _was_opened = True
            environment = Environment.read()
            if environment.record:
                try:
                    _current = opened = Recorder(claim_folder(environment.run_dir))
                    run_folder.note_signals(opened.folder)
                except OSError as error:
                    log.warning("this run is not recorded: %s", error)
    return _current


def close_recorder() -> None:
    """Say that the run has ended. A later `open_recorder` begins another folder."""
    global _current, _was_opened
    with _opening:
        recorder, _current, _was_opened = _current, _NOT_RECORDING, False
    if isinstance(recorder, Recorder):
        run_folder.stop_noting()
        recorder.close()


def _forget() -> None:
    """In the child of a fork: the folder is the parent's."""
    global _current, _was_opened, _opening
    recorder, _current, _was_opened = _current, _NOT_RECORDING, False
    _opening = threading.Lock()
    if isinstance(recorder, Recorder):
        run_folder.stop_noting()
        recorder.abandon()


atexit.register(close_recorder)
os.register_at_fork(after_in_child=_forget)


P = ParamSpec("P")


def never_breaks(method: Callable[P, None]) -> Callable[P, None]:
    """What a method of the recorder cannot do is counted, told once, and does not matter."""

    @functools.wraps(method)
    def attempt(*args: P.args, **keywords: P.kwargs) -> None:
        try:
            method(*args, **keywords)
        except Exception as error:
            recorder: Any = args[0]
            recorder.failed_to_write(error)

    return attempt


def encode_json(value: object) -> bytes:
    """JSON; what that does not know is in it as Python shows it."""
    return msgspec.json.encode(value, enc_hook=repr)


class _OfThread(threading.local):
    """The step that a thread is in, the plans that it has run there, the word of the next one."""

    def __init__(self) -> None:
        self.step = self.step_awaiting_ids = 0
        self.plans: set[int] = set()
        self.ready: tuple[Planned, int] | None = None


class Recorder:
    """Records one process. Safe from several threads."""

    is_on = True

    def __init__(self, folder: Path) -> None:
        self._writer = RingWriter(folder)
        self.folder = folder
        #: The header of the ring. `launch.walk` and `launch.walk_native` write places there by
        #: themselves, which is how launches of a plan are recorded.
        self.header: Header = self._writer.header
        #: The same bytes, a page of their own.
        self.header_page = self._writer.header_page
        self._lock = threading.RLock()
        self._seq = itertools.count(1)
        self._thread = _OfThread()
        self._running: dict[int, int] = {}  # thread to the time at which its step began
        self._plans: WeakKeyDictionary[Planned, int] = WeakKeyDictionary()
        self._inputs: dict[int, tuple[Tensor, tuple[int, str]]] = {}
        #: What `record_launch_outside_plans` told last, and of which launch.
        self._last_launch: tuple[ref[Any], LaunchRecord | None] = ref(self), None
        self._plan_ids = itertools.count(1)
        self._graph_ids = itertools.count(1)
        self.mark_runs = MarkRuns(self.header)
        self._devices: set[tuple[str, int | None]] = set()
        self._has_failed = self._has_warned = self._has_modules = False
        self.catalogue = Catalogue(self._static, self._write_allocated)
        for name in _ALWAYS_ARMED:
            self.arm(name)
        self._static(process_record())

    # -- memory ---------------------------------------------------------------------------------

    @never_breaks
    def record_allocation(
        self, allocation: Allocation, name: str, owner: str, kind: str = ""
    ) -> None:
        """Memory was had; `kind` as in AllocationRecord."""
        with self._lock:
            self.catalogue.allocation(allocation, name, owner, kind)

    @never_breaks
    def record_free(self, allocation: Allocation, site: str) -> None:
        """Memory is about to be given back."""
        with self._lock:
            self.catalogue.forget(allocation)
            self._keep(Freed(**self._now(), allocation=allocation.id, site=site))

    @never_breaks
    def record_copy(
        self,
        direction: str,
        tensor: Tensor,
        num_bytes: int,
        *,
        host_address: int = 0,
        is_pinned: bool = False,
        stream: str = "",
        site: str = "",
    ) -> None:
        """A copy between host and device is about to be asked for."""
        with self._lock:
            self._event(
                Copied(
                    **self._now(),
                    direction=direction,
                    tensor=self.catalogue.tensor(tensor),
                    address=tensor.address,
                    num_bytes=num_bytes,
                    host_address=host_address,
                    is_pinned=is_pinned,
                    stream=stream,
                    site=site,
                )
            )

    @never_breaks
    def record_wait(self, tensor: Tensor, step: int) -> None:
        """The host has waited for the copy of `tensor` that it asked for in `step`."""
        with self._lock:
            number = self.catalogue.tensor(tensor)
            self._event(Waited(**self._now(), copied_in=step, tensor=number))

    @never_breaks
    def record_host_write(self, host_address: int, num_bytes: int, site: str = "") -> None:
        """The host is about to change a pinned buffer."""
        self._event(
            HostWrote(**self._now(), host_address=host_address, num_bytes=num_bytes, site=site)
        )

    @never_breaks
    def record_stream_event(self, action: str, event: int, stream: str, site: str = "") -> None:
        """`action` as in StreamEvent."""
        self._event(
            StreamEvent(**self._now(), action=action, event=event, stream=stream, site=site)
        )

    # -- plans and launches ---------------------------------------------------------------------

    @never_breaks
    def device(self, name: str, limits: Any = None, slot: int | None = None) -> None:
        """A device was opened; `limits` is its GpuLimits."""
        with self._lock:
            if (name, slot) not in self._devices:
                self._devices.add((name, slot))
                facts = (
                    {field: getattr(limits, field) for field in limits.__slots__}
                    if limits
                    else None
                )
                self._static(DeviceRecord(name=name, limits=facts, slot=slot))

    @never_breaks
    def record_model(self, name: str, architecture: str, quantisation: str) -> None:
        """A model is about to be loaded from the file `name`; see ModelRecord.

        Before the first one the package's own modules are told, on which its answers depend.
        """
        with self._lock:
            if not self._has_modules:
                self._has_modules = True
                self._static(digests_of_modules())
            self._static(
                ModelRecord(name=name, architecture=architecture, quantisation=quantisation)
            )

    @never_breaks
    def record_step(
        self,
        plan: Planned,
        inputs: Iterable[tuple[Tensor, np.ndarray[Any, Any]]] = (),
        requests: tuple[RequestRecord, ...] = (),
        *,
        is_new: bool = True,
        filled_by_device: Tensor | None = None,
    ) -> None:
        """`plan` is about to run, with what the host puts into its inputs, and what the device has.

        `is_new`: with it a step begins; otherwise it belongs to the step that this thread is in.
        """
        thread = self._thread
        if filled_by_device is not None:
            thread.step_awaiting_ids = 0  # until it is written
        with self._lock:
            number = self._plan_number(plan)
            if is_new or not thread.step or number in thread.plans:
                self._begin_step(is_watched=is_new)
            thread.plans.add(number)
            values = tuple([_values(*self._input(item), array) for item, array in inputs])
            own = 0 if filled_by_device is None else self._input(filled_by_device)[0]
            event = Stepped(
                seq=next(self._seq),
                step=thread.step,
                plan=number,
                graph=plan.graph,
                inputs=values,
                requests=requests,
                filled_by_device=own,
            )
            thread.step_awaiting_ids = event.seq if own else thread.step_awaiting_ids
            if not self._writer.event(event):
                self._lose(1)
                self._event(msgspec.structs.replace(event, inputs=(), requests=()))
            thread.ready = plan, ring.place_word(thread.step, number)

    @never_breaks
    def record_ids(
        self, tensor: Tensor, ids: np.ndarray[Any, Any], digests: tuple[str, ...]
    ) -> None:
        """What the device had put into an input of the newest step of this thread that has one."""
        values, of = _values(*self._input(tensor), ids), self._thread.step_awaiting_ids
        if of:
            self._event(IdsLearned(**self._now(), of=of, inputs=(values,), digests=digests))

    @never_breaks
    def record_entry(
        self, request: int, num_prompt_tokens: int, settings: tuple[float, ...], seed: int
    ) -> None:
        """A request has come in; see `Entered`."""
        self._event(
            Entered(
                **self._now(),
                request=request,
                num_prompt_tokens=num_prompt_tokens,
                settings=settings,
                seed=seed,
            )
        )

    @never_breaks
    def record_asked(self, *said: object) -> None:
        """A text, or a conversation with all that was said beside it, is about to be made tokens;
        see `TextAsked`."""
        self._event(TextAsked(**self._now(), digest=KeyedDigest(encode_json(said)).text()))

    @never_breaks
    def record_block_change(self, page: Tensor, block: int, request: int, kept_in: int) -> None:
        """See `BlockChanged`."""
        tensor = self.catalogue.tensor(page)
        self._event(
            BlockChanged(
                **self._now(), tensor=tensor, block=block, request=request, kept_in=kept_in
            )
        )

    @never_breaks
    def record_blocks(
        self,
        request: int,
        blocks: tuple[int, ...],
        prefixes: bytes = b"",
        first: int = 0,
        made_with: dict[str, str] | None = None,
    ) -> None:
        """See `BlocksNamed`."""
        self._event(
            BlocksNamed(
                **self._now(),
                request=request,
                blocks=blocks,
                prefixes=prefixes,
                first=first,
                made_with=made_with or {},
            )
        )

    @never_breaks
    def record_draws(
        self, requests: tuple[int, ...], positions: tuple[int, ...], **digests: tuple[str, ...]
    ) -> None:
        """See `Drawn`."""
        self._event(Drawn(**self._now(), requests=requests, positions=positions, **digests))

    @never_breaks
    def record_answer(
        self, request: int, num_tokens: int, digest: str, said: str, failed: str = ""
    ) -> None:
        """A request has ended with `num_tokens` tokens, its prompt among them; see `Answered`."""
        told = Answered(
            **self._now(),
            request=request,
            num_tokens=num_tokens,
            digest=digest,
            said=said,
            failed=failed,
        )
        self._event(told)

    def record_begin(self, plan: Planned) -> tuple[Header, int]:
        """Where the places of `plan`, which runs now, are written to, and the first of them."""
        ready, self._thread.ready = self._thread.ready, None
        if ready is None or ready[0] is not plan:
            self.record_step(plan, is_new=False)
            ready, self._thread.ready = self._thread.ready, None
        if ready is None:
            return UNREAD_HEADER
        if plan.marks:
            self.mark_runs.note(plan.device, plan.tag, ready[1])
        return self.header, ready[1]

    @property
    def current_step(self) -> int:
        """The step that this thread is in, or 0."""
        return self._thread.step

    @never_breaks
    def resume(self, step: int) -> None:
        """This thread waits for a step that was launched ahead, and then left alone."""
        with self._lock:
            self._thread.step = step
            self._watch()

    @never_breaks
    def end_step(self) -> None:
        """What this thread began is over, and its results are on the host."""
        self._thread.step = 0
        self._thread.plans.clear()
        with self._lock:
            self._running.pop(threading.get_ident(), None)
            self.header[ring.CELL_STEP_STARTED] = min(self._running.values(), default=0)

    @never_breaks
    def record_launch_outside_plans(self, launch: Launchable, stream: str = "") -> None:
        """A launch outside of every plan is about to be made."""
        with self._lock:
            last, record = self._last_launch
            if record is None or last() is not launch or record.stream != stream:
                record = self.catalogue.launch(launch, stream)
                self._last_launch = ref(launch), record
            self._event(Launched(**self._now(), launch=record))

    def record_capture(self, plan: Planned, device: str, bases: Iterable[int]) -> int:
        """A graph has taken the launches of `plan`; `bases`: where its memory begins.

        Returns its number, which steps that replay it have.
        """
        number = next(self._graph_ids)
        self._record_capture(number, plan, device, bases)
        return number

    @never_breaks
    def _record_capture(self, graph: int, plan: Planned, device: str, bases: Iterable[int]) -> None:
        with self._lock:
            found = (self.catalogue.at(device, base) for base in bases)
            allocations = tuple(sorted(number for number in found if number is not None))
            self._keep(
                Captured(
                    **self._now(),
                    graph=graph,
                    plan=self._plan_number(plan),
                    allocations=allocations,
                )
            )

    # -- what went wrong, and who looked --------------------------------------------------------

    @never_breaks
    def record_failure(self, error: BaseException, launch: Launchable | None = None) -> None:
        """An error on its way up: a refusal, or what a call of the runtime reported.

        Noted once, however many floors it passes.
        """
        if getattr(error, "is_recorded", False):
            return
        error.is_recorded = True  # type: ignore[attr-defined]
        self._has_failed = True
        with self._lock:
            record = None
            if launch is not None and isinstance(error, LaunchRejected):
                record = self.catalogue.launch(launch)
            self._keep(event_of_error(error, record, **self._now()))

    @never_breaks
    def record_refusal(
        self, error: LaunchRejected, kernel: str, device: str, facts: Any, contract: Any
    ) -> None:
        """A launch was refused before it was prepared; `facts` as its contract names them."""
        with self._lock:
            error.is_recorded = True  # type: ignore[attr-defined]
            self._has_failed = True
            record = LaunchRecord(
                kernel=kernel,
                function=kernel,
                device=device,
                facts=self.catalogue.facts(facts),
                contract=self.catalogue.contract(kernel, contract),
            )
            self._keep(event_of_error(error, record, **self._now()))

    def arm(self, check: str, is_armed: bool = True) -> None:
        """Say whether a check of ring.CHECKS looks."""
        bit = 1 << _CHECK_NUMBERS[check]
        armed = self.header[ring.CELL_ARMED]
        self.header[ring.CELL_ARMED] = armed | bit if is_armed else armed & ~bit

    def record_check(self, check: str) -> None:
        """A check of ring.CHECKS is about to run."""
        header, number = self.header, _CHECK_NUMBERS[check]
        if not header[ring.CELL_ARMED] >> number & 1:
            self.arm(check)
        header[ring.CELL_CHECK_RUNS + number] += 1

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """The run ends by itself."""
        with self._lock:
            self._writer.close(ring.FAILED if self._has_failed else ring.ENDED)

    def abandon(self) -> None:
        """Another process goes on with this folder."""
        self._writer.release()

    def failed_to_write(self, error: Exception) -> None:
        """Count what is lost; say so once."""
        self._lose(1)
        if not self._has_warned:
            self._has_warned = True
            log.warning("this run is recorded in part: %s: %s", type(error).__name__, error)

    # -- writing --------------------------------------------------------------------------------

    def _now(self) -> Now:
        return {"seq": next(self._seq), "step": self._thread.step}

    def _event(self, event: AnyEvent) -> None:
        with self._lock:
            if not self._writer.event(event):
                self._lose(1)

    def _keep(self, event: AnyEvent) -> None:
        """An event that must be there however many follow; in the ring when the log is full."""
        with self._lock:
            if not self._writer.static(event):
                self._event(event)

    def _static(self, record: Any) -> None:
        if not self._writer.static(record):
            self._lose(1)

    def _write_allocated(self, record: AllocationRecord) -> None:
        self._keep(Allocated(**self._now(), allocation=record))

    def _lose(self, number: int) -> None:
        try:
            self.header[ring.CELL_NUM_LOST] += number
        except ValueError:  # closed
            return

    def _plan_number(self, plan: Planned) -> int:
        number = self._plans.get(plan)
        if number is None:
            number = self._plans[plan] = next(self._plan_ids)
            launches = tuple(self.catalogue.launch(launch) for launch in plan.launches)
            of_host = tuple(self.catalogue.launch(launch) for launch in plan.host_launches)
            told = PlanRecord(
                id=number,
                name=plan.name,
                device=plan.device,
                launches=launches,
                host_launches=of_host,
            )
            self._static(told)
        return number

    def _input(self, tensor: Tensor) -> tuple[int, str]:
        """Number and type of a tensor that is filled at each step, as a plan's inputs are."""
        found = self._inputs.get(id(tensor))
        if found is None or found[0] is not tensor:
            if len(self._inputs) >= _MAX_INPUTS:
                self._inputs.clear()
            found = tensor, (self.catalogue.tensor(tensor), tensor.dtype.name)
            self._inputs[id(tensor)] = found
        return found[1]

    def _begin_step(self, *, is_watched: bool) -> None:
        header, thread = self.header, self._thread
        number = header[ring.CELL_STEP] + 1
        header[ring.CELL_STEP] = number
        thread.step = number
        thread.plans.clear()
        if is_watched:
            self._watch()

    def _watch(self) -> None:
        self._running[threading.get_ident()] = time.monotonic_ns()
        self.header[ring.CELL_STEP_STARTED] = min(self._running.values())


def _values(tensor: int, dtype: str, array: np.ndarray[Any, Any]) -> Values:
    return Values(tensor, dtype, array.shape, array.tobytes())


def event_of_error(
    error: BaseException, launch: LaunchRecord | None, *, seq: int, step: int
) -> Rejected | Called:
    """What an error says: a refusal of `launch`, of a copy or of a model file, or a failed call."""
    if isinstance(error, CopyRejected):
        return Rejected(seq=seq, step=step, refusal=encodable(error.refusal), tensor=error.tensor)
    if isinstance(error, LaunchRejected):
        refusal = encodable(error.refusal)
        return Rejected(seq=seq, step=step, refusal=refusal, kernel=error.kernel, launch=launch)
    if isinstance(error, BadModelFile | TokenizerError) and error.refusal is not None:
        return Rejected(seq=seq, step=step, refusal=encodable(error.refusal))
    if isinstance(error, DeviceFault):
        return Called(
            seq=seq,
            step=step,
            call=error.call,
            outcome=error.reason,
            kernel=error.kernel,
            kind=error.kind,
            lost=_lost_rank(error) if isinstance(error, RankLost) else None,
        )
    name = type(error).__name__
    return Called(
        seq=seq,
        step=step,
        call="" if isinstance(error, HypoError) else name,
        outcome=f"{name}: {error}"[:_MAX_CHARS],
        kind=ErrorKind.OUT_OF_MEMORY if isinstance(error, OutOfMemory) else ErrorKind.OTHER,
        raised_in=raised_in(error),
    )


def _lost_rank(error: RankLost) -> LostRank:
    return LostRank(
        rank=error.rank, num_ranks=error.num_ranks, process=error.process, how=error.how
    )


def encodable(refusal: AnyRefusal) -> AnyRefusal:
    """The refusal, or its sentence alone where a number in it has more than 64 bits."""
    try:
        msgspec.msgpack.encode(refusal)
    except (OverflowError, TypeError):
        return Refused(what=str(refusal))
    return refusal
