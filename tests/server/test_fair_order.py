"""Whose turn it is, and who gets the worker's places; by a clock that the test sets."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from test_supervisor import FACTS

from hypocenter import SamplingParams
from hypocenter.server.generation import Generation
from hypocenter.server.turns.fair_order import HALF_LIFE_SECONDS, FairOrder
from hypocenter.server.turns.places import MAX_UNBEGUN, MAX_UNTAKEN, Offer, Places
from hypocenter.wire.messages import Accepted, Ending, Piece, ServedModel


@dataclasses.dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def turn(order: FairOrder, waiting: list[str], **at_work: int) -> str | None:
    """Whose turn it is; an item is named after its client, as `ann1`."""
    return order.first(waiting, lambda item: item.rstrip("0123456789"), at_work)


def test_within_one_client_who_came_first_is_first() -> None:
    order = FairOrder(Clock())
    assert turn(order, ["ann1", "ann2"]) == "ann1"
    assert turn(order, []) is None


def test_who_was_given_less_lately_is_first() -> None:
    order = FairOrder(clock := Clock())
    order.charge("ann", 3.0)
    order.charge("bob", 2.0)
    assert turn(order, ["ann1", "bob1"]) == "bob1"
    order.charge("bob", 2.0)
    assert turn(order, ["ann1", "bob1"]) == "ann1"
    assert turn(order, ["bob1", "eve1", "ann1"]) == "eve1"
    clock.now += 2 * HALF_LIFE_SECONDS
    assert order.amount_of("bob") == pytest.approx(1.0)
    order.charge("ann", 0.5)
    assert turn(order, ["ann1", "bob1"]) == "bob1", "what was long ago counts for less"


def test_who_has_something_at_work_comes_behind() -> None:
    order = FairOrder(Clock())
    order.charge("bob", 9.0)
    assert turn(order, ["ann1", "bob1"], ann=1) == "bob1"
    assert turn(order, ["ann1", "bob1"], ann=1, bob=1) == "ann1"


def test_only_so_many_clients_are_remembered() -> None:
    order = FairOrder(Clock())
    for number in range(5000):
        order.charge(f"c{number}", float(1 + number))
    assert order.amount_of("c0") == 0.0
    assert order.amount_of("c4999") == 5000.0
    assert len(order._given) == 4096


class Worker:
    """What a worker has been handed, by the rules of `Places`."""

    def __init__(self, **changes: int) -> None:
        self.facts: ServedModel = msgspec.structs.replace(FACTS, **changes)
        self.places = Places()
        self.open: dict[int, Generation] = {}
        self.leaving: dict[int, Generation] = {}

    @property
    def offers(self) -> list[Offer]:
        return [Offer(0, self.facts)]

    def come(self, client: str, num: int, *, num_tokens: int = 4, form: str = "") -> None:
        for _ in range(num):
            number = len(self.open) + len(self.leaving) + 1
            params = SamplingParams(json_schema={} if form else None)
            one = Generation(number, client, params, prompt=(1,) * num_tokens, client=client)
            one.form, one.is_read = form, True
            self.open[number] = one

    def fill(self, *, is_taken: bool = True) -> list[str]:
        """Whose requests it is handed, until it has no more places."""
        handed = []
        while (found := self.places.next(self.open, self.leaving, self.offers)) is not None:
            one, offer = found
            one.hand_over(offer.replica)
            if is_taken:
                one.take(Accepted(one.id))
            handed.append(one.client)
        return handed

    def end(self, client: str) -> None:
        """The oldest request of that client that has a place ends."""
        one = next(g for g in self.open.values() if g.client == client and g.is_with_worker)
        one.take(Piece(one.id, "", (7,), ending=Ending("stop")))
        del self.open[one.id]


def test_a_worker_has_what_it_can_run_and_no_more() -> None:
    worker = Worker(max_requests=8)
    worker.come("ann", 30)
    assert worker.fill() == ["ann"] * 8
    worker.end("ann")
    assert worker.fill() == ["ann"]


def test_the_next_place_is_his_who_has_none() -> None:
    worker = Worker(max_requests=8)
    worker.come("ann", 100)
    worker.fill()
    worker.come("bob", 3)
    for _ in range(3):
        worker.end("ann")
        assert worker.fill() == ["bob"]
    worker.end("ann")
    assert worker.fill() == ["ann"]


def test_a_priority_orders_ones_own_requests_alone() -> None:
    worker = Worker(max_requests=1)
    worker.come("ann", 4)
    worker.come("bob", 1)
    for number, priority in ((1, 5), (2, 0), (3, -1), (4, -1), (5, -100)):
        worker.open[number].priority = priority
    first = worker.places.next(worker.open, worker.leaving, worker.offers)
    assert first is not None
    assert first[0] is worker.open[3], "bob's does not come before for what bob says of it"
    del worker.open[3], worker.open[5]
    order = []
    while (found := worker.places.next(worker.open, worker.leaving, worker.offers)) is not None:
        order.append(found[0].id)
        del worker.open[found[0].id]
    assert order == [4, 2, 1]


def test_places_that_come_at_once_are_shared() -> None:
    worker = Worker(max_requests=8)
    worker.come("ann", 50)
    worker.come("bob", 50)
    assert sorted(worker.fill()) == ["ann"] * 4 + ["bob"] * 4


def test_who_was_served_less_is_first_where_both_have_as_many() -> None:
    worker = Worker(max_requests=1)
    worker.places.charge("ann", 0, 100)
    worker.places.charge("bob", 160, 0)
    worker.come("ann", 1)
    worker.come("bob", 1)
    assert worker.fill()[0] == "bob", "a token of a prompt is a small part of a step"


def test_what_was_sent_and_not_taken_is_bounded() -> None:
    worker = Worker(max_requests=100)
    worker.come("ann", 5, form="form")
    worker.come("bob", 50)
    assert sorted(worker.fill(is_taken=False)) == ["ann"] + ["bob"] * MAX_UNTAKEN
    for one in worker.open.values():
        if one.is_with_worker and not one.form:
            one.take(Accepted(one.id))
    assert worker.fill(is_taken=False) == ["bob"] * MAX_UNTAKEN, "a form holds up forms alone"


def test_who_left_has_his_place_until_the_worker_is_through_with_him() -> None:
    worker = Worker(max_requests=1)
    worker.come("ann", 1)
    worker.fill()
    worker.leaving, worker.open = worker.open, {}
    worker.come("bob", 1)
    assert worker.fill() == []
    worker.leaving.popitem()
    assert worker.fill() == ["bob"]


def test_long_prompts_do_not_wait_within_the_worker_for_room() -> None:
    """Or who comes next would stand behind all of them there."""
    worker = Worker(max_requests=32, block_size=16, num_blocks=100, step_tokens=4096)
    worker.come("ann", 32, num_tokens=400)
    assert len(worker.fill()) == 3, "of 26 blocks each"
    for one in worker.open.values():
        if one.is_with_worker:
            one.take(Piece(one.id, "x", (5,)))
    assert len(worker.fill()) == MAX_UNBEGUN, "they may share what is there"


def test_prompts_that_take_more_than_two_steps_wait_here() -> None:
    """In the worker who comes next would stand behind all of their steps."""
    worker = Worker(max_requests=32, block_size=16, num_blocks=10_000, step_tokens=512)
    worker.come("ann", 32, num_tokens=400)
    assert len(worker.fill()) == 2
    worker.come("bob", 2, num_tokens=400)
    assert worker.fill() == ["bob"], "who has none there waits for nobody's prompts"
    worker.come("eve", 1, num_tokens=40)
    assert worker.fill() == ["eve"]
    begun = [one for one in worker.open.values() if one.is_with_worker]
    for one in begun:
        one.take(Piece(one.id, "x", (5,)))
    assert sorted(worker.fill()) == ["ann", "bob"]


def test_short_prompts_are_handed_over_together() -> None:
    worker = Worker(max_requests=32, step_tokens=512)
    worker.come("ann", 40, num_tokens=32)
    assert len(worker.fill()) == 32


def test_places_are_kept_for_others_while_there_are_any() -> None:
    worker = Worker(max_requests=32, num_blocks=10_000)
    worker.come("ann", 100)
    assert len(worker.fill()) == 32, "who is alone has all of them"
    worker = Worker(max_requests=32, num_blocks=10_000)
    worker.places.charge("bob", 0, 8)
    worker.come("ann", 100)
    assert len(worker.fill()) == 28
    worker.come("bob", 1)
    worker.come("eve", 1)
    assert sorted(worker.fill()) == ["bob", "eve"], "at once: nobody gives way to them"


def test_others_are_those_who_were_served_lately() -> None:
    order = FairOrder(clock := Clock())
    order.charge("ann", 1.0)
    assert not order.has_others("ann")
    assert order.has_others("bob")
    clock.now += HALF_LIFE_SECONDS + 1
    assert not order.has_others("bob")


def test_a_request_gives_way_to_a_client_that_has_none_there() -> None:
    worker = Worker(max_requests=3)
    worker.come("ann", 5)
    worker.fill()

    def to_pause() -> Generation | None:
        return worker.places.to_pause(worker.open, worker.leaving, worker.offers)

    assert to_pause() is None, "nobody else waits"
    worker.come("bob", 1)
    worker.come("eve", 1)
    newest = to_pause()
    assert newest is worker.open[3]
    newest.is_pausing = True
    assert to_pause() is None, "one is on its way"
    newest.take_back()
    assert worker.fill() == ["bob"]
    again = to_pause()
    assert again is worker.open[2]
    again.take_back()
    assert worker.fill() == ["eve"]
    worker.come("dan", 1)
    assert to_pause() is None, "each has one"
    worker.end("eve")
    assert worker.fill() == ["dan"]


def test_who_waits_for_room_in_the_cache_gets_it_as_well() -> None:
    worker = Worker(max_requests=32, block_size=16, num_blocks=100, step_tokens=4096)
    worker.come("ann", 4, num_tokens=400)
    worker.fill()
    worker.come("bob", 1, num_tokens=400)
    assert worker.fill() == []
    assert worker.places.to_pause(worker.open, worker.leaving, worker.offers) is worker.open[3]
