"""The server's own prompt: asked on time, compared with what the first worker gave, told of."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from hypocenter.server import canary as canaries
from hypocenter.server.canary import NUM_ANSWER, Canary, CanaryState
from hypocenter.server.generation import Generation
from hypocenter.wire.messages import Ending, Failed, Piece

SAME = tuple(range(5, 5 + NUM_ANSWER))


class Facts:
    context_length, vocab_size, pooling = 4096, 300, ""


class PretendedReplica:
    number = 0
    facts: Any = Facts()
    is_ready = True

    def __init__(self) -> None:
        self.life = types.SimpleNamespace(pid=1)


class PretendedSupervisor:
    """Answers each generation with what `tokens` has next, and counts who was distrusted."""

    def __init__(self, *answers: tuple[int, ...] | str) -> None:
        self.answers = list(answers)
        self.asked: list[Generation] = []
        self.replica = PretendedReplica()
        self.replicas = (self.replica,)
        self.num_distrusted = 0
        self.cancelled: list[Generation] = []

    def next_id(self) -> int:
        return len(self.asked) + 1

    def submit(self, generation: Generation) -> None:
        self.asked.append(generation)
        if not self.answers:
            return
        answer = self.answers.pop(0)
        if isinstance(answer, str):
            generation.take(Failed(generation.id, "WorkerGone", answer))
            return
        *before, last = answer
        for token in before:
            generation.take(Piece(generation.id, "", (token,)))
        generation.take(Piece(generation.id, "", (last,), ending=Ending("length")))

    def cancel(self, generation: Generation) -> None:
        self.cancelled.append(generation)

    def distrust_worker(self, replica: PretendedReplica) -> None:
        self.num_distrusted += 1
        replica.life.pid += 1


def make(
    supervisor: PretendedSupervisor, minutes: float = 10.0, events: list[str] | None = None
) -> Canary:
    told = [] if events is None else events
    return Canary(supervisor, minutes, told.append)  # type: ignore[arg-type]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def ask(canary: Canary, times: int = 1) -> list[CanaryState]:
    [replica] = canary._supervisor.replicas

    async def work() -> list[CanaryState]:
        return [await canary.ask(replica) for _ in range(times)]

    found: list[CanaryState] = run(work())
    return found


def test_the_first_answer_is_what_later_ones_must_be() -> None:
    supervisor = PretendedSupervisor(SAME, SAME)
    canary = make(supervisor, events=(events := list[str]()))
    assert canary.state.said == "not asked yet"
    assert [state.said for state in ask(canary, 2)] == ["same", "same"]
    assert (canary.state.num_asked, supervisor.num_distrusted, events) == (2, 0, [])
    first, second = supervisor.asked
    assert first.prompt_ids == second.prompt_ids
    assert first.cache_salt != second.cache_salt, "the cache would answer in the model's place"
    assert all(generation.watcher is None for generation in supervisor.asked)


def test_one_token_that_differs_costs_the_worker_its_place() -> None:
    changed = (*SAME[:7], 99, *SAME[8:])
    supervisor = PretendedSupervisor(SAME, changed, SAME)
    canary = make(supervisor, events=(events := list[str]()))
    _, state, after = ask(canary, 3)
    assert (state.said, state.problem) == ("changed", "token 8 of 16 is 99, but was 12")
    assert (supervisor.num_distrusted, events) == (1, ["canary_changed"])
    assert (after.said, after.problem) == ("same", "")


def test_each_replica_has_tokens_of_its_own() -> None:
    another = SAME[::-1]
    supervisor = PretendedSupervisor(SAME, another, SAME, SAME)
    second = PretendedReplica()
    second.number = 1
    replicas = (supervisor.replica, second, supervisor.replica, second)
    canary = make(supervisor)

    async def work() -> list[str]:
        return [(await canary.ask(replica)).said for replica in replicas]  # type: ignore[arg-type]

    assert run(work()) == ["same", "same", "same", "changed"]
    assert [generation.canary_of for generation in supervisor.asked] == [0, 1, 0, 1]
    assert (supervisor.replica.life.pid, second.life.pid) == (1, 2), "whose tokens changed goes"


def test_workers_are_not_replaced_for_ever() -> None:
    changed = SAME[::-1]
    supervisor = PretendedSupervisor(SAME, changed, changed, changed, SAME, changed)
    canary = make(supervisor)
    assert [state.said for state in ask(canary, 4)] == ["same", *["changed"] * 3]
    assert supervisor.num_distrusted == 1
    ask(canary, 2)
    assert supervisor.num_distrusted == 2, "one has said the same since"


@pytest.mark.parametrize(("answer", "problem"), [("no worker", "no worker"), (SAME[:3], "length")])
def test_no_answer_says_nothing_of_the_worker(answer: Any, problem: str) -> None:
    supervisor = PretendedSupervisor(SAME, answer, SAME)
    canary = make(supervisor)
    _, state, after = ask(canary, 3)
    assert (state.said, state.problem) == ("no answer", problem)
    assert (after.said, supervisor.num_distrusted) == ("same", 0)


def test_an_answer_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canaries, "_ANSWER_SECONDS", 0.05)
    supervisor = PretendedSupervisor()
    [state] = ask(make(supervisor))
    assert state.said == "no answer"
    assert supervisor.cancelled == supervisor.asked


def test_it_is_asked_on_time_and_after_each_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canaries, "_LOOK_SECONDS", 0.001)
    now = [1000.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0])
    monkeypatch.setattr(canaries, "time", clock)
    supervisor = PretendedSupervisor(*[SAME] * 9)

    async def work() -> list[int]:
        asking = asyncio.create_task(make(supervisor, minutes=1.0).run())
        counts = []
        steps: list[Callable[[], None]] = [
            lambda: None,
            lambda: now.__setitem__(0, now[0] + 59.0),
            lambda: now.__setitem__(0, now[0] + 1.0),
            lambda: setattr(supervisor.replica, "is_ready", False),
            lambda: now.__setitem__(0, now[0] + 61.0),
            lambda: setattr(supervisor.replica.life, "pid", 2),
            lambda: setattr(supervisor.replica, "is_ready", True),
        ]
        for step in steps:
            step()
            for _ in range(20):
                await asyncio.sleep(0.001)
            counts.append(len(supervisor.asked))
        asking.cancel()
        return counts

    assert asyncio.run(work()) == [1, 1, 2, 2, 2, 2, 3]


def test_a_model_that_writes_nothing_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canaries, "_LOOK_SECONDS", 0.001)
    supervisor = PretendedSupervisor(SAME)
    supervisor.replica.facts = types.SimpleNamespace(pooling="mean")
    asyncio.run(asyncio.wait_for(make(supervisor, minutes=1.0).run(), 5))
    assert supervisor.asked == []
