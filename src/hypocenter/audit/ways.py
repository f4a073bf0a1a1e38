"""Runs requests of one model in one way, and reads their results and their routes.

Results are taken where the runner leaves them, behind each step; routes come from the record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hypocenter.audit.compare import AuditedRun
from hypocenter.audit.executed import Executed, OwnRecord, Stretch
from hypocenter.base.dtypes import Array, Float32s
from hypocenter.base.tensor import Tensor
from hypocenter.device import copies
from hypocenter.device.plan import Plan
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.batch import Batch
from hypocenter.engine.llm import LLM
from hypocenter.engine.request import Request
from hypocenter.settings.config import KV_DTYPES, SamplingParams
from hypocenter.verify.steps import prompt


@dataclass(slots=True)
class Tap:
    """Keeps what steps leave of each request, by position; `planted` is as in AuditedRun."""

    width: int
    #: Whether an error is planted: not while steps run ahead, whose results move on.
    plants: bool = True
    rows: dict[int, dict[int, Float32s]] = field(default_factory=dict)
    planted: dict[int, tuple[int, Float32s]] = field(default_factory=dict)

    def after(self, plan: Plan, batch: Batch) -> None:
        """Look at the step that was launched; waits for it."""
        if not (num_rows := len(batch.logit_rows)):
            return
        found: Array = copies.to_host(plan.result, num_rows)
        ids = {record.row: record.id for record in batch.requests}
        places = [
            (ids[int(batch.sequence_rows[at])], int(batch.positions[at])) for at in batch.logit_rows
        ]
        for (request, position), row in zip(places, found[:, : self.width], strict=True):
            self.rows.setdefault(request, {})[position] = row.copy()
        if self.plants:
            self._plant(plan.result, found, places)

    def _plant(self, held: Tensor, found: Array, places: Sequence[tuple[int, int]]) -> None:
        """Change an element where the device holds it, read it again, and put it back."""
        for row, (request, position) in enumerate(places):
            if request in self.planted:
                continue
            changed, column = found.copy(), (7 * position + request) % self.width
            changed[row, column] = np.nextafter(changed[row, column], np.float32(np.inf))
            copies.to_device(held, changed)
            again = copies.to_host(held, len(found))[row, : self.width]
            self.planted[request] = position, again.copy()
            copies.to_device(held, found)


class Ways:
    """Runs requests of one loaded model. `device` and `processes` are what was asked for."""

    def __init__(self, llm: LLM, record: OwnRecord, name: str) -> None:
        self.llm, self.name = llm, name
        self.runner = llm.engine.runner
        self.record = record
        self.writes = self.runner.arch.pooling is None
        dtype = KV_DTYPES[self.runner.config.kv_dtype].name
        #: What is asked of all its requests.
        self.asked: dict[str, Any] = {
            "devices": self._launching_devices,
            "weight_types": frozenset(dtype.name for dtype in self.runner.weights.dtypes),
        }
        if self.runner.arch.attention_layers:
            self.asked["kv_types"] = (dtype,)

    @property
    def _launching_devices(self) -> tuple[str, ...]:
        """The devices that launch in a step: the host too, where it has experts."""
        config = self.runner.config
        return tuple(sorted({config.device, *(["cpu"] if config.num_host_layers else [])}))

    @property
    def width(self) -> int:
        """Columns of a result."""
        has_logits = self.runner.weights.makes_logits
        return self.runner.vocab_size if has_logits else self.runner.arch.width

    def ids(self, length: int, seed: int = 0) -> list[int]:
        """A fixed prompt."""
        return [int(token) for token in prompt(self.runner.vocab_size, length, seed)]

    def reading(self, ids: Sequence[int]) -> Request:
        """A request whose every token leaves its logits; or the vector of a text."""
        terms = RequestTerms(keeps_logits=True) if self.writes else RequestTerms(embeds=True)
        params = SamplingParams(max_tokens=0)
        return self.llm.engine.request(ids, params, terms)

    def answering(self, ids: Sequence[int], num_tokens: int, **fields: Any) -> Request:
        """A request that chooses so many tokens."""
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **fields)
        return self.llm.engine.request(ids, params)

    def run(
        self,
        name: str,
        requests: Sequence[Request],
        asked: Mapping[str, Any],
        *,
        chunk: int | None = None,
        before_step: Callable[[], None] = lambda: None,
    ) -> AuditedRun:
        """Run requests together, the last of which is looked at, in steps of at most `chunk`
        tokens. Raises what they end by, and RecordCutShort."""
        rans, _ = self.run_each(name, requests, asked, chunk=chunk, before_step=before_step)
        return rans[-1]

    def run_each(
        self,
        name: str,
        requests: Sequence[Request],
        asked: Mapping[str, Any],
        *,
        chunk: int | None = None,
        before_step: Callable[[], None] = lambda: None,
    ) -> tuple[list[AuditedRun], Stretch]:
        """The same of all of them, and what was recorded meanwhile."""
        mark, tap = self.record.mark(), Tap(self.width)
        with self._watching(tap, chunk):
            self._drive(requests, before_step)
        stretch = self.record.since(mark)
        return [self._ran(name, request, asked, tap, stretch) for request in requests], stretch

    def quietly(self, requests: Sequence[Request]) -> Stretch:
        """Run requests and look at nothing of them but the record."""
        mark = self.record.mark()
        self._drive(requests, lambda: None)
        return self.record.since(mark)

    def _drive(self, requests: Sequence[Request], before_step: Callable[[], None]) -> None:
        engine = self.llm.engine
        for request in requests:
            engine.submit(request)
        try:
            while not all(request.done for request in requests):
                before_step()
                engine.step()
        finally:
            for request in requests:
                engine.cancel(request)
        for request in requests:
            engine.result(request)

    @contextlib.contextmanager
    def _watching(self, tap: Tap, chunk: int | None) -> Iterator[None]:
        scheduler, runner = self.llm.engine.scheduler, self.runner
        before = scheduler.max_batch_tokens
        scheduler.max_batch_tokens = chunk or before
        runner.after_step = tap.after
        try:
            yield
        finally:
            scheduler.max_batch_tokens = before
            runner.after_step = None

    def _ran(
        self, name: str, request: Request, asked: Mapping[str, Any], tap: Tap, stretch: Stretch
    ) -> AuditedRun:
        rows = tap.rows.get(request.id, {})
        positions = tuple(sorted(rows))
        stacked = np.array([rows[position] for position in positions], np.float32)
        return AuditedRun(
            f"{self.name}: {name}",
            {**self.asked, **asked},
            self._route_of(request.id, stretch),
            positions,
            stacked,
            tuple(request.output_ids),
            tap.planted.get(request.id),
        )

    def _route_of(self, request: int, stretch: Stretch) -> Executed:
        executed, ranks = stretch.of_request(request), self.runner.ranks
        if ranks is None:
            return executed
        return self.record.with_ranks(executed, request, ranks.processes)
