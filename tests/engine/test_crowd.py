"""64 requests together give, to the bit, what each gives alone: also across a death."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from crowd import (
    NUM_REQUESTS,
    PREFIX,
    Place,
    Told,
    across_a_death,
    crowd,
    differing,
    each_alone,
    open_llm,
    run,
    together,
    told,
)

from hypocenter import LLM

pytestmark = pytest.mark.tier("sim", fast=lambda case: case.kv_dtype == "f16")


@pytest.fixture(scope="module", params=["f16", "q4_0_hadamard"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def place(kv_dtype: str) -> Place:
    return Place("cpu", kv_dtype=kv_dtype)


@pytest.fixture(scope="module")
def expected(place: Place) -> list[Told]:
    with open_llm(place, num_requests=1) as llm:
        return each_alone(llm, crowd())


@pytest.fixture
def path() -> Iterator[str]:
    file = os.memfd_create("blocks")
    yield f"/proc/{os.getpid()}/fd/{file}"
    os.close(file)


def test_in_company_each_has_what_it_has_alone(expected: list[Told], place: Place) -> None:
    with open_llm(place, num_requests=NUM_REQUESTS) as llm:
        requests = together(llm, crowd())
        assert run(llm, requests) == NUM_REQUESTS
        assert sum(request.num_cached > 0 for request in requests) > 0
        assert differing(expected, [told(request) for request in requests]) == []
    assert sum(bool(one.logprobs) for one in expected) > NUM_REQUESTS // 4


def test_across_a_death_each_goes_on_with_the_same_bits(
    expected: list[Told], path: str, place: Place
) -> None:
    both, resumed = across_a_death(place, 14, path)
    assert differing(expected, both) == []
    assert len(resumed) > NUM_REQUESTS // 2
    # Blocks outlive the process, but for those of its last steps.
    num_left = sum(request.num_cached >= PREFIX // 16 * 16 for request in resumed)
    assert num_left > len(resumed) // 2


def test_one_number_in_one_block_of_a_prefix_is_seen(expected: list[Told], place: Place) -> None:
    """Or these tests could not fail: a value of the first layer changes while all run."""

    def spoil(llm: LLM) -> None:
        page = llm.engine.runner._pages.values[0].data
        block = next(iter(llm.engine.cache._kept.values()))
        page[block, 0, 0, 0] += 1

    with open_llm(place, num_requests=NUM_REQUESTS) as llm:
        requests = together(llm, crowd())
        run(llm, requests, 8)
        spoil(llm)
        run(llm, requests)
        assert differing(expected, [told(request) for request in requests])
