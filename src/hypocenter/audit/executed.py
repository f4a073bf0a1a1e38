"""What the engine ran, read from its own record: plans, sequences, lengths, pages, types, graphs.

Nothing here knows what was asked for.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from hypocenter.base.dtypes import Int32s
from hypocenter.base.errors import HypoError, UsageError
from hypocenter.record import ring
from hypocenter.record.engine_events import TextAsked
from hypocenter.record.events import (
    AnyEvent,
    Captured,
    LaunchRecord,
    PlanRecord,
    Stepped,
    TensorRecord,
)
from hypocenter.record.keyed_digest import KeyedDigest
from hypocenter.record.recorder import Recorder, current, encode_json
from hypocenter.settings.environment import Environment

_numbers = itertools.count(1)


class CannotRun(HypoError):
    """A way that an audit asks for cannot be run here, which says nothing of what it computes."""


class RecordCutShort(CannotRun):
    """The record no longer has all that ran since a place."""


class Executed(msgspec.Struct, frozen=True, kw_only=True):
    """How one request ran, and what ran it. Lengths count its tokens, `chunks` those of each step.

    `num_sequences` is the most that shared a step with it. `kernels` are those of its steps in
    order of first use, `kv_types` and `weight_types` what launches were given. `num_replayed` of
    its steps were replays of graphs, and in `num_captured` a graph was made. `is_scattered`: some
    of its blocks do not follow each other. `processes` have recorded its steps.
    """

    devices: tuple[str, ...]
    length: int
    chunks: tuple[int, ...]
    num_sequences: int
    num_replayed: int
    num_captured: int
    is_scattered: bool
    kv_types: tuple[str, ...]
    weight_types: tuple[str, ...]
    kernels: tuple[str, ...]
    processes: tuple[int, ...]

    @property
    def replays(self) -> str:
        """Which of its steps were replays of graphs: all, none or some."""
        if not self.num_replayed:
            return "some" if self.num_captured else "none"
        return "all" if self.num_replayed == len(self.chunks) else "some"

    @property
    def num_processes(self) -> int:
        """How many processes have recorded all of its steps."""
        return len(self.processes)


class OwnRecord:
    """The record of this process, from marks on."""

    def __init__(self) -> None:
        """Raises UsageError where nothing is recorded."""
        recorder = current()
        if not isinstance(recorder, Recorder):
            raise UsageError(
                "an audit proves by the engine's own record which way a step took, and nothing is "
                "recorded; unset HYPO_RECORD"
            )
        self._recorder = recorder

    def mark(self) -> str:
        """A place in the record."""
        words = ("audit", os.getpid(), next(_numbers))
        self._recorder.record_asked(*words)
        return KeyedDigest(encode_json(words)).text()

    def since(self, mark: str) -> Stretch:
        """All that was recorded since a mark. Raises RecordCutShort."""
        run = ring.read_run(self._recorder.folder)
        for at, event in enumerate(run.events):
            if isinstance(event, TextAsked) and event.digest == mark:
                return Stretch(run, run.events[at + 1 :])
        raise RecordCutShort("the ring of the record turned within one way; run fewer tokens")

    def with_ranks(self, executed: Executed, request: int, pids: Sequence[int]) -> Executed:
        """The same with those of other processes that have recorded the same steps, each itself."""
        others = []
        for folder in ring.run_folders(Environment.read().run_dir):
            heart = ring.read_heartbeat(folder)
            if heart is None or heart.pid not in pids:
                continue
            run = ring.read_run(folder)
            theirs = Stretch(run, run.events).of_request(request)
            if theirs.chunks == executed.chunks and theirs.length == executed.length:
                others.append(heart.pid)
        return msgspec.structs.replace(executed, processes=(*executed.processes, *sorted(others)))


class Stretch:
    """A part of a run, in order."""

    def __init__(self, run: ring.Run, events: Sequence[AnyEvent]) -> None:
        self.events, self.pid = events, run.pid
        #: Those before it, too.
        self.all_events = run.events
        self.tensors: dict[int, TensorRecord] = {tensor.id: tensor for tensor in run.tensors}
        self.plans: dict[int, PlanRecord] = {plan.id: plan for plan in run.plans}

    @property
    def steps(self) -> list[Stepped]:
        """The steps of the model; what chooses tokens has plans of its own."""
        return [e for e in self.events if isinstance(e, Stepped) and e.requests]

    def of_request(self, request: int) -> Executed:
        """How a request ran. Raises RecordCutShort where no step has it."""
        steps = [s for s in self.steps if any(r.id == request for r in s.requests)]
        if not steps:
            raise RecordCutShort(f"no step of the record has request {request}")
        spans = [self._span(step, request) for step in steps]
        launches = [launch for step in steps for launch in self.plans[step.plan].launches]
        by_host = [launch for step in steps for launch in self.plans[step.plan].host_launches]
        plans = {step.plan for step in steps}
        return Executed(
            devices=tuple(sorted({launch.device for launch in (*launches, *by_host)})),
            length=1 + max(int(positions[-1]) for positions, _ in spans),
            chunks=tuple(len(positions) for positions, _ in spans),
            num_sequences=max(self._num_sequences(step) for step in steps),
            num_replayed=sum(step.graph > 0 for step in steps),
            num_captured=sum(isinstance(e, Captured) and e.plan in plans for e in self.events),
            is_scattered=any(_is_scattered(blocks) for _, blocks in spans),
            kv_types=self._types(launches, "kv_cache"),
            weight_types=self._types((*launches, *by_host), "model"),
            kernels=tuple(dict.fromkeys(launch.kernel for launch in launches)),
            processes=() if self.pid is None else (self.pid,),
        )

    def input_of(self, step: Stepped, name: str) -> Int32s:
        """What the host had put into an input of a step."""
        for values in step.inputs:
            if self.tensors[values.tensor].name == name:
                found: Int32s = np.frombuffer(values.data, np.int32).reshape(values.shape)
                return found
        raise RecordCutShort(f"a step has no input {name}")

    def _span(self, step: Stepped, request: int) -> tuple[Int32s, Int32s]:
        """The positions of a request in a step, and the blocks that it reads and writes there."""
        row = next(r.row for r in step.requests if r.id == request)
        is_own = self.input_of(step, "sequence_rows") == row
        positions: Int32s = self.input_of(step, "positions")[is_own]
        num_tokens = int(positions[-1]) + 1
        tables = self.input_of(step, "block_tables")
        # Blocks have one size: of those that are filled each has as many slots.
        slots = self.input_of(step, "slots")[is_own]
        size = self._block_size(step, slots, positions, tables[row])
        return positions, tables[row, : -(-num_tokens // size)]

    def _block_size(self, step: Stepped, slots: Int32s, positions: Int32s, blocks: Int32s) -> int:
        """The tokens of a block, as the cache's own tensors have it."""
        for launch in self.plans[step.plan].launches:
            for fact in launch.facts:
                tensor = self.tensors.get(fact.tensor or 0)
                if tensor is not None and tensor.name.startswith("v_cache."):
                    return tensor.shape[2]
        return len(positions)

    def _num_sequences(self, step: Stepped) -> int:
        return len(np.unique(self.input_of(step, "sequence_rows")))

    def _types(self, launches: Sequence[LaunchRecord], owner: str) -> tuple[str, ...]:
        return tuple(sorted({tensor.dtype for tensor in self.tensors_given(launches, owner)}))

    def tensors_given(self, launches: Sequence[LaunchRecord], owner: str) -> Iterator[TensorRecord]:
        """The tensors of an owner that launches were given."""
        for fact in itertools.chain.from_iterable(launch.facts for launch in launches):
            tensor = self.tensors.get(fact.tensor or 0)
            if tensor is not None and tensor.owner == owner:
                yield tensor


def _is_scattered(blocks: Int32s) -> bool:
    return bool((np.diff(blocks) != 1).any())
