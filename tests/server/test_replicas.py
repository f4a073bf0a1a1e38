"""Several replicas behind one server: where requests go, and what becomes of those of a lost card.

The workers are only pretended, and time is what the test says it is.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import signal
from typing import Any

import msgspec
import pytest
from test_supervisor import (
    FACTS,
    FAULT,
    KILLED,
    ORDERS,
    PretendedLife,
    PretendedReader,
    ended,
    generation,
    life,
    run,
    settle,
)

from hypocenter import EngineConfig, SamplingParams
from hypocenter.server.fleet import twins
from hypocenter.server.fleet.replica import MAX_FAILED_STARTS, CannotStart, Replica
from hypocenter.server.generation import Generation, WorkerEvent
from hypocenter.server.metrics import Metrics
from hypocenter.server.operating import succession
from hypocenter.server.supervisor import MAX_BLAMED, QUARANTINED, Supervisor
from hypocenter.server.turns.places import Offer, Places
from hypocenter.wire.messages import Accepted, Ending, EngineState, Failed, News, Piece, Submit

__all__ = ["life"]  # the fixture
ON_CPUS = dataclasses.replace(ORDERS, config=EngineConfig(device="cpu"))


def made(counted: list[tuple[str, int]] | None = None, num: int = 2) -> Supervisor:
    return Supervisor(
        ON_CPUS,
        on_left=lambda runs, how: None,
        on_event=lambda what, replica: None if counted is None else counted.append((what, replica)),
        make_reader=lambda reads_forms: PretendedReader(),
        devices=("cpu",) * num,
    )


def worker_of(replica: Replica) -> Any:
    """Its worker, which is pretended."""
    assert replica.life is not None
    return replica.life


def asked(number: int, ids: tuple[int, ...], client: str = "ann") -> Generation:
    return Generation(number, "r", SamplingParams(), prompt=ids, client=client)


class Cards:
    """What each replica has been handed, by the rules of `Places`."""

    def __init__(self, *gaps: float | None, max_requests: int = 10) -> None:
        self.offers = [
            Offer(number, msgspec.structs.replace(FACTS, max_requests=max_requests), gap)
            for number, gap in enumerate(gaps)
        ]
        self.places = Places()
        self.open: dict[int, Generation] = {}
        self._numbers = itertools.count(1)

    def come(self, ids: tuple[int, ...], client: str = "ann") -> Generation:
        one = asked(next(self._numbers), ids, client)
        self.open[one.id] = one
        return one

    def fill(self) -> list[int]:
        """The replica of each request that gets a place now; each begins at once."""
        handed = []
        while (found := self.places.next(self.open, {}, self.offers)) is not None:
            one, offer = found
            one.hand_over(offer.replica)
            self.places.hand_over(one, offer)
            one.take(Accepted(one.id))
            one.take(Piece(one.id, "", (7,)))
            handed.append(offer.replica)
        return handed

    def end(self, one: Generation) -> None:
        one.take(Piece(one.id, "", (7,), ending=Ending("stop")))
        del self.open[one.id]


def test_requests_go_where_fewest_are() -> None:
    cards = Cards(None, None, None)
    for number in range(9):
        cards.come((number,) * 4)
    assert collections.Counter(cards.fill()) == {0: 3, 1: 3, 2: 3}


def test_a_request_goes_where_its_beginning_was_read() -> None:
    cards = Cards(None, None)
    long = tuple(range(1000, 1640))
    cards.come((2,) * 4)  # on 0: so the long one goes to 1
    assert cards.fill() == [0]
    cards.come(long)
    assert cards.fill() == [1]
    cards.come((*long, 5, 6))
    cards.come((*long, 7, 8))
    assert cards.fill() == [1, 1], "its beginning is there, though more run there"
    cards.come(tuple(range(5000, 5640)))
    assert cards.fill() == [0], "this one was read nowhere"


def test_a_beginning_is_not_worth_any_queue() -> None:
    """Forty requests of one beginning do not stand before one card while the other rests."""
    cards = Cards(None, None, max_requests=64)
    for number in range(40):
        cards.come((*range(320), number))
    on = collections.Counter(cards.fill())
    assert min(on[0], on[1]) >= 15, on


def test_other_salts_share_nothing() -> None:
    cards = Cards(None, None)
    long = tuple(range(1000, 1640))
    first = cards.come(long)
    assert cards.fill() == [0]
    other = asked(90, long)
    other.cache_salt = "own"
    known = cards.places.prefixes.num_known_tokens
    assert known(0, asked(91, long), 16) == 640
    assert known(0, other, 16) == 0
    assert known(1, first, 16) == 0
    cards.places.prefixes.forget(0)
    assert known(0, asked(92, long), 16) == 0


def test_a_replica_is_taken_to_keep_no_more_than_its_cache_has() -> None:
    cards = Cards(None)
    prefixes = cards.places.prefixes
    first, second = asked(1, tuple(range(64))), asked(2, tuple(range(100, 164)))
    prefixes.note(0, first, 16, 6)
    prefixes.note(0, second, 16, 6)
    assert prefixes.num_known_tokens(0, asked(3, tuple(range(100, 164))), 16) == 64
    assert prefixes.num_known_tokens(0, asked(4, tuple(range(64))), 16) == 0, "its first went first"


def test_a_slower_twin_gets_less() -> None:
    cards = Cards(0.010, 0.030, max_requests=64)
    for number in range(40):
        cards.come((number,) * 4)
    on = collections.Counter(cards.fill())
    assert on[0] == pytest.approx(3 * on[1], abs=3), on
    stuck = Cards(0.010, 100.0, max_requests=64)
    for number in range(40):
        stuck.come((number,) * 4)
    assert collections.Counter(stuck.fill())[1] >= 5, "what it does next may be faster"


def test_who_has_none_comes_first_on_any_card() -> None:
    cards = Cards(None, None, max_requests=2)
    ones = [cards.come((number,) * 4) for number in range(20)]
    assert sorted(cards.fill()) == [0, 0, 1, 1]
    bob = cards.come((9,) * 4, client="bob")
    victim = cards.places.to_pause(cards.open, {}, cards.offers)
    assert victim is ones[3], "the newest of who has the most gives way"
    freed = victim.replica
    victim.take_back()
    cards.fill()
    assert bob.replica == freed


def test_the_others_go_on_with_what_a_lost_worker_had(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = made(counted := list[tuple[str, int]]())
        await supervisor.start()
        first, second = (worker_of(replica) for replica in supervisor.replicas)
        assert supervisor.facts is not None
        assert supervisor.facts.max_requests == 2 * FACTS.max_requests
        ones = [generation(supervisor, []) for _ in range(4)]
        for one in ones:
            supervisor.submit(one)
            worker_of(supervisor.replicas[one.replica or 0]).say(Accepted(one.id))
        assert [one.replica for one in ones] == [0, 1, 0, 1]
        first.piece(ones[0].id, 7)
        first.piece(ones[0].id, 8)
        first.die()
        assert supervisor.is_ready
        assert second.sent[2:] == [
            Submit(ones[0].id, ones[0].params, (5, 6), output_ids=(7, 8)),
            Submit(ones[2].id, ones[2].params, (5, 6)),
        ], "at once, and with what their clients have"
        assert counted == [("fault", 0), ("resumed", 0), ("resumed", 0), ("restarted", 0)]
        await settle()
        assert supervisor.replicas[0].is_ready
        one = generation(supervisor, [])
        supervisor.submit(one)
        assert one.replica == 0, "it is back, and has nothing to do"
        await supervisor.stop(1)

    run(work())


def test_the_others_go_on_while_a_silent_worker_is_ended(life: type[PretendedLife]) -> None:
    """It may take seconds to write where it stands, and is blamed once."""

    async def work() -> None:
        supervisor = made(counted := list[tuple[str, int]]())
        await supervisor.start()
        first, second = (worker_of(replica) for replica in supervisor.replicas)
        ones = [generation(supervisor, []) for _ in range(2)]
        for one in ones:
            supervisor.submit(one)
            worker_of(supervisor.replicas[one.replica or 0]).say(Accepted(one.id))
        first.piece(ones[0].id, 7)
        assert ones[0].replica == 0
        first.be_late(3.0)
        assert second.sent[-1] == Submit(ones[0].id, ones[0].params, (5, 6), output_ids=(7,))
        assert supervisor.is_ready
        assert not supervisor.replicas[0].takes_requests
        assert len(life.starts) == 2, "its card is its own until it has ended"
        assert counted == [("resumed", 0)]
        later = generation(supervisor, [])
        supervisor.submit(later)
        assert later.replica == 1
        first.be_late(4.0)
        first.die(ended(number=signal.SIGABRT, hung_seconds=3.0))
        await settle()
        assert (ones[0].num_resumed, ones[0].num_blamed) == (1, 1)
        assert counted == [("resumed", 0), ("fault", 0), ("restarted", 0)]
        assert supervisor.replicas[0].num_failed_starts == 0
        assert supervisor.replicas[0].takes_requests
        await supervisor.stop(1)

    run(work())


def test_the_log_says_what_becomes_of_requests(
    life: type[PretendedLife], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    monkeypatch.setattr(
        succession, "tell", lambda level, event, message, **data: told.append(message)
    )

    async def work() -> None:
        supervisor = made()
        await supervisor.start()
        first, second = (worker_of(replica) for replica in supervisor.replicas)
        supervisor.submit(one := generation(supervisor, []))
        canary = generation(supervisor, [])
        canary.canary_of = 0
        supervisor.submit(canary)
        assert one.replica == 0
        told.clear()
        first.die(KILLED)
        await settle()
        of = "replica 0 (cpu): worker 1 was ended by SIGKILL"
        assert told == [
            f"{of}; 1 request goes on elsewhere",
            f"{of}; worker {worker_of(supervisor.replicas[0]).pid} took over after 0.0 s, "
            "no request waited for it",
        ]
        told.clear()
        second.be_late(3.0)
        assert told == [
            f"replica 1 (cpu): worker {second.pid} is past its deadline after 3.0 s; "
            "1 request goes on elsewhere"
        ]
        told.clear()
        second.die(ended(number=signal.SIGABRT, hung_seconds=3.0))
        worker_of(supervisor.replicas[0]).die(KILLED)
        assert told == [
            "replica 1 (cpu): worker 1 was ended, since a step ran for 3 seconds; "
            "no request waits for another",
            f"{of}; 1 request waits for another",
        ]
        await supervisor.stop(1)

    run(work())


def test_a_canary_is_asked_of_its_own_replica(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = made()
        await supervisor.start()
        first, second = supervisor.replicas
        ill, other = worker_of(second), worker_of(first)
        canaries = [generation(supervisor, []) for _ in range(2)]
        for canary in canaries:
            canary.canary_of = 1
            supervisor.submit(canary)
        assert [m.id for m in ill.sent if isinstance(m, Submit)] == [one.id for one in canaries]
        ill.die(FAULT)
        await settle()
        assert not [m for m in other.sent if isinstance(m, Submit)], "it waits for its own worker"
        again = worker_of(second)
        assert [m.id for m in again.sent if isinstance(m, Submit)] == [one.id for one in canaries]

    run(work())


def test_a_card_that_stays_lost_is_left_out(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = made()
        await supervisor.start()
        lost, well = supervisor.replicas
        life.is_broken = True
        worker_of(lost).die()
        for _ in range(20):
            await settle()
        assert (lost.condition, well.condition) == ("lost", "ready")
        assert len(life.starts) == 2 + MAX_FAILED_STARTS
        assert supervisor.is_ready
        assert not supervisor.has_given_up
        assert supervisor.facts is not None
        assert supervisor.facts.max_requests == FACTS.max_requests, "its places are gone"
        one = generation(supervisor, [])
        supervisor.submit(one)
        assert one.replica == 1
        text = Metrics(supervisor, "m", lambda: 0).text().decode()
        assert 'hypocenter:replica_lost{engine="0",model_name="m"} 1.0' in text
        assert 'hypocenter:worker_ready{engine="0",model_name="m"} 0.0' in text
        assert 'hypocenter:worker_ready{engine="1",model_name="m"} 1.0' in text
        worker_of(well).die()
        for _ in range(20):
            await settle()
        assert supervisor.has_given_up, "nothing is left"
        await supervisor.stop(1)

    run(work())


def test_a_card_that_is_lost_at_the_start_is_left_out(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = made(num=3)
        life.is_broken = property(lambda one: one.number == 1)  # type: ignore[assignment]
        await supervisor.start()
        assert [one.condition for one in supervisor.replicas] == ["lost", "ready", "ready"]
        assert supervisor.is_ready
        await supervisor.stop(1)

    run(work())


def test_where_every_card_is_lost_at_the_start_the_first_reason_is_told(
    life: type[PretendedLife],
) -> None:
    async def work() -> None:
        life.is_broken = True
        supervisor = made()
        with pytest.raises(CannotStart) as raised:
            await supervisor.start()
        assert raised.value.exit_code == 2
        assert len(life.starts) == 2
        assert supervisor.has_given_up
        await supervisor.stop(1)

    run(work())


def test_a_request_that_kills_workers_takes_few_of_them_along(life: type[PretendedLife]) -> None:
    """It is tried alone on one card, and the other one goes on meanwhile."""

    async def work() -> None:
        supervisor = made(counted := list[tuple[str, int]]())
        poison = generation(supervisor, events := list[WorkerEvent]())

        def behave(worker: PretendedLife, message: Any) -> None:
            if isinstance(message, Submit) and message.id == poison.id:
                worker.die(FAULT)

        life.behave = staticmethod(behave)
        await supervisor.start()
        others = [generation(supervisor, []) for _ in range(4)]
        for one in (others[0], poison, *others[1:]):
            supervisor.submit(one)
        for _ in range(30):
            await settle()
            for replica in supervisor.replicas:
                for one in others:
                    if one.replica == replica.number and replica.is_ready and not one.is_done:
                        worker_of(replica).piece(one.id, 7)
        [failed] = [event for event in events if isinstance(event, Failed)]
        assert failed.kind == QUARANTINED
        assert sum(what == "fault" for what, _ in counted) == MAX_BLAMED
        assert all(one.is_with_worker and one.output_ids for one in others)
        assert all(replica.is_ready for replica in supervisor.replicas)
        await supervisor.stop(1)

    run(work())


def test_a_suspect_has_a_card_for_itself_and_others_go_on(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = made()
        await supervisor.start()
        suspect = generation(supervisor, [])
        suspect.num_blamed = 2
        supervisor.submit(suspect)
        assert suspect.replica == 0
        ones = [generation(supervisor, []) for _ in range(3)]
        for one in ones:
            supervisor.submit(one)
        assert [one.replica for one in ones] == [1, 1, 1]
        worker_of(supervisor.replicas[0]).piece(suspect.id, 7)  # it gets on, and is none any more
        last = generation(supervisor, [])
        supervisor.submit(last)
        assert last.replica == 0
        await supervisor.stop(1)

    run(work())


def test_a_much_slower_twin_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    monkeypatch.setattr(twins, "tell", lambda level, event, message, **data: told.append(message))
    seen = twins.Twins()
    slow, even = {"a": 0.010, "b": 0.031}, {"a": 0.010, "b": 0.012}
    seen.note("b", slow, 0.0)
    seen.note("b", even, 20.0)
    seen.note("b", slow, 25.0)
    seen.note("b", slow, 50.0)
    seen.note("a", slow, 54.0)
    assert told == [], "it was slow for 25 s at a time"
    for now in (56.0, 57.0, 90.0):
        seen.note("b", slow, now)
    assert told == [
        "b is 3.1 times as slow as a, for 31 s: 31 and 10 ms between two tokens; it gets fewer "
        "requests; see its clocks and who else uses it"
    ]
    seen.note("b", even, 100.0)
    seen.note("b", slow, 101.0)
    seen.note("b", slow, 140.0)
    assert len(told) == 2, "it had recovered"


def test_pieces_of_a_slow_card_are_compared_with_those_of_its_twins(
    life: type[PretendedLife], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = list[tuple[str, dict[str, float]]]()
    monkeypatch.setattr(
        twins.Twins, "note", lambda self, name, gaps, now: noted.append((name, dict(gaps)))
    )

    async def work() -> None:
        supervisor = made()
        await supervisor.start()
        first, second = supervisor.replicas
        second.note_gap(0.5)
        supervisor.submit(one := generation(supervisor, []))
        worker_of(first).say(Accepted(one.id))
        worker_of(first).piece(one.id, 7)
        worker_of(first).piece(one.id, 8)
        assert [name for name, _ in noted] == [first.name]
        assert noted[0][1] == {first.name: first.gap_seconds, second.name: 0.5}
        worker_of(second).be_late(3.0)
        worker_of(first).piece(one.id, 9)
        assert list(noted[1][1]) == [first.name], "who is not ready is compared with nobody"
        await supervisor.stop(1)

    run(work())


def test_gaps_tell_how_fast_a_card_is_and_restarts_do_not(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = made()
        await supervisor.start()
        first = supervisor.replicas[0]
        for _ in range(200):
            first.note_gap(0.02)
        first.note_gap(30.0)
        assert first.gap_seconds == pytest.approx(0.02, rel=0.2)
        one = generation(supervisor, [])
        supervisor.submit(one)
        worker = worker_of(first)
        worker.piece(one.id, 7)
        worker.die(KILLED)
        again = worker_of(supervisor.replicas[1])
        before = supervisor.replicas[1].gap_seconds
        again.say(News((Piece(one.id, "", (8,)),), EngineState()))
        assert one.gap is not None
        assert supervisor.replicas[1].gap_seconds == before, "it waited for another worker"
        await supervisor.stop(1)

    run(work())


def test_prompts_that_were_read_before_do_not_wait_as_new_ones_do() -> None:
    """A worker reads their ends; that it knows the rest is a guess, and counts for little."""
    known, new = tuple(range(2000, 2400)), itertools.count(5000, 400)

    def num_at_once(ids: list[tuple[int, ...]]) -> int:
        cards = Cards(None, max_requests=40)
        cards.come(known)
        cards.fill()
        for prompt in ids:
            cards.come(prompt)
        num = 0
        while (found := cards.places.next(cards.open, {}, cards.offers)) is not None:
            one, offer = found
            one.hand_over(offer.replica)
            cards.places.hand_over(one, offer)
            one.take(Accepted(one.id))
            num += 1
        return num

    steps_of = 2 * FACTS.step_tokens
    assert num_at_once([tuple(range(at, at + 400)) for at in itertools.islice(new, 30)]) == 2
    num = num_at_once([(*known, number) for number in range(30)])
    assert num == steps_of // 101, "400 known tokens count for 100, and one is new"
