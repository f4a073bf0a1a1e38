"""The gates of one loaded model: each says how the same requests run on its two sides."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypocenter.audit.compare import AuditedRun
from hypocenter.audit.executed import CannotRun
from hypocenter.audit.gates import Gate
from hypocenter.audit.ways import Ways
from hypocenter.device import devices
from hypocenter.device.plan import CAPTURED_MODES
from hypocenter.engine.request import Request
from hypocenter.settings.config import is_simulated
from hypocenter.verify.outcome import Uncovered
from hypocenter.verify.rounding import reach_of_rounding

#: Sampling by which answers are drawn, so that any other bit may show in a token.
_DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 59}
_ALL_AT_ONCE = "this model reads a text at once and writes none"


@dataclass(frozen=True, slots=True)
class AuditSizes:
    """How many tokens run: of a prompt that is read, of one that is answered and of its answer,
    of steps; and how many requests together."""

    read: int
    asked: int
    answered: int
    chunks: tuple[int, ...]
    batches: tuple[int, ...]
    #: Whether they are small, since a processor stands for a GPU.
    is_simulated: bool = False

    @property
    def most_together(self) -> int:
        return max(self.batches, default=0)

    def num_first(self, number: int) -> int:
        """Tokens of the first step of a batch of so many requests."""
        return self.asked + sum(length_beside(seed) for seed in range(1, number))


def length_beside(seed: int) -> int:
    """Tokens of the prompt of a request that runs beside the one that is looked at."""
    return 2 + seed % 7


USUAL = AuditSizes(96, 24, 8, (1, 7, 64), (2, 3, 8, 16, 32, 64))
#: Where a processor stands for a GPU.
SIMULATED = AuditSizes(20, 6, 3, (7,), (2, 5), is_simulated=True)


class OwnGates:
    """Gates that need nothing but the model as it is loaded."""

    def __init__(self, ways: Ways, sizes: AuditSizes, distance_allowed: float) -> None:
        self.ways, self.sizes, self._allowed = ways, sizes, distance_allowed
        self._is_simulated = is_simulated(ways.runner.config.device)

    def each(self) -> Iterator[Gate]:
        """All of them, in an order in which the first prompt that is read finds an empty cache."""
        yield self._chunks()
        yield self._pages()
        yield self._decode()
        yield self._batch()
        yield self._graphs()
        yield self._forms()

    @functools.cached_property
    def whole(self) -> AuditedRun:
        """A prompt in one step, in blocks that follow each other."""
        return self.read("at once", self.sizes.read)

    def read(self, name: str, length: int, chunk: int | None = None, **asked: Any) -> AuditedRun:
        """The fixed prompt, read in steps of `chunk` tokens."""
        size = chunk or length
        chunks = tuple(min(size, length - start) for start in range(0, length, size))
        request = self.ways.reading(self.ways.ids(length))
        asked = {"length": length, "chunks": chunks, **asked}
        return self.ways.run(name, [request], asked, chunk=chunk)

    def _chunks(self) -> Gate:
        def pairs() -> Iterator[tuple[AuditedRun, AuditedRun]]:
            for chunk in self.sizes.chunks:
                yield self.whole, self.read(f"steps of {chunk}", self.sizes.read, chunk)

        why_not = None if self.ways.writes else _ALL_AT_ONCE
        read, usual = self.sizes.read, SIMULATED if self.sizes.is_simulated else USUAL
        left = [chunk for chunk in usual.chunks if chunk >= read]
        why = f"the context and a step hold prompts of {read} tokens"
        uncovered = tuple(Uncovered(f"steps of {chunk} tokens", why) for chunk in left)
        asks = "does a prompt give the same bits in one step and in several?"
        return Gate("chunks", asks, "chunks", pairs, why_not=why_not, uncovered=uncovered)

    def _pages(self) -> Gate:
        def pairs() -> Iterator[tuple[AuditedRun, AuditedRun]]:
            one = self.read("blocks in a row", self.sizes.read, is_scattered=False)
            size = self.ways.runner.block_size
            num_blocks = -(-self.sizes.read // size)
            # Each takes a block, and they give them back in the order in which they came.
            others = [self.ways.reading(self.ways.ids(1, seed)) for seed in range(num_blocks + 1)]
            self.ways.quietly(others)
            yield one, self.read("scattered blocks", self.sizes.read, is_scattered=True)

        why_not = None
        if not self.ways.runner.arch.attention_layers:
            why_not = "no layer of this model keeps keys and values"
        elif not self.ways.writes:
            why_not = _ALL_AT_ONCE
        elif self.sizes.read <= self.ways.runner.block_size:
            why_not = f"a block of the cache holds all {self.sizes.read} tokens of the prompt"
        asks = "do keys and values in scattered blocks give the bits of blocks in a row?"
        return Gate("pages", asks, "is_scattered", pairs, why_not=why_not)

    def answer(self, name: str, others: Sequence[Request] = (), **asked: Any) -> AuditedRun:
        """The fixed prompt and its drawn answer, beside others."""
        sizes, ways = self.sizes, self.ways
        request = ways.answering(ways.ids(sizes.asked), sizes.answered, **_DRAWN)
        length = sizes.asked + sizes.answered - 1
        return ways.run(name, [*others, request], {"length": length, **asked})

    def _decode(self) -> Gate:
        def pairs() -> Iterator[tuple[AuditedRun, AuditedRun]]:
            sizes, ways = self.sizes, self.ways
            steps = (sizes.asked, *[1] * (sizes.answered - 1))
            answer = self.answer("token by token", chunks=steps)
            ids = [*ways.ids(sizes.asked), *answer.token_ids[:-1]]
            request = ways.reading(ids)
            length = sizes.asked + sizes.answered - 1
            asked = {"length": length, "chunks": (length,)}
            yield ways.run("prompt and answer read", [request], asked), answer

        why_not = None if self.ways.writes else _ALL_AT_ONCE
        asks = "do tokens that are chosen one by one have the logits that reading them gives?"
        return Gate("decode", asks, "chunks", pairs, why_not=why_not)

    def _batch(self) -> Gate:
        most, sizes = self.ways.runner.max_batch_requests, self.sizes
        batches = [number for number in sizes.batches if number <= most]

        def pairs() -> Iterator[tuple[AuditedRun, AuditedRun]]:
            alone = self.together(1)
            for number in batches:
                yield alone, self.together(number)

        uncovered = []
        if sizes.most_together > max(batches, default=0):
            limit = f"the engine takes {most} requests at once"
            uncovered.append(Uncovered(f"{sizes.most_together} requests together", limit))
        if sizes.most_together < USUAL.most_together:
            why = f"a step takes {self.ways.runner.config.step_tokens} tokens"
            if sizes.is_simulated:
                why = "where a processor stands for a GPU they take too long; ask by --long"
            uncovered.append(Uncovered(f"{USUAL.most_together} requests together", why))
        asks = "has a request the same bits alone and among others?"
        return Gate(
            "batch",
            asks,
            "num_sequences",
            pairs,
            why_not=None if batches else "a step does not take a second request",
            uncovered=tuple(uncovered),
        )

    def together(self, number: int) -> AuditedRun:
        """The fixed request in a batch of so many, of other lengths and other tokens."""
        ways, sizes = self.ways, self.sizes
        seeds, name = range(1, number), "alone" if number == 1 else f"among {number}"
        if not ways.writes:
            others = [ways.reading(ways.ids(length_beside(seed), seed)) for seed in seeds]
            request = ways.reading(ways.ids(sizes.asked))
            asked = {"length": sizes.asked, "num_sequences": number}
            return ways.run(name, [*others, request], asked)
        others = [
            ways.answering(ways.ids(length_beside(seed), seed), 2 * sizes.answered, **_DRAWN)
            for seed in seeds
        ]
        return self.answer(name, others, num_sequences=number)

    def _graphs(self) -> Gate:
        ways, device = self.ways, self.ways.runner.config.device

        def pairs() -> Iterator[tuple[AuditedRun, AuditedRun]]:
            eager = self._eager()
            for _ in range(2):  # a plan is captured when it runs for the second time
                self.answer("before a graph")
            yield eager, self.answer("graphs", replays="all")

        why_not = None if ways.writes else _ALL_AT_ONCE
        if device == "cpu":
            why_not = "a CPU has no graphs"
        elif not devices.backend_captures(device):
            why_not = f"{device} captures none here"
        elif (mode := ways.runner.config.launch_mode) not in CAPTURED_MODES:
            why_not = f"launches that are {mode} are in no graph"
        asks = "do replayed graphs give the bits of launches that are made one by one?"
        return Gate("graphs", asks, "replays", pairs, why_not=why_not)

    def _eager(self) -> AuditedRun:
        """An answer each step of which has a new plan, so that none is a graph."""
        ways, sizes = self.ways, self.sizes
        runner = ways.runner
        request = ways.answering(ways.ids(sizes.asked), sizes.answered, **_DRAWN)
        asked = {"length": sizes.asked + sizes.answered - 1, "replays": "none"}
        runs_ahead, runner.runs_ahead = runner.runs_ahead, False
        try:
            return ways.run("eager", [request], asked, before_step=lambda: runner.take_routes({}))
        finally:
            runner.runs_ahead = runs_ahead
            runner.take_routes({})

    def _forms(self) -> Gate:
        runner = self.ways.runner
        ops = dict.fromkeys(("norm", "gate", "rope"), "parts")

        def pairs() -> Iterator[tuple[AuditedRun, AuditedRun]]:
            fused = self.read("fused", self.sizes.asked)
            if not runner.ops_of_two_forms():
                raise CannotRun("no op of this model has a fused form here")
            runner.take_routes(ops)
            try:
                yield fused, self.read("in parts", self.sizes.asked)
            finally:
                runner.take_routes({})

        asks = "do ops in parts give what the fused ones do?"
        allowed = None if runner.config.device == "cpu" else self._allowed
        read = functools.partial(self.read, "fused", self.sizes.asked)
        reach = functools.partial(reach_of_rounding, runner, lambda: read().rows)
        return Gate("forms", asks, "kernels", pairs, allowed, reach=reach)
