"""Biases of single tokens: known logits on the CPU and on a simulated GPU, beside free rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from hypocenter.base.errors import BadLogits, LaunchRejected, UsageError
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.device.sim.sim import open_sim
from hypocenter.kernels.sampling.draw import TokenChoice, mask_of, num_mask_words
from hypocenter.kernels.sampling.sampling import HostSampler, sample, sample_reference
from hypocenter.kernels.sampling.sampling_plan import DeviceSampler
from hypocenter.settings.config import SamplingParams

Floats = npt.NDArray[np.float32]
SIM = "sim:h200"
GREEDY = SamplingParams()
WARM = SamplingParams(temperature=1.0, seed=7)
both_devices = pytest.mark.parametrize("device", ["cpu", SIM])


def as_tensor(logits: Floats, device: str) -> Tensor:
    if device != "cpu":
        devices.open_device(device)
    tensor = memory.allocate("logits", "test", DType.F32, logits.shape, device=device)
    copies.to_device(tensor, np.ascontiguousarray(logits))
    return tensor


def biased(draw: TokenChoice, biases: dict[int, float]) -> TokenChoice:
    ids = np.array(list(biases), np.int32)
    return replace(draw, bias_ids=ids, biases=np.array(list(biases.values()), np.float64))


def chosen(logits: Floats, draws: list[TokenChoice], device: str) -> list[Any]:
    """The choice of a device, once the reference agrees."""
    found = sample(as_tensor(logits, device), draws)
    assert [str(one) for one in found] == [str(one) for one in sample_reference(logits, draws)]
    return found


@both_devices
def test_a_bias_is_added_to_its_logit_before_anything_else(device: str) -> None:
    row, greedy = np.array([[3, 2, 1, -np.inf]], np.float32), TokenChoice(GREEDY, 0)

    def choose(biases: dict[int, float], draw: TokenChoice = greedy) -> int:
        return cast(int, chosen(row, [biased(draw, biases)], device)[0])

    assert choose({2: 1.9}) == 0
    assert choose({2: 2.1}) == 2
    assert choose({2: 2.0}) == 0  # a tie: the lowest id
    assert choose({0: -1.5}) == 1
    assert choose({2: 2.5, 0: 1.0}) == 0
    assert choose({3: 100.0, 1: 0.5}) == 0  # what can never come is not raised
    ids, counts = np.array([2], np.int32), np.array([1], np.int32)
    # (1 + 3) / 2 - 0.5 = 1.5: the bias comes before the penalties. The other way: 1 / 2 - 0.5 + 3.
    penalised = SamplingParams(repeat_penalty=2.0, presence_penalty=0.5)
    assert choose({2: 3.0, 0: -2.0}, TokenChoice(penalised, 0, ids, counts)) == 1
    mask = mask_of(np.array([False, True, True, True]))
    assert choose({0: 50.0}, replace(greedy, mask=mask)) == 1  # a mask is stronger
    assert choose({2: 50.0}, replace(greedy, mask=mask)) == 2


@both_devices
@pytest.mark.tier("sim", fast=lambda case: case.device == "cpu")
def test_filters_and_draws_follow_the_biased_logits(device: str) -> None:
    num_rows = 64 if device == "cpu" else 12
    rows = np.zeros((num_rows, 5), np.float32)
    raised = {3: 4.0, 1: 4.0}

    def support(**params: Any) -> set[int]:
        draws = [
            biased(TokenChoice(SamplingParams(temperature=1.0, **params), n), raised)
            for n in range(num_rows)
        ]
        return set(chosen(rows, draws, device))

    assert support(top_k=2) == {1, 3}
    assert support(top_p=0.9) == {1, 3}
    assert support(min_p=0.5) == {1, 3}
    assert device != "cpu" or support() > {1, 3}


@both_devices
@pytest.mark.parametrize("vocab_size", [1, 129, 1300])
@pytest.mark.tier("sim", fast=lambda case: case.device == "cpu")
def test_rows_with_and_without_biases_are_chosen_as_each_would_be_alone(
    vocab_size: int, device: str
) -> None:
    rng = np.random.default_rng(vocab_size)
    filters: tuple[dict[str, Any], ...] = (
        {}, {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5}, {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.0, "repeat_penalty": 1.3, "presence_penalty": 0.5},
    )  # fmt: skip
    rows = rng.normal(0, 2, (2 * len(filters), vocab_size)).astype(np.float32)
    draws: list[TokenChoice] = []
    for one in filters:
        for is_biased in (True, False):
            ids = rng.permutation(vocab_size)[: rng.integers(1, vocab_size + 1)].astype(np.int32)
            draw = TokenChoice(SamplingParams(seed=3, **one), len(draws))
            if "repeat_penalty" in one:
                counts = rng.integers(0, 4, ids.size).astype(np.int32)
                draw = replace(draw, context_ids=ids[::-1].copy(), output_counts=counts)
            if is_biased:
                draw = replace(draw, bias_ids=ids, biases=rng.normal(0, 3, ids.size))
            draws.append(draw)
    found = chosen(rows, draws, device)
    # A device agrees with the reference, so the reference may say what each would be alone.
    alone = [chosen(rows[n : n + 1], [draw], "cpu")[0] for n, draw in enumerate(draws)]
    assert found == alone
    plain = [replace(draw, bias_ids=np.zeros(0, np.int32), biases=np.zeros(0)) for draw in draws]
    free = chosen(rows, plain, "cpu")
    assert found[1::2] == free[1::2]
    if vocab_size > 1:
        assert found[::2] != free[::2]


@both_devices
def test_a_broken_row_stays_broken_whatever_is_added_to_it(device: str) -> None:
    rows = np.array([[0, np.nan], [-np.inf, -np.inf], [0, 1]], np.float32)
    for params in (GREEDY, WARM):
        found = chosen(rows, [biased(TokenChoice(params, 0), {1: 9.0})] * 3, device)
        assert isinstance(found[0], BadLogits)
        assert (found[0].num_bad, found[2]) == (1, 1)
        assert "all 2 values are -inf" in str(found[1])


@both_devices
def test_biases_that_do_not_fit_are_refused_by_name(device: str) -> None:
    logits = as_tensor(np.zeros((1, 8), np.float32), device)
    for ids, value, told in (
        ([1, 8], [1.0, 1.0], r"bias_ids\[0, 1\] = 8, but the vocabulary"),
        ([-1], [1.0], r"bias_ids\[0, 0\] = -1"),
        ([1], [1.0, 2.0], "row 0: 1 bias ids, but 2 biases"),
    ):
        draw = TokenChoice(GREEDY, 0, bias_ids=np.array(ids, np.int32), biases=np.array(value))
        with pytest.raises(LaunchRejected, match=told):
            sample(logits, [draw])


def test_what_the_host_keeps_from_step_to_step_holds_no_bias() -> None:
    rows = np.random.default_rng(2).normal(0, 2, (2, 50)).astype(np.float32)
    logits, sampler, free = as_tensor(rows, "cpu"), HostSampler(), [TokenChoice(GREEDY, 0)] * 2
    held = [biased(free[0], {7: 90.0}), free[1]]
    for draws in (free, held, free, held):
        assert sample(logits, draws, sampler) == sample_reference(rows, draws)


@pytest.mark.tier("sim")
def test_a_step_without_biases_launches_what_it_always_did() -> None:
    devices.open_device(SIM)
    rows = np.random.default_rng(3).normal(0, 2, (3, 129)).astype(np.float32)
    logits = as_tensor(rows, SIM)
    for params in (GREEDY, SamplingParams(temperature=1.0, top_k=3)):
        free = [TokenChoice(params, row) for row in range(3)]
        held = [biased(free[0], {5: 3.0}), *free[1:]]
        sampler, fresh = DeviceSampler(SIM, 129, 3), DeviceSampler(SIM, 129, 3)
        for draws in (held, free, held):  # one after the other
            assert sample(logits, draws, sampler) == sample_reference(rows, draws)
        launches, expected = (one.plan(logits, free).launches for one in (sampler, fresh))
        assert [(one.kernel, list(one.facts)) for one in launches] == [
            (one.kernel, list(one.facts)) for one in expected
        ]
        assert "bias_starts" not in fresh._buffers
        with_biases = [one.kernel for one in sampler.plan(logits, held).launches]
        assert with_biases.count("sample_bias") == 1


@pytest.mark.tier("sim")
def test_a_captured_plan_adds_the_biases_of_its_step_and_guarded_kernels_do_too() -> None:
    devices.use_backend(open_sim(SIM, graphs=True))
    rng = np.random.default_rng(8)
    rows = rng.normal(0, 2, (3, 1300)).astype(np.float32)
    logits = memory.allocate("logits", "test", DType.F32, rows.shape, device=SIM)
    copies.to_device(logits, rows)
    sampler = DeviceSampler(SIM, 1300, 3)
    # More than a block of 1024, and more than the first buffers hold: plans are made anew.
    for num_biases in (3, 3, 3, 1100, 1100, 5, 5):
        ids = rng.permutation(1300)[:num_biases].astype(np.int32)
        draw = replace(TokenChoice(WARM, 0), bias_ids=ids, biases=rng.normal(0, 9, num_biases))
        mask = mask_of(rng.random(1300) < 0.5)
        draws = [draw, TokenChoice(WARM, 1), replace(draw, mask=mask)]
        assert sample(logits, draws, sampler) == sample_reference(rows, draws)
    assert sampler.num_graphs
    with pytest.raises(UsageError, match=r"free of biases \(sampler\)"):
        memory.free(sampler._biases["biases"])
    sampler.free()
    guarded = DeviceSampler(SIM, 1300, 3, mode="guarded")
    assert sample(logits, draws, guarded) == sample_reference(rows, draws)


def test_a_mask_has_a_bit_for_each_token_that_is_allowed() -> None:
    assert mask_of(np.array([True, False, True])).tolist() == [0b101]
    wide = np.zeros(33, np.bool_)
    wide[[31, 32]] = True
    assert mask_of(wide).tolist() == [-(1 << 31), 1]
    assert mask_of(wide).size == num_mask_words(33)
