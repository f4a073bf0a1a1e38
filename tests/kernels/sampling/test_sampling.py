"""Sampling: random stream, filters and their order, and kernel against reference bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.kernel_launch import for_python

from hypocenter.base.errors import BadLogits, LaunchRejected, UsageError
from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.draws import philox4x32, uniform
from hypocenter.device import copies, memory
from hypocenter.kernels.sampling.draw import TokenChoice
from hypocenter.kernels.sampling.sampling import (
    HostSampler,
    exp_reference,
    sample,
    sample_reference,
)
from hypocenter.kernels.sampling.sampling_cpu import _exp
from hypocenter.settings.config import SamplingParams

Floats = npt.NDArray[np.float32]

MAX_VOCAB = 1 << 21


def as_tensor(logits: Floats) -> Tensor:
    tensor = memory.allocate("logits", "test", DType.F32, logits.shape)
    copies.to_device(tensor, np.ascontiguousarray(logits))
    return tensor


def both(logits: Floats, draws: list[TokenChoice]) -> list[int]:
    """The choice of the kernel, once the reference agrees."""
    chosen = sample(as_tensor(logits), draws)
    assert chosen == sample_reference(logits, draws)
    assert all(isinstance(token, int) for token in chosen)
    return [token for token in chosen if isinstance(token, int)]


def choose(logits: list[float] | Floats, position: int = 0, **params: Any) -> int:
    row = np.array([logits], np.float32)
    return both(row, [TokenChoice(SamplingParams(**params), position)])[0]


def support(logits: list[float], **params: Any) -> set[int]:
    """Every token that turns up in 400 draws."""
    rows = np.tile(np.array(logits, np.float32), (400, 1))
    return set(both(rows, [TokenChoice(SamplingParams(**params), n) for n in range(400)]))


def counted(
    params: SamplingParams, prompt: list[int], output: list[int], position: int
) -> TokenChoice:
    ids = np.array(sorted({*prompt, *output}), np.int32)
    counts = np.array([output.count(token) for token in ids], np.int32)
    return TokenChoice(params, position, ids, counts)


def test_what_is_kept_from_one_step_to_the_next_changes_no_choice() -> None:
    random, sampler = np.random.default_rng(0), HostSampler()
    places = [as_tensor(np.zeros((rows, 50), np.float32)) for rows in (1, 2, 1)]
    asked: list[dict[str, Any]] = [
        {}, {"temperature": 1.5}, {"temperature": 1.5, "min_p": 0.3}, {"repeat_penalty": 3.0},
        {"temperature": 1.5, "top_k": 3}, {"temperature": 1.5, "top_p": 0.5}, {},
    ]  # fmt: skip
    for place in (*places, *places):
        for step, wanted in enumerate(asked):
            rows = random.standard_normal(place.shape).astype(np.float32) * 2
            copies.to_device(place, rows)
            params = SamplingParams(**wanted, seed=step)
            ids = [int(row.argmax()) for row in rows] if "repeat_penalty" in wanted else []
            draws = [counted(params, ids, [], step + row) for row in range(place.shape[0])]
            assert sample(place, draws, sampler) == sample_reference(rows, draws)
    with pytest.raises(LaunchRejected, match="each row of logits takes one draw"):
        sample(places[2], draws * 2, sampler)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123, tests/kat_vectors: philox4x32 10
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == words


def test_uniform_takes_the_high_bits_and_depends_on_all_of_seed_and_position() -> None:
    # 53 bits of the first known answer: 0x6627E8D5 and the upper 21 bits of 0xE169C58D.
    assert uniform(0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53
    places = [(0, 0), (1, 0), (1 << 32, 0), ((1 << 64) - 1, 0), (0, 1), (0, 1 << 32), (1, 1)]
    numbers = [uniform(seed, position) for seed, position in places]
    assert len(set(numbers)) == len(places)


def test_uniform_is_uniform() -> None:
    numbers = np.array([uniform(7, position) for position in range(4000)])
    assert 0 <= numbers.min() < numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    # chi-squared with 19 degrees of freedom exceeds 43.8 once in a thousand; the stream is fixed
    assert ((counts - 200) ** 2 / 200).sum() < 43.8


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.concatenate([-np.geomspace(1e-300, 708, 5000), -np.arange(0, 708, 0.25), [-0.0]])
    exact = np.array([math.exp(value) for value in x])
    assert np.abs(exp_reference(x) - exact).max() <= 2 * 2.0**-53
    assert (np.abs(exp_reference(x) / exact - 1) <= 2 * 2.0**-52).all()
    assert (exp_reference(np.array([-708.0001, -1e300, -np.inf])) == 0).all()
    assert exp_reference(np.zeros(1))[0] == 1


def test_exp_stays_inside_its_table_whatever_it_is_given() -> None:
    # In the kernel nothing checks the index: infinity and NaN would read memory that is not ours.
    given = [np.inf, 1e308, 1e18, 800.0, 1e-300, 0.0, -0.0, np.nan, -708.0001, -1e308, -np.inf]
    wanted = [1.0] * 7 + [0.0] * 4
    assert exp_reference(np.array(given)).tolist() == wanted
    exp = for_python(_exp)
    assert [exp(x) for x in given] == wanted


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert choose([1, 3, 2, 3, 3]) == 1
    assert choose([-np.inf, -5, -np.inf, -5]) == 1
    assert choose([-0.0, 0.0]) == 0
    assert choose([2.5]) == 0


def test_top_k_one_takes_the_lowest_of_equals_at_any_temperature() -> None:
    assert support([1, 3, 2, 3, 3], temperature=2.0, top_k=1) == {1}
    assert support([1, 3, 2, 3, 3], temperature=2.0, top_k=2) == {1, 3}


def test_top_k_of_the_whole_vocabulary_changes_nothing() -> None:
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
    for position in range(50):
        without = choose(logits, position, temperature=1.0)
        assert choose(logits, position, temperature=1.0, top_k=50) == without
        assert choose(logits, position, temperature=1.0, top_k=1000) == without


# probabilities 0.1, 0.4, 0.2, 0.3
FOUR = [math.log(0.1), math.log(0.4), math.log(0.2), math.log(0.3)]


def test_without_filters_every_token_comes_as_often_as_its_probability() -> None:
    rows = np.tile(np.array(FOUR, np.float32), (4000, 1))
    draws = [TokenChoice(SamplingParams(temperature=1.0), n) for n in range(4000)]
    counts = np.bincount(both(rows, draws))
    wanted = 4000 * np.array([0.1, 0.4, 0.2, 0.3])
    # chi-squared with 3 degrees of freedom exceeds 16.3 once in a thousand; the stream is fixed
    assert ((counts - wanted) ** 2 / wanted).sum() < 16.3


def test_temperature_sharpens_and_flattens() -> None:
    rows = np.tile(np.array(FOUR, np.float32), (4000, 1))
    for temperature in (0.5, 2.0):
        draws = [TokenChoice(SamplingParams(temperature=temperature), n) for n in range(4000)]
        counts = np.bincount(both(rows, draws))
        wanted = np.array([0.1, 0.4, 0.2, 0.3]) ** (1 / temperature)
        wanted *= 4000 / wanted.sum()
        assert ((counts - wanted) ** 2 / wanted).sum() < 16.3


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.0, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.69, {1, 3}),
        (0.71, {1, 2, 3}),
        (0.91, {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_the_shortest_prefix_that_holds_its_mass(top_p: float, kept: set[int]) -> None:
    assert support(FOUR, temperature=1.0, top_p=top_p) == kept


@pytest.mark.parametrize(
    ("min_p", "kept"),
    [(0.24, {0, 1, 2, 3}), (0.26, {1, 2, 3}), (0.51, {1, 3}), (0.76, {1}), (1.0, {1})],
)
def test_min_p_is_relative_to_the_most_likely(min_p: float, kept: set[int]) -> None:
    assert support(FOUR, temperature=1.0, min_p=min_p) == kept


def test_top_p_counts_only_what_top_k_left() -> None:
    # Of all, 0.4 + 0.3 < 0.75; of the three that top_k leaves, (0.4 + 0.3) / 0.9 > 0.75.
    assert support(FOUR, temperature=1.0, top_p=0.75) == {1, 2, 3}
    assert support(FOUR, temperature=1.0, top_p=0.75, top_k=3) == {1, 3}


def test_temperature_comes_after_top_p_and_min_p() -> None:
    # At temperature 10 all four are nearly equal: applied first, it would let all of them through.
    assert support(FOUR, temperature=10.0, top_p=0.69) == {1, 3}
    assert support(FOUR, temperature=10.0, min_p=0.26) == {1, 2, 3}


@pytest.mark.parametrize(
    ("number", "chosen"), [(0.0, 1), (0.499, 1), (0.5, 2), (0.999, 2), (1 - 2.0**-53, 2)]
)
def test_the_draw_takes_the_first_token_beyond_its_share(
    number: float, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypocenter.kernels.sampling.draw.uniform", lambda seed, position: number)
    assert choose([-np.inf, 0, 0, -np.inf], temperature=1.0) == chosen


def test_top_p_sorts_on_when_its_first_guess_is_too_short() -> None:
    flat = np.linspace(0, 0.01, 5000, dtype=np.float32)[np.random.default_rng(1).permutation(5000)]
    draws = [TokenChoice(SamplingParams(temperature=1.0, top_p=0.9), n) for n in range(64)]
    chosen = both(np.tile(flat, (64, 1)), draws)
    assert min(flat[chosen]) > 0.0009  # the lowest tenth is out
    assert min(flat[chosen]) < 0.005  # and more than the first 256 or 2048 are in


def test_repeat_penalty_divides_above_zero_and_multiplies_below() -> None:
    params = SamplingParams(repeat_penalty=2.0)
    row = np.array([[3, 2, 1]], np.float32)
    assert both(row, [counted(params, [0], [], 1)]) == [1]  # 1.5, 2, 1
    assert both(row, [counted(params, [0, 0, 0], [0], 4)]) == [1]  # once, however often
    assert both(row, [counted(params, [0], [1], 2)]) == [0]  # 1.5, 1, 1
    assert both(row - 4, [counted(params, [0], [], 1)]) == [0]  # -2, -2, -3: a tie, lowest id
    assert both(row - 4.5, [counted(params, [0], [], 1)]) == [1]  # -3, -2.5, -3.5


def test_the_strongest_penalty_keeps_the_largest_logits_finite() -> None:
    for value in (0.0, 5e-324, 1e-308, 0.0099, math.nan, -1.0):
        with pytest.raises(UsageError, match=r"repeat_penalty is .* must be from 0.01 to 100"):
            SamplingParams(repeat_penalty=value)
    largest = float(np.finfo(np.float32).max)
    row = np.array([[0.5, largest, -largest, largest, -np.inf]], np.float32)
    for repeat_penalty in (0.01, 100.0):
        for temperature in (0.0, 5e-324, 0.7, 100.0):
            params = SamplingParams(
                temperature=temperature, repeat_penalty=repeat_penalty, top_p=0.9, seed=3
            )
            chosen = both(row, [counted(params, [0, 1, 2, 4], [1], 5)])
            assert chosen == [1 if repeat_penalty < 1 else 3]


def test_presence_and_frequency_look_at_the_output_only() -> None:
    row = np.array([[3, 2, 0]], np.float32)
    presence = SamplingParams(presence_penalty=1.5)
    assert both(row, [counted(presence, [0, 0], [], 2)]) == [0]
    assert both(row, [counted(presence, [], [0], 1)]) == [1]
    assert both(row, [counted(presence, [], [0, 1, 1, 1], 4)]) == [0]  # 1.5, 0.5, 0
    frequency = SamplingParams(frequency_penalty=0.6)
    assert both(row, [counted(frequency, [0, 0, 0, 0], [0], 5)]) == [0]  # 2.4
    assert both(row, [counted(frequency, [], [0, 0], 2)]) == [1]  # 1.8
    raised = SamplingParams(presence_penalty=-2.0)
    assert both(row, [counted(raised, [], [1], 1)]) == [1]


def test_repeat_penalty_comes_before_the_others() -> None:
    params = SamplingParams(repeat_penalty=2.0, presence_penalty=1.0)
    # 4 / 2 - 1 = 1, not (4 - 1) / 2 = 1.5
    assert both(np.array([[4, 1.2]], np.float32), [counted(params, [], [0], 1)]) == [1]


def test_a_row_is_chosen_alike_alone_and_among_others() -> None:
    rng = np.random.default_rng(2)
    rows = rng.normal(0, 2, (9, 777)).astype(np.float32)
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=5)
    draws = [TokenChoice(params, position) for position in range(9)]
    alone = [both(rows[n : n + 1], [draws[n]])[0] for n in range(9)]
    assert both(rows, draws) == alone
    assert both(rows[::-1].copy(), draws[::-1]) == alone[::-1]


def mask_of(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """The bits of a mask; beyond the vocabulary they are set, and must not count."""
    bits = np.ones(-(-allowed.size // 32) * 32, bool)
    bits[: allowed.size] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 4100])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.3, "top_k": 3}, {"repeat_penalty": 2.0}]
)
def test_a_mask_leaves_its_tokens_as_a_row_of_them_alone_would(
    vocab_size: int, params: dict[str, Any]
) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = rng.normal(0, 2, (6, vocab_size)).astype(np.float32)
    allowed = rng.random((6, vocab_size)) < 0.3
    allowed[:, -1] |= ~allowed.any(axis=1)
    free = [counted(SamplingParams(seed=row, **params), [0], [0], row) for row in range(6)]
    masks = [None if row % 2 else mask_of(allowed[row]) for row in range(6)]
    draws = [replace(draw, mask=mask) for draw, mask in zip(free, masks, strict=True)]
    chosen = both(rows, draws)
    plain = np.where(allowed, rows, np.float32(-np.inf))
    plain[1::2] = rows[1::2]
    assert chosen == both(plain, free)
    assert chosen[1::2] == both(rows, free)[1::2]
    assert all(allowed[row, chosen[row]] for row in (0, 2, 4))
    assert [both(rows[row : row + 1], [draws[row]])[0] for row in range(6)] == chosen


def test_what_a_mask_hides_still_tells_of_a_broken_model() -> None:
    rows = np.array([[0, 1, np.nan], [0, 1, -np.inf], [0, 1, 2]], np.float32)
    allowed = np.array([[True, False, False], [False, False, True], [True, False, False]])
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature)
        draws = [TokenChoice(params, 0, mask=mask_of(row)) for row in allowed]
        for chosen in (sample(as_tensor(rows), draws), sample_reference(rows, draws)):
            assert str(chosen[0]) == "logits row 0: 1 of 3 values are NaN or +inf"
            assert "row 1: all 3 values are -inf" in str(chosen[1])
            assert chosen[2] == 0


def test_a_mask_of_another_vocabulary_is_refused() -> None:
    draw = TokenChoice(SamplingParams(), 0, mask=np.full(2, -1, np.int32))
    with pytest.raises(LaunchRejected, match="row 0: the mask has 2 words, not 1"):
        sample(as_tensor(np.zeros((1, 32), np.float32)), [draw])


def test_bad_rows_are_named_and_leave_the_others_alone() -> None:
    rows = np.array([[0, 1, 2], [0, np.nan, np.inf], [1, 0, 0], [-np.inf] * 3], np.float32)
    draws = [TokenChoice(SamplingParams(temperature=t), 0) for t in (0.0, 0.0, 0.0, 1.0)]
    for chosen in (sample(as_tensor(rows), draws), sample_reference(rows, draws)):
        assert chosen[0] == 2
        assert chosen[2] == 0
        assert isinstance(chosen[1], BadLogits)
        assert (chosen[1].row, chosen[1].num_bad, chosen[1].vocab_size) == (1, 2, 3)
        assert str(chosen[1]) == "logits row 1: 2 of 3 values are NaN or +inf"
        assert isinstance(chosen[3], BadLogits)
        assert "row 3: all 3 values are -inf" in str(chosen[3])


def test_arguments_that_do_not_fit_are_refused() -> None:
    logits = as_tensor(np.zeros((2, 4), np.float32))
    good = TokenChoice(SamplingParams(), 0)
    with pytest.raises(LaunchRejected, match="num_draws = 1, num_rows = 2, but each row"):
        sample(logits, [good])
    for bad_id in (-1, 4):
        outside = TokenChoice(
            SamplingParams(), 0, np.array([bad_id], np.int32), np.zeros(1, np.int32)
        )
        with pytest.raises(
            LaunchRejected, match=rf"context_ids\[1, 0\] = {bad_id}, but the vocabulary"
        ):
            sample(logits, [good, outside])
    uneven = TokenChoice(SamplingParams(), 0, np.zeros(2, np.int32), np.zeros(1, np.int32))
    with pytest.raises(LaunchRejected, match="2 context ids, but 1 counts"):
        sample(logits, [good, uneven])
    with pytest.raises(LaunchRejected, match="logits is i32, but it is read as f32"):
        sample(memory.allocate("logits", "test", DType.I32, (1, 4)), [good])
    assert sample(memory.allocate("logits", "test", DType.F32, (0, 4)), []) == []


def test_the_largest_vocabulary_and_no_larger() -> None:
    rows = np.random.default_rng(4).normal(0, 1, (1, MAX_VOCAB)).astype(np.float32)
    for top_k in (0, 40):
        both(rows, [TokenChoice(SamplingParams(temperature=1.0, top_k=top_k, top_p=0.01), 9)])
    too_large = memory.allocate("logits", "test", DType.F32, (1, MAX_VOCAB + 1))
    with pytest.raises(LaunchRejected, match="vocab_size = 2097153, but a vocabulary has 1 to"):
        sample(too_large, [TokenChoice(SamplingParams(), 0)])


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.01, 0.8, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repeat_penalty=st.sampled_from([0.01, 0.7, 1.0, 1.3, 100.0]),
    presence_penalty=st.sampled_from([-0.5, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([-0.2, 0.0, 0.3]),
    seed=st.integers(0, (1 << 64) - 1),
)


@settings(max_examples=150, deadline=None)
@given(
    params=PARAMS,
    vocab_size=st.sampled_from([1, 2, 7, 255, 256, 257, 1001, 4100]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 8.0, 300.0]),
    num_rows=st.sampled_from([1, 2, 5]),
    ties=st.booleans(),
    masked=st.booleans(),
    has_masks=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
def test_kernel_and_reference_choose_the_same_token(
    params: SamplingParams,
    vocab_size: int,
    scale: float,
    num_rows: int,
    ties: bool,
    masked: bool,
    has_masks: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, scale, (num_rows, vocab_size)).astype(np.float32)
    if ties:
        rows = np.round(rows)
    if masked:
        rows[:, 1:][rng.random((num_rows, vocab_size - 1)) < 0.5] = -np.inf
    draws = []
    for row in range(num_rows):
        ids = rng.permutation(vocab_size)[: rng.integers(vocab_size + 1)].astype(np.int32)
        counts = rng.integers(0, 4, ids.size).astype(np.int32)
        mask = None
        if has_masks and row != 1:
            allowed = rng.random(vocab_size) < 0.5
            allowed[0] = True  # which is never -inf
            mask = mask_of(allowed)
        draws.append(TokenChoice(params, row + int(rng.integers(1 << 20)), ids, counts, mask))
    both(rows, draws)
