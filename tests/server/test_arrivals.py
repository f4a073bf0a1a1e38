"""Requests are made ready beside each other, and who left is not made ready at all."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from hypocenter import SamplingParams
from hypocenter.wire.messages import Submit
from hypocenter.worker.arrivals import Arrivals

SECONDS = 20.0


class Admitted:
    """What was admitted, and whether it was wanted; requests named in `held` wait for the test."""

    def __init__(self, *held: int) -> None:
        self.begun = {number: threading.Event() for number in range(1, 9)}
        self.held = {number: threading.Event() for number in held}
        self.wanted: dict[int, bool] = {}
        self.errors: list[BaseException] = []
        self.arrivals = Arrivals(self._admit, self.errors.append)

    def _admit(self, message: Submit, is_wanted: Callable[[], bool]) -> None:
        self.begun[message.id].set()
        if message.id in self.held:
            assert self.held[message.id].wait(SECONDS)
        if message.prompt_ids == (666,):
            raise ValueError("no")
        self.wanted[message.id] = is_wanted()

    def come(self, number: int, *, form: str = "", prompt: int = 1) -> None:
        self.arrivals.put(Submit(number, SamplingParams(), (prompt,), form=form))


def test_a_form_holds_up_no_other_request() -> None:
    admitted = Admitted(1)
    admitted.come(1, form="slow")
    assert admitted.begun[1].wait(SECONDS)
    admitted.come(2)
    admitted.come(3, form="behind it")
    assert admitted.begun[2].wait(SECONDS)
    assert not admitted.begun[3].is_set()
    admitted.held[1].set()
    assert admitted.begun[3].wait(SECONDS)
    admitted.arrivals.close()


def test_who_left_is_not_wanted_any_more() -> None:
    admitted = Admitted(1)
    admitted.come(1)
    admitted.come(2)
    admitted.come(3)
    assert admitted.begun[1].wait(SECONDS)
    admitted.arrivals.cancel(1)
    admitted.arrivals.cancel(2)
    admitted.arrivals.cancel(9)
    admitted.held[1].set()
    assert admitted.begun[3].wait(SECONDS)
    while 3 not in admitted.wanted:
        pass
    assert admitted.wanted == {1: False, 2: False, 3: True}
    admitted.arrivals.close()
    assert admitted.arrivals._wanted == {}, "nothing is kept of those that were admitted"


def test_an_error_of_the_worker_is_not_swallowed() -> None:
    admitted = Admitted()
    admitted.come(1, prompt=666)
    admitted.arrivals.close()
    [error] = admitted.errors
    with pytest.raises(ValueError, match="no"):
        raise error
