"""A request of the server's own, now and then and after each restart, whose tokens are known.

The tokens that the first worker gave are kept, and every later answer must be the same: weights,
kernels and the KV cache of a worker are then still what they were. Where one is not, the worker is
ended as one that died of a fault, and the next one reads weights and prompts anew.

The prompt never comes from the prefix cache, and its answer is none of a client's: no metric of
requests counts it, and it takes no client's place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hypocenter.server.fleet.replica import Replica
from hypocenter.server.generation import Generation, WorkerEvent
from hypocenter.server.operating.log import tell
from hypocenter.server.supervisor import Supervisor
from hypocenter.settings.config import SamplingParams
from hypocenter.wire.messages import Failed, Piece, ServedModel

#: Tokens of the prompt, which fill three blocks, and of the answer.
NUM_PROMPT, NUM_ANSWER = 48, 16
#: Steps through the vocabulary that meet each id before one comes again (a prime).
_STRIDE = 7919
_LOOK_SECONDS = 0.5
#: How long its answer may take, beside requests of others.
_ANSWER_SECONDS = 300.0

CanaryWord = Literal["not asked yet", "same", "changed", "no answer"]


@dataclass(frozen=True, slots=True)
class CanaryState:
    """What the last canary said, and when by the wall clock; `problem`: what differs."""

    said: CanaryWord = "not asked yet"
    at: float = 0.0
    num_asked: int = 0
    problem: str = ""


class Canary:
    """`state` is what the last one said, of any replica. `on_event` hears of each that says
    `changed`."""

    def __init__(
        self,
        supervisor: Supervisor,
        minutes: float,
        on_event: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._supervisor, self._seconds, self._on_event = supervisor, minutes * 60, on_event
        self.state = CanaryState()
        #: Of each replica, since cards may differ.
        self._expected: dict[int, tuple[int, ...]] = {}
        #: Replicas whose worker was replaced for it, and none has said `same` there since.
        self._replaced: set[int] = set()

    def follow(self, supervisor: Supervisor) -> None:
        """The model has been loaded again; it is to give the same tokens."""
        self._supervisor = supervisor
        self._replaced.clear()

    async def run(self) -> None:
        """Ask again and again, until this is cancelled."""
        replicas = self._supervisor.replicas
        await asyncio.gather(*(self._ask_again(replica) for replica in replicas))

    async def _ask_again(self, replica: Replica) -> None:
        asked_pid, asked_at = None, -1e9
        while True:
            pid = replica.life.pid if replica.is_ready and replica.life else None
            is_due = time.monotonic() - asked_at >= self._seconds
            if replica.facts is not None and replica.facts.pooling:
                return  # it answers nothing
            if pid is not None and (is_due or pid != asked_pid):
                asked_pid, asked_at = pid, time.monotonic()
                await self.ask(replica)
            await asyncio.sleep(_LOOK_SECONDS)

    async def ask(self, replica: Replica) -> CanaryState:
        """One canary of a replica that is ready; returns what it said."""
        facts = replica.facts
        assert facts is not None, "its worker is ready"
        found = await self._answer(replica, facts)
        now, number = time.time(), self.state.num_asked + 1
        if not isinstance(found, tuple):
            self.state = CanaryState("no answer", now, number, found)
            tell(logging.WARNING, "canary_unanswered", f"the canary got no answer: {found}")
            return self.state
        expected = self._expected.setdefault(replica.number, found)
        if found == expected:
            self.state = CanaryState("same", now, number)
            self._replaced.discard(replica.number)
            return self.state
        at = next(n for n, (old, new) in enumerate(zip(expected, found, strict=True)) if old != new)
        problem = f"token {at + 1} of {NUM_ANSWER} is {found[at]}, but was {expected[at]}"
        self.state = CanaryState("changed", now, number, problem)
        self._on_event("canary_changed")
        self._replace(replica, problem)
        return self.state

    def _replace(self, replica: Replica, problem: str) -> None:
        pid = replica.life.pid if replica.life else None
        told = f"the canary of worker {pid} changed: {problem}"
        if replica.number in self._replaced:
            message = f"{told}; another worker gave that too, with weights read anew"
            tell(logging.ERROR, "canary_changed", message, pid=pid)
            return
        self._replaced.add(replica.number)
        message = f"{told}; it is replaced, and the next one reads weights and prompts anew"
        tell(logging.ERROR, "canary_changed", message, pid=pid)
        self._supervisor.distrust_worker(replica)

    async def _answer(self, replica: Replica, facts: ServedModel) -> tuple[int, ...] | str:
        """The tokens of an answer, or why there is none."""
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def listen(generation: Generation, event: WorkerEvent) -> None:
            if ended.done():
                return
            match event:
                case Failed():
                    ended.set_result(event.message)
                case Piece() if event.ending is not None:
                    cut = event.ending.reason
                    ended.set_result("" if len(generation.output_ids) == NUM_ANSWER else cut)

        number = self._supervisor.next_id()
        params = SamplingParams(max_tokens=NUM_ANSWER, temperature=0.0, seed=0, ignore_eos=True)
        length = min(NUM_PROMPT, facts.context_length - NUM_ANSWER)
        prompt = tuple((1 + _STRIDE * place) % facts.vocab_size for place in range(length))
        generation = Generation(
            number,
            "canary",
            params,
            prompt,
            cache_salt=f"canary {number}",
            canary_of=replica.number,
            listener=listen,
        )
        self._supervisor.submit(generation)
        try:
            problem = await asyncio.wait_for(ended, _ANSWER_SECONDS)
        except TimeoutError:
            problem = f"none within {_ANSWER_SECONDS:.0f} s"
        finally:
            self._supervisor.cancel(generation)
        return problem or tuple(generation.output_ids)
