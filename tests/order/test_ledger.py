"""The order of streams: vector clocks against every way in which a small program can run."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from hypocenter.order.clocks import HOST
from hypocenter.order.extents import Extent, bytes_at, covers, share
from hypocenter.order.ledger import Conflict, Instant, Ledger, Use, are_ordered
from hypocenter.record.order_events import Disorder, OrderStep

STREAMS, MEMORIES, EVENTS = ("default", "left", "right"), (1, 2), (1, 2)


@dataclass(frozen=True)
class Asked:
    """`action` use, or that of an OrderStep; a use by the host is in stream HOST."""

    action: str
    stream: str = ""
    memory: int = 0
    is_write: bool = False
    event: int = 0


def random_program(rng: random.Random, length: int) -> list[Asked]:
    def one() -> Asked:
        stream = rng.choice(STREAMS)
        kind = rng.choice(("use", "use", "use", "record", "wait", "wait", "host", "host use"))
        if kind in ("use", "host use"):
            owner = stream if kind == "use" else HOST
            return Asked("use", owner, rng.choice(MEMORIES), rng.random() < 0.5)
        if kind == "host":
            how = rng.randrange(6)
            if how < 3:
                return Asked("host", event=rng.choice(EVENTS))
            return Asked("host", "" if how == 5 else stream)
        return Asked(kind, stream, event=rng.choice(EVENTS))

    return [one() for _ in range(length)]


def races_by_trying(program: list[Asked]) -> set[tuple[int, int]]:
    """Pairs of conflicting uses that can run in either order, found by running every schedule.

    A state is how much the host has asked for and how far each stream is.
    """
    queues: dict[str, list[tuple[str, int]]] = {stream: [] for stream in STREAMS}
    recorded: dict[int, int] = {}
    #: For each step of the host what it puts where, and for what it waits: (stream, length).
    puts: list[tuple[str, int] | None] = []
    waits: list[list[tuple[str, int]]] = []
    places: dict[int, tuple[str, int]] = {}  # of a use, or of a record, in its queue
    for number, asked in enumerate(program):
        put, wait = None, []
        if (asked.action == "use" and asked.stream != HOST) or asked.action in ("record", "wait"):
            of = number
            if asked.action == "wait":
                of = recorded.get(asked.event, -1)
            queue = queues[asked.stream]
            queue.append((asked.action, of))
            put = asked.stream, len(queue)
            places.setdefault(number, (asked.stream, len(queue)))
            if asked.action == "record":
                recorded[asked.event] = number
        elif asked.action == "host" and asked.event:
            if asked.event in recorded:
                wait = [places[recorded[asked.event]]]
        elif asked.action == "host":
            names = [asked.stream] if asked.stream else STREAMS
            wait = [(name, len(queues[name])) for name in names]
        puts.append(put)
        waits.append(wait)
    uses = [n for n, asked in enumerate(program) if asked.action == "use"]
    first: set[tuple[int, int]] = set()
    start = (0, *(0 for _ in STREAMS))
    seen, left = {start}, [start]
    while left:
        pc, *done = left.pop()
        at = dict(zip(STREAMS, done, strict=True))
        there = dict.fromkeys(STREAMS, 0)
        for put in puts[:pc]:
            if put:
                there[put[0]] = put[1]

        def has_run(use: int, pc: int = pc, at: dict[str, int] = at) -> bool:
            if program[use].stream == HOST:
                return use < pc
            stream, place = places[use]
            return at[stream] >= place

        ran = {use for use in uses if has_run(use)}
        first |= {(a, b) for a in ran for b in uses if b not in ran}
        nexts = []
        if pc < len(program) and all(at[stream] >= place for stream, place in waits[pc]):
            nexts.append((pc + 1, *done))
        for number, stream in enumerate(STREAMS):
            if at[stream] < there[stream]:
                action, of = queues[stream][at[stream]]
                if action == "wait" and of >= 0:
                    other, place = places[of]
                    if at[other] < place:
                        continue
                moved = list(done)
                moved[number] += 1
                nexts.append((pc, *moved))
        for state in nexts:
            if state not in seen:
                seen.add(state)
                left.append(state)
    return {
        (a, b)
        for a, b in itertools.combinations(uses, 2)
        if program[a].memory == program[b].memory
        and (program[a].is_write or program[b].is_write)
        and (a, b) in first
        and (b, a) in first
    }


def races_by_clocks(
    program: list[Asked],
) -> tuple[list[tuple[int, int, Conflict]], Ledger, dict[int, tuple[Instant, int]]]:
    ledger = Ledger()
    numbers: dict[int, int] = {}
    moments: dict[int, tuple[Instant, int]] = {}
    found = []
    for number, asked in enumerate(program):
        if asked.action == "use":
            moment = ledger.begin(asked.stream)
            use = Use(moment, bytes_at(64 * asked.memory, 8), asked.is_write, str(number), "")
            numbers[id(moment)] = number
            moments[number] = moment, ledger.num_steps
            for one in ledger.use(asked.memory, use):
                found.append((numbers[id(one.first.moment)], number, one))
        else:
            ledger.step(OrderStep(asked.action, asked.stream, asked.event))
    return found, ledger, moments


@pytest.mark.parametrize("seed", range(12))
def test_what_is_found_is_what_some_schedule_shows(seed: int) -> None:
    rng = random.Random(seed)
    num_racing = 0
    for _ in range(60):
        program = random_program(rng, rng.randint(4, 9))
        truth = races_by_trying(program)
        found, _, _ = races_by_clocks(program)
        assert {(a, b) for a, b, _ in found} <= truth, program
        # Of each memory at least one pair is found where there is any.
        racing = {program[a].memory for a, _ in truth}
        assert {program[a].memory for a, _, _ in found} == racing, program
        num_racing += bool(truth)
    assert 10 < num_racing < 55, "the programs say nothing"


@pytest.mark.parametrize("seed", range(4))
def test_what_lies_between_two_uses_decides_their_order(seed: int) -> None:
    """Red and green of the doctor's proof: the steps between alone, and one wait more."""
    rng = random.Random(100 + seed)
    for _ in range(60):
        program = random_program(rng, rng.randint(4, 9))
        truth = races_by_trying(program)
        _, ledger, moments = races_by_clocks(program)
        for a, b in itertools.combinations(moments, 2):
            one, other = program[a], program[b]
            is_conflict = one.memory == other.memory and (one.is_write or other.is_write)
            if not is_conflict or one.stream == other.stream:
                continue
            steps, is_cut = ledger.between(moments[a][0])
            kept = steps[: moments[b][1] - moments[a][0].num_steps]
            assert not is_cut
            assert are_ordered(one.stream, other.stream, kept) == ((a, b) not in truth), program
            assert are_ordered(one.stream, other.stream, kept, with_wait=True)


def use(ledger: Ledger, stream: str, number: int, region: Extent, *, write: bool) -> list[Conflict]:
    return ledger.use(number, Use(ledger.begin(stream), region, write, "op", "a.py:1"))


def freed_while_read(*steps: OrderStep, kept: bool = False, after: int = 4096) -> list[Conflict]:
    """x of the default stream is read on the other one and freed; y of `after` bytes comes."""
    ledger = Ledger()
    x, y = bytes_at(0, 4096), bytes_at(0 if after == 4096 else 1 << 16, after)
    ledger.make(1, "default", x)
    use(ledger, "default", 1, x, write=True)
    ledger.step(OrderStep("record", "default", 1))
    ledger.step(OrderStep("wait", "side", 1))
    assert use(ledger, "side", 1, x, write=False) == []
    if kept:
        ledger.keep_for(1, "side")
    ledger.free(1, lambda: "a.py:7")
    for step in steps:
        ledger.step(step)
    ledger.make(2, "default", y)
    return use(ledger, "default", 2, y, write=True)


def test_memory_that_is_freed_while_another_stream_reads_it() -> None:
    [found] = freed_while_read()
    assert found.kind is Disorder.REUSED
    assert found.freed is not None
    assert found.freed.site == "a.py:7"
    assert found.is_same
    [possible] = freed_while_read(after=512)
    assert not possible.is_same


@pytest.mark.parametrize(
    "steps",
    [
        (OrderStep("record", "side", 5), OrderStep("wait", "default", 5)),
        (OrderStep("host", "side"),),
        (OrderStep("host"),),
    ],
)
def test_memory_that_is_waited_for_before_it_is_given_again(steps: tuple[OrderStep, ...]) -> None:
    assert freed_while_read(*steps) == []


def test_memory_that_is_kept_for_a_stream_or_does_not_fit() -> None:
    assert freed_while_read(kept=True) == []
    assert freed_while_read(after=1 << 20) == []


def test_a_blocking_stream_and_the_default_stream_order_themselves() -> None:
    ledger = Ledger()
    x = bytes_at(0, 64)
    use(ledger, "default", 1, x, write=True)
    assert [found.kind for found in use(ledger, "side", 1, x, write=False)] == [Disorder.WAIT]
    ledger = Ledger()
    ledger.step(OrderStep("blocking", "side", other="default"))
    use(ledger, "default", 1, x, write=True)
    assert use(ledger, "side", 1, x, write=False) == []
    assert use(ledger, "default", 1, x, write=True) == []
    assert [found.kind for found in use(ledger, "third", 1, x, write=False)] == [Disorder.WAIT]


def test_columns_of_one_tensor_share_nothing() -> None:
    left, right = Extent(0, (8, 4), (8, 1), 4), Extent(16, (8, 4), (8, 1), 4)
    both = Extent(0, (8, 8), (8, 1), 4)
    assert share(left, right) is False
    assert share(left, both) is True
    assert share(left, Extent(12, (8, 4), (8, 1), 4)) is True
    assert share(left, Extent(0, (0,), (1,), 4)) is False
    assert covers(both, left)
    assert not covers(left, right)
    many = Extent(0, (1 << 15, 1), (2, 1), 4)
    assert share(many, Extent(4, (1 << 15, 1), (2, 1), 4)) is None


def test_streams_that_block_are_among_what_lies_between_two_uses() -> None:
    ledger = Ledger()
    ledger.step(OrderStep("blocking", "side", other="default"))
    first = ledger.begin("default")
    between, is_cut = ledger.between(first)
    assert not is_cut
    assert are_ordered("default", "side", between)
    assert not are_ordered("default", "third", between)
