"""A runner and a tokenizer without a model: logits are a hash of the whole context, as cached.

The runner keeps token ids where a real one keeps keys and values, and reads them back through the
block tables; so a wrong slot, table, position or order changes the logits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hypocenter.base.errors import BadLogits
from hypocenter.base.results import Route
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, memory
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.batch import Batch, Chunk
from hypocenter.engine.drafting.ahead import ChainRow, DraftsAhead, WrittenRow
from hypocenter.engine.drafting.draft_model import DraftModel
from hypocenter.engine.drafting.drafter import CPU_COSTS
from hypocenter.engine.drafting.model_drafter import DraftRecord
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request
from hypocenter.engine.state_ledger import StateLedger, sequence_starts, spans_of
from hypocenter.kernels.sampling.draw import TokenChoice
from hypocenter.kernels.sampling.sampling import HostSampler, sample_reference
from hypocenter.settings.config import SamplingParams

VOCAB_SIZE = 61
END_ID = 0
#: A context that begins with this token has NaN among its logits, one with the next fails the step.
POISON_ID = 59
FAULT_ID = 60


def hashed_logits(context: Sequence[int], habit: float = 0.0) -> npt.NDArray[np.float32]:
    """The logits after `context`, f32 [VOCAB_SIZE].

    With `habit` they hang most on the last token, so that texts repeat themselves now and then.
    """
    seed = zlib.crc32(np.array(context, np.int32).tobytes())
    logits = np.random.default_rng(seed).normal(0, 2, VOCAB_SIZE).astype(np.float32)
    if habit:
        last = np.random.default_rng(context[-1]).normal(0, 2 * habit, VOCAB_SIZE)
        logits += last.astype(np.float32)
    if context[0] == POISON_ID:
        logits[3:5] = np.nan
    return logits


def expected_output(
    prompt: Sequence[int],
    params: SamplingParams,
    context_length: int,
    *,
    end: bool = True,
    habit: float = 0.0,
) -> list[int]:
    """What a request must yield, computed alone and without any engine."""
    tokens = list(prompt)
    limit = context_length if params.max_tokens is None else len(prompt) + params.max_tokens
    while len(tokens) < min(limit, context_length):
        output = tokens[len(prompt) :]
        ids = np.array(sorted(set(tokens)), np.int32)
        counts = np.array([output.count(token) for token in ids], np.int32)
        draw = TokenChoice(params, len(tokens), ids, counts)
        chosen = sample_reference(hashed_logits(tokens, habit)[None], [draw])[0]
        assert not isinstance(chosen, BadLogits)
        tokens.append(chosen)
        if chosen == END_ID and end:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """What the engine needs of a runner, with every demand on a batch checked."""

    vocab_size = VOCAB_SIZE
    token_ids = None  # on a device
    page_watch = None
    growth = None
    archive = None
    disk = None
    adapters = None

    def __init__(
        self,
        *,
        runs_ahead: bool = False,
        num_blocks: int = 64,
        block_size: int = 4,
        context_length: int = 128,
        max_batch_tokens: int = 16,
        max_batch_requests: int = 8,
        num_checkpoints: int | None = None,
        longrope_threshold: int | None = None,
        draft_max: int = 0,
        habit: float = 0.0,
        noise: float = 0.0,
    ) -> None:
        spec = "ngram" if draft_max else "off"
        self.config = SimpleNamespace(
            spec=spec, draft_max=draft_max, device="cpu", tries_tokens=draft_max > 0
        )
        self.drawn_rows = max(max_batch_requests, 1 + draft_max)
        self._habit, self._noise = habit, noise
        self.longrope_threshold = longrope_threshold
        self.runs_ahead, self.pace = runs_ahead, None
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.context_length = context_length
        self.arch = SimpleNamespace(  # trained for no more, and it writes
            name="fake",
            context_length=context_length,
            pooling=None,
            num_text_kinds=0,
            family=SimpleNamespace(sees_all=False),
        )
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_requests = max_batch_requests
        self.batches: list[Batch] = []
        #: What a device would have left in `token_ids`.
        self.chosen = np.zeros(0, np.int32)
        #: The token ids of a step, while drafts are put among them.
        self.filling = np.zeros(0, np.int32)
        #: With checkpoints its layers carry a state: the tokens themselves, by slot.
        has_states = num_checkpoints is not None
        per_request = 2 if draft_max else 1
        self.num_state_slots = max_batch_requests * per_request if has_states else 0
        self.num_checkpoints = num_checkpoints or 0
        self._states: dict[int, list[int]] = {}
        self._ledger = StateLedger(self.num_state_slots, self.num_checkpoints)
        # Token id, position, and whether it was turned as one of a long text.
        self._cached = np.full((num_blocks * block_size, 3), -1, np.int64)

    def route(self) -> Route:
        return Route("cpu", "none", "none", "none", "none", 1, ("fake",))

    def require_ranks(self) -> None:
        """It has no other ranks."""

    def run(self, batch: Batch) -> Tensor:
        self._check(batch)
        self.batches.append(batch)
        self.filling = known = batch.token_ids.copy()
        if batch.put_drafts is not None:
            batch.put_drafts()
        token_ids = self.chosen[: len(known)] if batch.ids_on_device else known
        self._cached[batch.slots, 0] = token_ids
        self._cached[batch.slots, 1] = batch.positions
        self._cached[batch.slots, 2] = batch.is_long
        if self.num_state_slots:
            self._carry(batch)
        contexts = [self._context(batch, row) for row in batch.logit_rows]
        if any(context[0] == FAULT_ID for context in contexts):
            raise RuntimeError("the device is on fire")
        logits = memory.allocate("logits", "fake", DType.F32, (len(contexts), VOCAB_SIZE))
        if contexts:
            copies.to_device(logits, np.stack([self._logits(context) for context in contexts]))
        return logits

    def _logits(self, context: Sequence[int]) -> npt.NDArray[np.float32]:
        """Those of the context, and with noise on them what a worse model makes of it."""
        logits = hashed_logits(context, self._habit)
        worse: npt.NDArray[np.float32] = logits + self._noise * hashed_logits([*context, 1])
        return worse

    def _carry(self, batch: Batch) -> None:
        """States are those of the tokens so far, and are left as those of the tokens by now."""
        states = batch.states
        assert states is not None
        self._ledger.name(states.named)
        self._ledger.check(states, batch.sequence_rows, batch.positions)
        starts = sequence_starts(batch.sequence_rows, len(states.slots))
        spans = spans_of(states, starts, batch.positions)
        read = [self._states.get(span.source, []) if span.start else [] for span in spans]
        for row, (span, before) in enumerate(zip(spans, read, strict=True)):
            context = self._context(batch, starts[row + 1] - 1)
            assert before == context[: span.start], "the state of other tokens"
            self._states[span.slot] = context
            if span.num_saved:
                self._states[span.checkpoint] = context[: span.num_saved]
        self._ledger.note(spans, is_whole=True)

    def _check(self, batch: Batch) -> None:
        num_tokens = len(batch.token_ids)
        assert 0 < num_tokens <= self.max_batch_tokens
        assert len(batch.block_tables) <= self.max_batch_requests
        for values in set(vars(type(batch))["__slots__"]) - {
            "requests",
            "ids_on_device",
            "put_drafts",
            "states",
            "is_long",
            "adapter_scales",
        }:
            array = getattr(batch, values)
            assert array.dtype == np.int32, values
            assert array.flags.c_contiguous, values
        for values in (batch.positions, batch.slots, batch.sequence_rows):
            assert values.shape == (num_tokens,)
        assert len(set(batch.slots)) == num_tokens
        blocks = batch.block_tables[batch.sequence_rows, batch.positions // self.block_size]
        assert (blocks >= 0).all()
        assert (batch.slots == blocks * self.block_size + batch.positions % self.block_size).all()

    def _context(self, batch: Batch, row: int) -> list[int]:
        positions = np.arange(batch.positions[row] + 1)
        table = batch.block_tables[batch.sequence_rows[row]]
        slots = table[positions // self.block_size] * self.block_size
        cached = self._cached[slots + positions % self.block_size]
        assert (cached[:, 1] == positions).all(), "a position was never written, or overwritten"
        assert (cached[:, 2] == batch.is_long).all(), "one text, turned in two ways"
        return [int(token) for token in cached[:, 0]]


class FakeDetokenizer:
    """Token 1 is "a", token 2 is "b", and so on."""

    def push(self, token_id: int) -> str:
        return chr(96 + token_id)

    def flush(self) -> str:
        return ""


class FakeTokenizer:
    end_ids = frozenset({END_ID})

    def shown_piece(self, token_id: int) -> bytes:
        return FakeDetokenizer().push(token_id).encode()

    def detokenizer(self, *, at_start: bool) -> FakeDetokenizer:
        assert not at_start, "an answer continues a text"
        return FakeDetokenizer()


class FakeChain:
    """What a device writes by itself, of which the host hears when it asks."""

    def __init__(self, model: FakeDraftModel, target: FakeRunner) -> None:
        self._model, self._target = model, target
        self.num_read = 0

    def write(
        self,
        logits: Tensor,
        rows: Sequence[ChainRow],
        draws: Sequence[Sequence[TokenChoice]],
        work: float | None,
    ) -> DraftsAhead:
        runner = cast(FakeRunner, self._model.runner)
        size, sampler = runner.block_size, HostSampler()
        drafts = np.zeros((len(draws), len(rows)), np.int32)
        for link, of_link in enumerate(draws):
            going_on = [row for row in rows if row.num > link]
            if link:
                positions = np.array([row.num_tokens + link - 1 for row in going_on], np.int32)
                tables = np.full((len(going_on), max(len(r.blocks) for r in rows)), -1, np.int32)
                for at, row in enumerate(going_on):
                    tables[at, : len(row.blocks)] = row.blocks
                each = np.arange(len(going_on), dtype=np.int32)
                blocks = tables[each, positions // size]
                runner.chosen = drafts[link - 1, : len(going_on)].copy()
                logits = runner.run(
                    Batch(
                        token_ids=np.zeros(len(going_on), np.int32),
                        positions=positions,
                        slots=blocks * size + positions % size,
                        sequence_rows=each,
                        block_tables=tables,
                        logit_rows=each,
                        ids_on_device=True,
                    )
                )
            found = sampler.sample(
                memory.rows(logits, 0, len(going_on)), of_link[: len(going_on)]
            )()
            drafts[link, : len(going_on)] = [max(token_id, 0) for token_id, _ in found]

        def read() -> npt.NDArray[np.int32]:
            self.num_read += 1
            return drafts

        def place(targets: npt.NDArray[np.int32], sources: npt.NDArray[np.int32]) -> None:
            assert not self._target.filling[targets].any()
            self._target.filling[targets] = drafts.reshape(-1)[sources]

        written = {row.request_id: WrittenRow(at, row.num) for at, row in enumerate(rows)}
        return DraftsAhead(written, read, place, max_rows=len(rows), num_ids=VOCAB_SIZE, work=work)


class FakeDraftModel(DraftModel):
    """A draft model on a FakeRunner, whose ids stay where a device would leave them."""

    target: FakeRunner

    def chain(self) -> Any:
        if self._chain is None:
            self._chain = cast(Any, FakeChain(self, self.target))
        return self._chain

    def _drawing(self, device: str) -> HostSampler:
        runner, sampler = cast(FakeRunner, self.runner), HostSampler()
        sample = sampler.sample

        def sampled(logits: Tensor, draws: Sequence[TokenChoice]) -> Any:
            found = sample(logits, draws)()
            runner.chosen = np.array([token_id for token_id, _ in found], np.int32)
            return lambda: found

        sampler.sample = sampled  # type: ignore[method-assign]
        return sampler


def fake_engine(
    *, prefix_cache: bool = True, draft: Mapping[str, Any] | None = None, **sizes: Any
) -> Engine:
    """An engine on a FakeRunner of the given sizes, with a draft model on another one of sizes as
    `draft` has them over these."""
    runner = FakeRunner(**sizes)
    model = None
    if draft is not None:
        drafting = FakeRunner(**{**sizes, "draft_max": 0, **draft})
        record = DraftRecord(CPU_COSTS, 0.1)
        model = FakeDraftModel(cast(Any, drafting), record, VOCAB_SIZE)
        model.target = runner
    engine = Engine(
        cast(Any, runner),
        cast(Any, FakeTokenizer()),
        prefix_cache=prefix_cache,
        draft_model=model,
    )
    sample = engine._steps.sampler.sample

    def sampled(logits: Tensor, chunks: Sequence[Chunk]) -> Callable[[], list[int | BadLogits]]:
        outcomes = sample(logits, chunks)()
        ids = [0 if isinstance(one, BadLogits) else one for one in outcomes]
        runner.chosen = np.array(ids, np.int32)
        return lambda: outcomes

    engine._steps.sampler.sample = sampled  # type: ignore[method-assign]
    return engine


def batches_of(engine: Engine) -> list[Batch]:
    """Every batch that the engine's runner has run."""
    return cast(FakeRunner, engine.runner).batches


def finish(engine: Engine, *requests: Request) -> int:
    """Run them to their ends; how many tokens that took."""
    for request in requests:
        engine.submit(request)
    num_tokens = 0
    while ran := engine.step():
        num_tokens += ran
        engine.check_integrity()
    assert all(request.done for request in requests)
    return num_tokens


def run(engine: Engine, prompt: list[int], params: SamplingParams, **more: Any) -> Request:
    """Run a request alone to its end."""
    request = engine.request(prompt, params, RequestTerms(**more))
    finish(engine, request)
    return request
