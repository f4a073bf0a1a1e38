"""How long a worker may say nothing, by a clock that the test sets."""

from __future__ import annotations

from test_supervisor import FACTS

from hypocenter import SamplingParams
from hypocenter.server.patience import GRACE_SECONDS, Patience
from hypocenter.watch.child import Deadlines
from hypocenter.wire.messages import (
    Accepted,
    Cancel,
    Dropped,
    Ending,
    EngineState,
    Failed,
    Loading,
    News,
    Piece,
    Ready,
    Submit,
)

STEP, FIRST, LOAD = 10.0, 100.0, 50.0


def ready() -> Patience:
    """Of a worker that has loaded its model by time 100."""
    patience = Patience(Deadlines(FIRST, STEP), LOAD)
    patience.begin(0.0)
    patience.hear(Ready(FACTS, 1.0), 100.0)
    return patience


def news(num_steps: int, *pieces: Piece) -> News:
    return News(pieces, EngineState(num_steps=num_steps))


def test_loading_is_waited_for_as_long_as_something_is_said() -> None:
    patience = Patience(Deadlines(FIRST, STEP), LOAD)
    assert patience.seconds_late(1e6) is None, "a spare one owes nothing"
    patience.begin(0.0)
    patience.hear(Loading("loading weights", 0.5), 49.0)
    assert patience.seconds_late(98.0) is None
    assert patience.seconds_late(100.0) == 51.0
    patience.hear(Ready(FACTS, 1.0), 100.0)
    assert patience.seconds_late(1e6) is None


def test_an_open_request_is_owed_a_word_within_the_deadline_of_a_step() -> None:
    patience = ready()
    patience.say(Submit(1, SamplingParams()), 1000.0)
    patience.hear(Accepted(1), 1000.0)
    assert patience.seconds_late(1000.0 + FIRST + GRACE_SECONDS) is None, "the first compiles"
    assert patience.seconds_late(1000.1 + FIRST + GRACE_SECONDS) is not None
    patience.hear(news(2), 1050.0)
    assert patience.seconds_late(1050.0 + STEP + GRACE_SECONDS) is None
    assert patience.seconds_late(1066.0) == 16.0
    patience.hear(news(3, Piece(1, "x", (7,))), 1060.0)
    assert patience.seconds_late(1066.0) is None


def test_who_has_nothing_to_do_may_be_silent() -> None:
    patience = ready()
    patience.say(Submit(1, SamplingParams()), 200.0)
    patience.say(Submit(2, SamplingParams()), 200.0)
    patience.hear(news(9, Piece(1, "x", (7,), ending=Ending("stop"))), 201.0)
    assert patience.seconds_late(1e6) is not None
    patience.say(Cancel(2), 202.0)
    assert patience.seconds_late(1e6) is not None, "it owes an end"
    patience.hear(Dropped(2), 203.0)
    assert patience.seconds_late(1e6) is None
    patience.say(Submit(3, SamplingParams()), 1e6)
    assert patience.seconds_late(1e6 + 1) is None, "its silence was none of waiting"
    assert patience.seconds_late(1e6 + STEP + GRACE_SECONDS + 1) is not None
    patience.hear(Failed(3, "X", "no"), 1e6 + 2)
    assert patience.seconds_late(2e6) is None
