"""What the supervisor makes of workers that die, with workers that are only pretended."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hypocenter import EngineConfig, SamplingParams
from hypocenter.base.results import TokenLogprob
from hypocenter.server import worker_line as worker_lines
from hypocenter.server.fleet import replica as replicas
from hypocenter.server.fleet.replica import MAX_FAILED_STARTS, CannotStart
from hypocenter.server.generation import AnswerOrder, Generation, WorkerEvent
from hypocenter.server.inquiry import JOINED_TOKENS, Inquiry
from hypocenter.server.supervisor import MAX_BLAMED, QUARANTINED, WORKER_GONE, Supervisor
from hypocenter.server.turns.places import MAX_UNTAKEN
from hypocenter.server.worker_life import KEEPER, WORKER, Orders, forms_name, is_fault
from hypocenter.watch.child import Deadlines, Ended
from hypocenter.wire.logprobs import pack_logprobs, unpack_logprobs
from hypocenter.wire.messages import (
    Accepted,
    Ask,
    Cancel,
    Dropped,
    Ending,
    EngineState,
    Failed,
    FormRead,
    KeptWeights,
    Loading,
    News,
    Piece,
    ReadForm,
    Ready,
    ServedModel,
    StandingBy,
    Submit,
    Told,
    WeightsWhole,
)

FACTS = msgspec.structs.replace(
    msgspec.convert(
        {one.name: {str: "", int: 1}[one.type] for one in msgspec.structs.fields(ServedModel)},
        ServedModel,
    ),
    context_length=1000,
    max_requests=10,
    block_size=16,
    num_blocks=1000,
    step_tokens=512,
)
ORDERS = Orders(
    "model.gguf", EngineConfig(device="cpu"), Deadlines(), Path("/nowhere"), has_spare=False
)


def ended(code: int | None = None, number: int | None = None, **more: Any) -> Ended:
    return Ended(("worker",), 1, code, number, "", 0.0, 1.0, 0.0, **more)


KILLED, FAULT = ended(number=signal.SIGKILL), ended(number=signal.SIGSEGV)


class PretendedLife:
    """A worker that does what `behave` says for each message it is sent."""

    behave: Callable[[PretendedLife, Any], None]
    starts: list[PretendedLife]
    is_broken = False

    def __init__(
        self,
        number: int,
        orders: Orders,
        hear: Any,
        note_late: Any,
        note_end: Any,
        left: Any,
        program: Any,
    ) -> None:
        self.number, self.sent, self.program = number, list[Any](), program
        self.be_late = note_late
        self.begun = list[KeptWeights | None]()
        self.pid = 1000 + number
        self.say, self._note_end = hear, note_end
        self.is_dead = False
        self.memory: int | None = None
        self.is_first = self.waits = False
        self.kv_tokens: int | None = None
        self.starts.append(self)

    async def start(self) -> None:
        if self.is_broken:
            asyncio.get_running_loop().call_soon(self.die, ended(code=2))

    def begin(
        self,
        kept: KeptWeights | None,
        block_memory: str = "",
        config: EngineConfig | None = None,
        *,
        is_first: bool = False,
        waits: bool = False,
    ) -> None:
        self.begun.append(kept)
        self.is_first, self.waits = is_first, waits
        self.kv_tokens = None if config is None else config.kv_tokens
        self.memory = os.stat(block_memory).st_ino if block_memory else None
        if not self.is_broken and self.program == WORKER:
            message = StandingBy(0.1) if waits else Ready(FACTS, 0.1)
            asyncio.get_running_loop().call_soon(self.say, message)

    @property
    def has_begun(self) -> bool:
        return bool(self.begun)

    def take_over(self, block_memory: str) -> None:
        self.waits = False
        self.memory = os.stat(block_memory).st_ino if block_memory else None
        asyncio.get_running_loop().call_soon(self.say, Ready(FACTS, 0.1))

    def send(self, message: Any) -> None:
        self.sent.append(message)
        asyncio.get_running_loop().call_soon(self._behave_unless_dead, message)

    def _behave_unless_dead(self, message: Any) -> None:
        if not self.is_dead:
            type(self).behave(self, message)

    def piece(self, number: int, token_id: int, ending: str | None = None) -> None:
        end = Ending(ending) if ending else None
        pieces = (Piece(number, f"{token_id} ", (token_id,), ending=end),)
        self.say(News(pieces, EngineState()))

    def die(self, how: Ended = FAULT) -> None:
        self.is_dead = True
        self._note_end(how)

    async def stop(self, seconds: float) -> None:
        self.is_dead = True

    def kill(self) -> None:
        if not self.is_dead:
            asyncio.get_running_loop().call_soon(self.die, KILLED)

    def abort(self) -> None:
        asyncio.get_running_loop().call_soon(self.die, ended(number=signal.SIGABRT))

    def seconds_in_step(self, now: float) -> None:
        return None


class PretendedReader:
    """A reader to which every text is as many tokens as it has characters."""

    async def start(self) -> None:
        pass

    async def answer(self, question: Ask | ReadForm) -> Told | FormRead | Failed:
        if isinstance(question, ReadForm):
            return FormRead(question.id, question.text)
        return Told(question.id, token_ids=tuple(map(ord, question.text or "")))

    async def close(self) -> None:
        pass


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> type[PretendedLife]:
    class Life(PretendedLife):
        starts: list[PretendedLife] = []  # noqa: RUF012
        behave = staticmethod(lambda life, message: None)

    monkeypatch.setattr(worker_lines, "WorkerLife", Life)
    monkeypatch.setattr(replicas, "_PAUSES", (0.0,))
    return Life


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def generation(supervisor: Supervisor, events: list[WorkerEvent]) -> Generation:
    one = Generation(supervisor.next_id(), "r", SamplingParams(seed=1), prompt=(5, 6))
    one.listener = lambda generation, event: events.append(event)
    return one


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)


def make(counted: list[str] | None = None, orders: Orders = ORDERS) -> Supervisor:
    return Supervisor(
        orders,
        on_left=lambda runs, how: None,
        on_event=lambda what, replica: None if counted is None else counted.append(what),
        make_reader=lambda reads_forms: PretendedReader(),
    )


def pid_of(supervisor: Supervisor) -> int | None:
    worker = supervisor.replicas[0].life
    return worker.pid if worker else None


def test_the_next_worker_gets_the_prompt_and_what_was_sent(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor, events = make(counted := list[str]()), list[WorkerEvent]()
        await supervisor.start()
        one = generation(supervisor, events)
        supervisor.submit(one)
        first = life.starts[0]
        first.say(Accepted(one.id))
        first.piece(one.id, 7)
        first.piece(one.id, 8)
        first.die()
        await settle()
        [second] = life.starts[1:]
        assert (first.is_first, second.is_first) == (True, False)
        assert second.sent == [Submit(one.id, one.params, (5, 6), output_ids=(7, 8))]
        second.say(Accepted(one.id))
        second.piece(one.id, 9, "stop")
        assert [type(event) for event in events] == [Accepted, Piece, Piece, Piece]
        assert one.output_ids == [7, 8, 9]
        assert one.is_done
        assert supervisor.generations == []
        assert counted == ["fault", "resumed", "restarted"]

    run(work())


def test_a_canary_takes_no_place_and_is_no_client(life: type[PretendedLife]) -> None:
    """Or a place in eight would be kept for it, and somebody's stream would give way to it."""

    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        [worker] = life.starts
        ones = [generation(supervisor, []) for _ in range(FACTS.max_requests)]
        for one in ones:
            one.client = "somebody"
            supervisor.submit(one)
            worker.say(Accepted(one.id))
            worker.piece(one.id, 7)
        canary = generation(supervisor, [])
        canary.canary_of = 0
        supervisor.submit(canary)
        assert worker.sent[-1].id == canary.id
        assert supervisor.of_clients == ones, "no client is shown it"
        assert not any(isinstance(message, Cancel) for message in worker.sent)
        worker.say(Accepted(canary.id))
        worker.piece(canary.id, 7)
        worker.piece(ones[0].id, 8, "stop")
        another = generation(supervisor, [])
        another.client = "somebody"
        supervisor.submit(another)
        assert worker.sent[-1].id == another.id, "a place is free, and none is kept"

    run(work())


def test_a_request_that_comes_while_no_worker_is_there_waits(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        life.starts[0].die(KILLED)
        assert not supervisor.is_ready
        one = generation(supervisor, [])
        supervisor.submit(one)
        await settle()
        assert [message.id for message in life.starts[1].sent] == [one.id]

    run(work())


def test_who_left_counts_until_the_worker_is_through_with_him(life: type[PretendedLife]) -> None:
    """Or as many as like to could be left with it, and nobody would count them."""

    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        ones = [generation(supervisor, []) for _ in range(4)]
        for one in ones:
            supervisor.submit(one)
        [worker] = life.starts
        for one in ones:
            supervisor.cancel(one)
        assert (supervisor.generations, supervisor.num_left) == ([], 4)
        worker.say(Dropped(ones[0].id))
        assert supervisor.num_left == 3
        worker.say(Accepted(ones[1].id))
        worker.piece(ones[1].id, 7)
        assert supervisor.num_left == 3
        worker.piece(ones[1].id, 8, "cancelled")
        worker.say(Failed(ones[2].id, "UsageError", "no"))
        assert supervisor.num_left == 1
        worker.die()
        assert supervisor.num_left == 0
        assert supervisor.num_questions == 0

    run(work())


def test_who_leaves_before_he_was_sent_is_never_sent(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        [worker] = life.starts
        ones = [generation(supervisor, []) for _ in range(FACTS.max_requests + 2)]
        for one in ones:
            supervisor.submit(one)
        sent = [message.id for message in worker.sent]
        assert sent == [one.id for one in ones[:MAX_UNTAKEN]], "no more than it may have untaken"
        for number in sent:
            worker.say(Accepted(number))
        assert len(worker.sent) == FACTS.max_requests
        supervisor.cancel(ones[-2])
        assert supervisor.num_left == 0
        worker.piece(ones[0].id, 7, "stop")
        worker.piece(ones[1].id, 7, "stop")
        assert [message.id for message in worker.sent][-1] == ones[-1].id
        assert ones[-2].id not in [message.id for message in worker.sent]

    run(work())


def test_a_request_that_gives_way_goes_on_later_with_what_it_had(
    life: type[PretendedLife], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        monkeypatch.setitem(globals(), "FACTS", msgspec.structs.replace(FACTS, max_requests=2))
        supervisor = make(counted := list[str]())
        await supervisor.start()
        [worker] = life.starts
        events: dict[int, list[WorkerEvent]] = {}
        ones = []
        for client in ("ann", "ann", "bob"):
            one = generation(supervisor, got := list[WorkerEvent]())
            one.client = client
            events[one.id] = got
            ones.append(one)
            supervisor.submit(one)
        first, second, other = ones
        for number in (first.id, second.id):
            worker.say(Accepted(number))
            worker.piece(number, 7)
        assert [type(message) for message in worker.sent] == [Submit, Submit, Cancel]
        assert worker.sent[-1] == Cancel(second.id)
        worker.piece(second.id, 8)
        worker.piece(second.id, 9, "cancelled")
        assert [m.id for m in worker.sent if isinstance(m, Submit)][-1] == other.id
        assert not second.is_done
        worker.piece(other.id, 3, "stop")
        assert worker.sent[-1] == Submit(second.id, second.params, (5, 6), output_ids=(7, 8))
        worker.say(Accepted(second.id))
        worker.piece(second.id, 9, "stop")
        assert [type(event) for event in events[second.id]] == [Accepted, Piece, Piece, Piece]
        assert second.output_ids == [7, 8, 9]
        assert (second.num_resumed, counted) == (0, ["paused"])

    run(work())


def test_what_is_read_counts_and_is_sent_once_it_was_read(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        [worker] = life.starts
        held = SamplingParams(grammar="start: /a/", seed=1)
        one = Generation(supervisor.next_id(), "r", held, prompt="ab", cache_salt="s")
        gone = Generation(supervisor.next_id(), "r", held, prompt="ab")
        supervisor.submit(one)
        supervisor.submit(gone)
        supervisor.cancel(gone)
        assert worker.sent == []
        await settle()
        assert worker.sent == [Submit(one.id, held, (97, 98), cache_salt="s", form="start: /a/")]
        assert one.prompt == "", "its text is forgotten"

    run(work())


def test_a_cancelled_request_is_not_worked_on(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        one = generation(supervisor, events := list[WorkerEvent]())
        supervisor.submit(one)
        supervisor.cancel(one)
        assert life.starts[0].sent[1:] == [Cancel(one.id)]
        life.starts[0].piece(one.id, 3)
        assert events == []
        life.starts[0].die()
        await settle()
        assert life.starts[1].sent == []

    run(work())


def test_only_the_request_that_kills_workers_is_given_up(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make(counted := list[str]())
        all_events: dict[int, list[WorkerEvent]] = {}
        ones = []
        for _ in range(6):
            one = generation(supervisor, events := list[WorkerEvent]())
            all_events[one.id] = events
            ones.append(one)
        poison = ones[3].id

        def behave(worker: PretendedLife, message: Any) -> None:
            if isinstance(message, Submit):
                if message.id == poison:
                    worker.die()
                else:
                    worker.piece(message.id, len(message.output_ids))
                    if len(message.output_ids) >= 3:
                        worker.piece(message.id, 9, "stop")
            if len(worker.sent) == 6 and message.id != poison:  # they go on
                for one in list(supervisor.generations):
                    if one.id != poison:
                        worker.piece(one.id, 9, "stop")

        life.behave = staticmethod(behave)
        await supervisor.start()
        for one in ones:
            supervisor.submit(one)
        for _ in range(20):
            await settle()
        [failed] = [e for events in all_events.values() for e in events if isinstance(e, Failed)]
        assert (failed.id, failed.kind) == (poison, QUARANTINED)
        assert f"{MAX_BLAMED} workers died" in failed.message
        assert counted.count("quarantined") == 1
        assert supervisor.is_ready
        for one in ones:
            if one.id != poison and not one.is_done:
                life.starts[-1].piece(one.id, 9, "stop")
        assert all(one.is_done for one in ones)

    run(work())


def test_who_was_suspected_with_the_poison_is_tried_alone(life: type[PretendedLife]) -> None:
    """Two die twice together; then each is tried alone, and the innocent one goes on."""

    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        innocent, poison = (
            generation(supervisor, []),
            generation(supervisor, bad := list[WorkerEvent]()),
        )
        late = generation(supervisor, [])
        supervisor.submit(innocent)
        supervisor.submit(poison)
        for _ in range(2):
            assert [m.id for m in life.starts[-1].sent] == [innocent.id, poison.id]
            life.starts[-1].die()
            await settle()
        third = life.starts[-1]
        supervisor.submit(late)
        assert [message.id for message in third.sent] == [innocent.id]
        third.piece(innocent.id, 4)  # it gets on: so it is not the one
        assert [message.id for message in third.sent] == [innocent.id, poison.id]
        third.die()
        await settle()
        assert isinstance(bad[-1], Failed)
        fourth = life.starts[-1]
        assert [(m.id, m.output_ids) for m in fourth.sent] == [(innocent.id, (4,)), (late.id, ())]

    run(work())


def test_whoever_is_killed_by_hand_is_not_to_blame(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        one = generation(supervisor, events := list[WorkerEvent]())
        supervisor.submit(one)
        for _ in range(2 * MAX_BLAMED):
            life.starts[-1].die(KILLED)
            await settle()
        assert events == []
        assert one.num_resumed == 2 * MAX_BLAMED
        assert life.starts[-1].sent[0].id == one.id

    run(work())


def test_workers_leave_each_other_their_blocks_unless_these_are_in_doubt(
    life: type[PretendedLife],
) -> None:
    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        one = generation(supervisor, [])
        supervisor.submit(one)

        async def after(how: Ended) -> bool:
            """Whether the next worker gets what this one left."""
            before = life.starts[-1].memory
            assert before is not None
            life.starts[-1].die(how)
            await settle()
            return life.starts[-1].memory == before

        assert await after(KILLED)
        assert await after(FAULT)
        life.starts[-1].piece(one.id, 7)  # it gets on
        assert await after(FAULT)
        assert not await after(FAULT), "two died with a request that got nowhere"
        life.starts[-1].piece(one.id, 8)
        assert await after(KILLED)
        assert not await after(dataclasses.replace(KILLED, num_memory_kills=1)), "it needs room"
        life.starts[-1].piece(one.id, 9)
        before = life.starts[-1].memory
        life.starts[-1].say(Failed(one.id, "BadLogits", "logits[3] is nan"))
        await settle()
        assert life.starts[-1].memory != before
        await supervisor.stop(1)

    run(work())


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(device="sim:h200"),
        EngineConfig(device="cuda", prefix_cache=False),
        EngineConfig(prefix_cache=False),
        EngineConfig(launch_mode="traced"),
    ],
)
def test_blocks_that_nobody_could_read_are_not_left(
    life: type[PretendedLife], config: EngineConfig
) -> None:
    async def work() -> None:
        supervisor = make(orders=dataclasses.replace(ORDERS, config=config))
        starting = asyncio.ensure_future(supervisor.start())
        await settle()
        for one in life.starts:
            one.say(KeptWeights("", (), {}))
        await settle()
        assert all(one.memory is None for one in life.starts)
        starting.cancel()
        await supervisor.stop(1)

    run(work())


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (KILLED, False),
        (ended(number=signal.SIGTERM), False),
        (FAULT, True),
        (ended(code=3), True),
        (ended(code=0), True),
        (ended(number=signal.SIGKILL, num_memory_kills=1), True),
        (ended(number=signal.SIGKILL, hung_seconds=130.0), True),
        (OSError("no such command"), False),
    ],
)
def test_what_counts_as_a_fault(how: Ended | Exception, expected: bool) -> None:
    assert is_fault(how) is expected


def test_a_model_that_cannot_be_loaded_is_told_at_once(life: type[PretendedLife]) -> None:
    async def work() -> None:
        life.is_broken = True
        with pytest.raises(CannotStart) as raised:
            await make().start()
        assert raised.value.exit_code == 2
        assert len(life.starts) == 1

    run(work())


def test_workers_that_end_before_they_are_ready_are_not_started_for_ever(
    life: type[PretendedLife],
) -> None:
    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        one = generation(supervisor, events := list[WorkerEvent]())
        supervisor.submit(one)
        life.is_broken = True
        life.starts[0].die()
        for _ in range(20):
            await settle()
        assert supervisor.has_given_up
        assert len(life.starts) == 1 + MAX_FAILED_STARTS
        assert isinstance(events[-1], Failed)
        assert events[-1].kind == WORKER_GONE

    run(work())


def test_a_question_is_no_workers(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        life.starts[0].die()
        number = supervisor.next_id()
        asking = asyncio.ensure_future(supervisor.ask(Ask(number, text="a")))
        await asyncio.sleep(0)
        assert supervisor.num_questions == 1
        assert await asking == Told(number, token_ids=(97,))
        assert supervisor.num_questions == 0

    run(work())


def test_the_end_of_the_server_ends_what_is_open(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        one = generation(supervisor, events := list[WorkerEvent]())
        supervisor.submit(one)
        await supervisor.stop(1.0)
        assert isinstance(events[-1], Failed)
        assert "shutting down" in events[-1].message

    run(work())


def test_other_answers_to_a_prompt_follow_with_the_first_piece(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        [worker] = life.starts
        inquiry = Inquiry(supervisor, "r", AnswerOrder([(97,), (98,)], SamplingParams(seed=5), 2))
        accepting = asyncio.ensure_future(inquiry.accept())
        await settle()
        assert [message.prompt_ids for message in worker.sent] == [(97,), (98,)]
        for message in worker.sent:
            worker.say(Accepted(message.id))
        await accepting
        pieces = inquiry.pieces()
        worker.piece(worker.sent[0].id, 7)
        await anext(pieces)
        sent = [(m.prompt_ids, m.params.seed) for m in worker.sent]
        assert sent == [((97,), 5), ((98,), 5), ((97,), 6)]
        worker.piece(worker.sent[0].id, 8, "stop")
        worker.piece(worker.sent[2].id, 8, "stop")
        worker.piece(worker.sent[1].id, 8, "stop")
        for _ in range(3):
            await anext(pieces)
        assert len(worker.sent) == 4
        worker.piece(worker.sent[3].id, 9, "stop")
        await anext(pieces)
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)
        assert [choice.finish_reason for choice in inquiry.choices] == ["stop"] * 4

    run(work())


WITH_SPARE = dataclasses.replace(ORDERS, has_spare=True)
ON_GPU = dataclasses.replace(ORDERS, config=EngineConfig(device="cuda"))
KEPT, WHOLE = KeptWeights("stamps", (), {}), WeightsWhole(1.0)


def give(keeper: PretendedLife) -> None:
    """It has the weights, and all their bytes."""
    keeper.say(KEPT)
    keeper.say(WHOLE)


def test_the_spare_worker_takes_over(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make(orders=WITH_SPARE)
        await supervisor.start()
        await settle()
        first, spare = life.starts
        assert (first.begun, spare.begun) == ([None], [])
        assert supervisor.replicas[0].line.spare_pid == spare.pid
        one = generation(supervisor, [])
        supervisor.submit(one)
        assert spare.sent == []
        first.die(KILLED)
        await settle()
        assert spare.begun == [None]
        assert [message.id for message in spare.sent] == [one.id]
        life_now = supervisor.replicas[0].life
        assert life_now is not None
        assert life_now.pid == spare.pid
        assert supervisor.replicas[0].line.spare_pid == life.starts[2].pid

    run(work())


def test_a_spare_that_ends_is_nobodys_pause(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make(counted := list[str](), WITH_SPARE)
        await supervisor.start()
        await settle()
        for _ in range(5):  # a third one in a row is not replaced
            life.starts[-1].die()
            await settle()
        assert len(life.starts) == 4
        assert supervisor.replicas[0].line.spare_pid is None
        assert supervisor.is_ready
        assert counted == []
        life.starts[0].die()
        await settle()
        assert supervisor.is_ready
        assert len(life.starts) == 6, "a new worker, and a new spare one"

    run(work())


def test_a_worker_on_a_gpu_waits_for_the_keeper_and_maps_what_it_has(
    life: type[PretendedLife],
) -> None:
    async def work() -> None:
        supervisor = make(orders=ON_GPU)
        starting = asyncio.create_task(supervisor.start())
        await settle()
        keeper, first = life.starts
        assert (keeper.program, keeper.begun, first.begun) == (KEEPER, [None], [])
        keeper.say(Loading("loading weights", 0.5))
        assert supervisor.loading.share == 0.5
        give(keeper)
        await starting
        assert first.begun == [KEPT]
        first.die()
        await settle()
        assert life.starts[2].begun == [KEPT], "the next one maps what is there"
        keeper.die()
        await settle()
        assert supervisor.is_ready, "a worker has its memory still"
        life.starts[2].die()
        await settle()
        other, last = life.starts[3:]
        assert (other.program, last.begun) == (KEEPER, [])
        give(other)
        assert last.begun == [KEPT]

    run(work())


ON_GPU_WITH_SPARE = dataclasses.replace(ON_GPU, has_spare=True)


def test_on_a_gpu_the_spare_stands_by_with_the_model_and_takes_over(
    life: type[PretendedLife],
) -> None:
    async def work() -> None:
        supervisor = make(orders=ON_GPU_WITH_SPARE)
        starting = asyncio.create_task(supervisor.start())
        await settle()
        give(life.starts[0])
        await starting
        await settle()
        _, first, spare = life.starts
        assert (first.waits, spare.waits, spare.begun) == (False, True, [KEPT])
        assert supervisor.replicas[0].line.spare_state == "standing by"
        assert pid_of(supervisor) == first.pid, "who stands by is not ready"
        assert (first.memory is None, spare.memory) == (False, None)
        one = generation(supervisor, [])
        supervisor.submit(one)
        assert spare.sent == []
        first.die(KILLED)
        await settle()
        assert (spare.waits, spare.begun, spare.memory) == (False, [KEPT], first.memory)
        assert [message.id for message in spare.sent] == [one.id]
        another = life.starts[3]
        assert (another.waits, another.begun) == (True, [KEPT])

    run(work())


def test_a_spare_with_no_room_beside_the_worker_waits_without_the_model(
    life: type[PretendedLife],
) -> None:
    async def work() -> None:
        supervisor = make(orders=ON_GPU_WITH_SPARE)
        starting = asyncio.create_task(supervisor.start())
        await settle()
        give(life.starts[0])
        await starting
        await settle()
        life.starts[2].say(Failed(0, "OutOfMemory", "cuda: no room"))
        life.starts[2].die(ended(code=1))
        await settle()
        plain = life.starts[3]
        assert (plain.begun, supervisor.replicas[0].line.spare_state) == ([], "without a model")
        life.starts[1].die()
        await settle()
        assert (plain.begun, plain.waits) == ([KEPT], False)
        assert life.starts[4].waits, "beside the next worker there may be room"

    run(work())


def test_whose_memory_goes_with_the_keeper_does_not_take_over(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make(orders=ON_GPU_WITH_SPARE)
        starting = asyncio.create_task(supervisor.start())
        await settle()
        give(life.starts[0])
        await starting
        await settle()
        keeper, first, spare = life.starts
        keeper.die()
        await settle()
        assert (first.is_dead, spare.is_dead) == (False, True)
        plain = life.starts[3]
        assert plain.begun == []
        first.die()
        await settle()
        other = life.starts[4]
        assert (other.program, plain.begun) == (KEEPER, [])
        give(other)
        assert (plain.begun, plain.waits) == ([KEPT], False)
        assert plain.memory != first.memory, "blocks lay in memory that is gone"

    run(work())


def test_weights_in_doubt_are_read_anew_before_the_next_worker_begins(
    life: type[PretendedLife],
) -> None:
    async def work() -> None:
        supervisor = make(orders=ON_GPU_WITH_SPARE)
        starting = asyncio.create_task(supervisor.start())
        await settle()
        give(life.starts[0])
        await starting
        await settle()
        keeper, first, spare = life.starts
        supervisor.distrust_worker(supervisor.replicas[0])
        await settle()
        assert (keeper.is_dead, first.is_dead, spare.is_dead) == (True, True, True)
        [other] = [one for one in life.starts[3:] if one.program == KEEPER]
        waiting = next(one for one in life.starts[3:] if one.pid == pid_of(supervisor))
        assert (waiting.begun, supervisor.is_ready) == ([], False)
        give(other)
        await settle()
        assert (waiting.begun, supervisor.is_ready) == ([KEPT], True)
        assert waiting.memory != first.memory

    run(work())


def test_where_memory_cannot_be_shared_each_worker_loads(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make(orders=ON_GPU)
        starting = asyncio.create_task(supervisor.start())
        await settle()
        keeper, first = life.starts
        keeper.say(Failed(0, "NotShareable", "no"))
        keeper.die(ended(code=1))
        await starting
        assert first.begun == [None]
        first.die()
        await settle()
        assert life.starts[2].begun == [None]
        assert life.starts[2].program == WORKER

    run(work())


def test_a_worker_makes_ready_while_the_weights_are_read_and_runs_nothing(
    life: type[PretendedLife],
) -> None:
    async def work() -> None:
        supervisor = make(orders=ON_GPU_WITH_SPARE)
        starting = asyncio.create_task(supervisor.start())
        await settle()
        keeper, first = life.starts
        keeper.say(KEPT)
        await settle()
        assert first.begun == [KEPT]
        assert (supervisor.is_ready, starting.done()) == (False, False), "nothing is there yet"
        assert len(life.starts) == 2, "nobody stands by over weights that may never be there"
        keeper.say(WHOLE)
        await starting
        assert supervisor.is_ready
        await settle()
        assert life.starts[2].begun == [KEPT]

    run(work())


@pytest.mark.parametrize("is_ready_before", [True, False])
def test_a_keeper_that_dies_while_it_reads_takes_its_worker_with_it(
    life: type[PretendedLife], is_ready_before: bool
) -> None:
    """What that has captured is over memory that was never filled."""

    async def work() -> None:
        supervisor = make(orders=ON_GPU)
        starting = asyncio.create_task(supervisor.start())
        await settle()
        keeper, first = life.starts
        keeper.say(KEPT)
        if is_ready_before:
            await settle()
        keeper.say(Failed(0, "BadModelFile", "model.gguf: no such tensor"))
        keeper.die(ended(code=2))
        with pytest.raises(CannotStart, match="no such tensor"):
            await starting
        await settle()
        assert first.is_dead
        assert not supervisor.is_ready

    run(work())


def test_where_weights_lie_otherwise_than_known_all_begins_anew(
    life: type[PretendedLife],
) -> None:
    async def work() -> None:
        supervisor = make(counted := list[str](), ON_GPU)
        starting = asyncio.create_task(supervisor.start())
        await settle()
        keeper, first = life.starts
        keeper.say(KEPT)
        await settle()
        keeper.say(Failed(0, "StaleLayout", "blk.0 was packed otherwise"))
        keeper.die(ended(code=1))
        await settle()
        assert first.is_dead
        other, second = life.starts[2:]
        assert (other.program, second.begun, starting.done()) == (KEEPER, [], False)
        give(other)
        await starting
        assert (second.begun, second.is_first) == ([KEPT], True)
        assert counted == [], "no worker of clients has died"

    run(work())


def test_what_the_keeper_cannot_load_nobody_can(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make(orders=ON_GPU)
        starting = asyncio.create_task(supervisor.start())
        await settle()
        keeper, first = life.starts
        keeper.say(Failed(0, "BadModelFile", "model.gguf: no such tensor"))
        keeper.die(ended(code=2))
        with pytest.raises(CannotStart, match="no such tensor") as raised:
            await starting
        assert raised.value.exit_code == 2
        assert first.is_dead

    run(work())


def test_logits_that_are_no_numbers_may_be_the_workers(life: type[PretendedLife]) -> None:
    """Its memory may be damaged, so another one tries; what that finds too is the model's."""

    async def work() -> None:
        supervisor = make(counted := list[str]())
        await supervisor.start()
        hit, other = (
            generation(supervisor, events := list[WorkerEvent]()),
            generation(supervisor, []),
        )
        supervisor.submit(hit)
        supervisor.submit(other)
        life.starts[0].piece(hit.id, 7)
        life.starts[0].say(Failed(hit.id, "BadLogits", "logits[3] is nan"))
        await settle()
        assert [type(event) for event in events] == [Piece]
        second = life.starts[1]
        assert [(m.id, m.output_ids) for m in second.sent] == [(hit.id, (7,)), (other.id, ())]
        assert counted.count("fault") == 1
        second.say(Failed(hit.id, "BadLogits", "logits[3] is nan"))
        await settle()
        assert isinstance(events[-1], Failed)
        assert hit.is_done
        assert not other.is_done
        assert len(life.starts) == 2
        second.say(Failed(other.id, "BadLogits", "logits[3] is nan"))
        assert other.is_done, "no worker ends any more for what the model gives"
        await settle()
        assert len(life.starts) == 2

    run(work())


def test_pieces_that_wait_for_their_client_are_joined(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make()
        await supervisor.start()
        [worker] = life.starts
        inquiry = Inquiry(supervisor, "r", AnswerOrder([(97,), (98,)], SamplingParams(logprobs=0)))
        accepting = asyncio.ensure_future(inquiry.accept())
        await settle()
        first, second = worker.sent
        for message in (first, second):
            worker.say(Accepted(message.id))
        await accepting
        pieces = inquiry.pieces()
        num_tokens = 5 * JOINED_TOKENS - 1
        for number in range(num_tokens):
            for message, letter in ((first, "x"), (second, "y")):
                logprob = TokenLogprob(number, letter.encode(), -1.0, ())
                piece = Piece(message.id, letter, (number,), pack_logprobs([logprob]))
                worker.say(News((piece,), EngineState()))
        for message in (first, second):
            worker.piece(message.id, 7, "length")
        got = [one async for one in pieces]
        assert len(got) == 2 * 5
        for choice, letter in zip(inquiry.choices, "xy", strict=True):
            own = [piece for of, piece in filter(None, got) if of is choice]
            assert "".join(piece.text for piece in own).startswith(letter * num_tokens)
            ids = [token_id for piece in own for token_id in piece.token_ids]
            assert ids == [*range(num_tokens), 7] == choice.generation.output_ids
            found = [one and one.token_id for one in unpack_logprobs(choice.logprobs)]
            assert found == list(range(num_tokens))
            assert [piece.ending is not None for piece in own][-2:] == [False, True]

    run(work())


def test_the_next_worker_gets_a_cache_as_large_as_the_first_ones(life: type[PretendedLife]) -> None:
    """The first one takes what a GPU has free, which another one would find to be less."""

    async def work() -> None:
        for asked, then in ((None, FACTS.num_blocks * FACTS.block_size), (640, 640)):
            life.starts.clear()
            config = dataclasses.replace(ORDERS.config, kv_tokens=asked)
            supervisor = make(orders=dataclasses.replace(ORDERS, config=config))
            await supervisor.start()
            assert life.starts[-1].kv_tokens == asked
            life.starts[-1].die(KILLED)
            await settle()
            assert life.starts[-1].kv_tokens == then
            await supervisor.stop(1)

    run(work())


def test_kernels_are_those_of_the_draft_models_file_as_well(tmp_path: Path) -> None:
    """A file of other shapes in its place needs other forms of kernels."""
    draft = tmp_path / "draft.gguf"

    def name(draft_model: str | None) -> str:
        config = EngineConfig(draft_model=draft_model)
        return forms_name(Orders(str(tmp_path / "model.gguf"), config, Deadlines(), tmp_path))

    before = name(str(draft))
    draft.write_bytes(b"GGUF")
    assert len({name(None), before, name(str(draft))}) == 3
