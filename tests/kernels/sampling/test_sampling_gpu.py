"""Sampling on a GPU, simulated: its choices against the reference, ties, bad rows and copies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from models.tiny_gguf import VOCAB_SIZE, WIDTH, write_tiny
from pretended.fake_runner import FakeTokenizer

from faults.model import model_path
from hypocenter import LLM
from hypocenter.base.errors import BadLogits
from hypocenter.base.results import Route
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.device.sim.sim import open_sim
from hypocenter.engine.engine import Engine
from hypocenter.engine.grammar import MaskCost
from hypocenter.engine.runner import load_runner
from hypocenter.kernels.sampling import draw, sampling
from hypocenter.kernels.sampling.draw import TokenChoice
from hypocenter.kernels.sampling.sampling import sample, sample_reference
from hypocenter.kernels.sampling.sampling_plan import DeviceSampler
from hypocenter.model.gguf.file import open_gguf
from hypocenter.settings.config import EngineConfig, SamplingParams

Floats = npt.NDArray[np.float32]
SIM = "sim:h200"
SIZES = (1, 3, 127, 129, 4097)
GREEDY = SamplingParams()


def as_tensor(logits: Floats) -> Tensor:
    devices.open_device(SIM)
    tensor = memory.allocate("logits", "test", DType.F32, logits.shape, device=SIM)
    copies.to_device(tensor, np.ascontiguousarray(logits))
    return tensor


def both(
    logits: Floats, draws: list[TokenChoice], sampler: DeviceSampler | None = None
) -> list[Any]:
    chosen = sample(as_tensor(logits), draws, sampler)
    expected = sample_reference(logits, draws)
    assert [str(one) for one in chosen] == [str(one) for one in expected]
    return chosen


def counted(params: SamplingParams, position: int, vocab_size: int, seed: int) -> TokenChoice:
    rng = np.random.default_rng(seed)
    ids = rng.permutation(vocab_size)[: rng.integers(vocab_size + 1)].astype(np.int32)
    return TokenChoice(params, position, ids, rng.integers(0, 4, ids.size).astype(np.int32))


@pytest.mark.parametrize("vocab_size", SIZES)
def test_greedy_takes_the_highest_and_of_equals_the_lowest_id(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = rng.normal(0, 4, (3, vocab_size)).astype(np.float32)
    rows[1] = np.round(rows[1] / 4)
    rows[2] = np.where(rng.random(vocab_size) < 0.5, -0.0, 0.0)
    assert both(rows, [TokenChoice(GREEDY, 0)] * 3)[2] == 0


@pytest.mark.tier("sim")
def test_bad_rows_are_named_and_leave_the_others_alone() -> None:
    rows = np.zeros((5, 1030), np.float32)
    rows[0, 1025] = 1
    rows[1, [3, 1029]] = np.nan, np.inf
    rows[2] = -np.inf
    rows[3, :1029] = -np.inf
    rows[4, 7] = -np.nan
    for params in (GREEDY, SamplingParams(temperature=1e-9, top_p=0.5)):
        chosen = both(rows, [TokenChoice(params, 0)] * 5)
        assert chosen[0] == 1025
        assert chosen[3] == 1029
        assert isinstance(chosen[1], BadLogits)
        assert (chosen[1].row, chosen[1].num_bad) == (1, 2)
        assert str(chosen[4]) == "logits row 4: 1 of 1030 values are NaN or +inf"


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1e-9, top_p=0.5)])
@pytest.mark.tier("sim", fast=lambda case: case.params is GREEDY)
def test_the_chosen_ids_are_left_for_the_next_step_and_0_for_bad_rows(
    params: SamplingParams,
) -> None:
    rows = np.zeros((3, 1030), np.float32)
    rows[0, 1025], rows[1, 3], rows[2, 7] = 1, np.nan, 1
    devices.open_device(SIM)
    next_ids = memory.allocate("token_ids", "test", DType.I32, (8,), device=SIM)
    copies.to_device(next_ids, np.full(8, 99, np.int32))
    both(rows, [TokenChoice(params, 0)] * 3, DeviceSampler(SIM, 1030, 4, next_ids=next_ids))
    # A kernel of the next step looks these up before anybody has refused them.
    assert copies.to_host(next_ids).tolist() == [1025, 0, 7, 99, 99, 99, 99, 99]


FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 3.0, "top_p": 0.0},
    {"temperature": 1.0, "repeat_penalty": 1.3, "presence_penalty": 0.5, "top_p": 0.6},
    {"repeat_penalty": 100.0, "frequency_penalty": 0.3},
    {"temperature": 1e-30, "min_p": 1.0, "repeat_penalty": 0.01},
)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.tier("sim")
def test_every_filter_chooses_as_the_reference(vocab_size: int, ties: bool) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = rng.normal(0, 2, (len(FILTERS), vocab_size)).astype(np.float32)
    if ties:
        rows = np.round(rows)
        rows[:, 1:][rng.random((len(FILTERS), vocab_size - 1)) < 0.3] = -np.inf
    draws = [
        counted(SamplingParams(seed=7, **filters), row, vocab_size, row)
        for row, filters in enumerate(FILTERS)
    ]
    both(rows, draws)


def masked(draws: list[TokenChoice], allowed: npt.NDArray[np.bool_]) -> list[TokenChoice]:
    """The draws with masks, but every third without."""
    num_rows, vocab_size = allowed.shape
    bits = np.ones((num_rows, -(-vocab_size // 32) * 32), bool)  # beyond the vocabulary: all
    bits[:, :vocab_size] = allowed
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return [
        draw if row % 3 == 2 else replace(draw, mask=words[row]) for row, draw in enumerate(draws)
    ]


@pytest.mark.parametrize("vocab_size", [*SIZES, 1024, 2053])
@pytest.mark.parametrize("filters", [(GREEDY,) * len(FILTERS), FILTERS], ids=["greedy", "filters"])
@pytest.mark.tier("sim", fast=lambda case: case.filters[0] is GREEDY or case.vocab_size == 129)
def test_a_mask_leaves_its_tokens_and_other_rows_as_they_are(
    vocab_size: int, filters: tuple[Any, ...]
) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = rng.normal(0, 2, (len(filters), vocab_size)).astype(np.float32)
    allowed = rng.random(rows.shape) < 0.2
    allowed[:, -1] |= ~allowed.any(axis=1)
    some = filters[:3] if filters[0] is GREEDY else filters
    rows, allowed = rows[: len(some)], allowed[: len(some)]
    draws = [
        TokenChoice(GREEDY, row)
        if one is GREEDY
        else counted(SamplingParams(seed=7, **one), row, vocab_size, row)
        for row, one in enumerate(some)
    ]
    chosen = both(rows, masked(draws, allowed))
    plain = np.where(allowed, rows, np.float32(-np.inf))
    plain[2::3] = rows[2::3]
    assert chosen == sample_reference(plain, draws)
    for row, token in enumerate(chosen):
        assert row % 3 == 2 or allowed[row, token]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0)])
@pytest.mark.tier("sim", fast=lambda case: case.params is GREEDY)
def test_what_a_mask_hides_still_tells_of_a_broken_model(params: SamplingParams) -> None:
    rows = np.zeros((2, 1030), np.float32)
    rows[0, 1029], rows[1, 1029] = np.nan, -np.inf
    allowed = np.zeros(rows.shape, bool)
    allowed[0, 0] = allowed[1, 1029] = True
    chosen = both(rows, masked([TokenChoice(params, 0)] * 2, allowed))
    assert str(chosen[0]) == "logits row 0: 1 of 1030 values are NaN or +inf"
    assert "row 1: all 1030 values are -inf" in str(chosen[1])


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.tier("sim", fast=lambda case: not case.filtered)
def test_a_step_without_masks_launches_what_it_always_did(filtered: bool) -> None:
    devices.open_device(SIM)
    rows = np.random.default_rng(3).normal(0, 2, (3, 129)).astype(np.float32)
    logits, allowed = as_tensor(rows), rows > 0
    params = SamplingParams(temperature=1.0, top_k=3) if filtered else GREEDY
    free = [TokenChoice(params, row) for row in range(3)]
    sampler, fresh = DeviceSampler(SIM, 129, 3), DeviceSampler(SIM, 129, 3)
    for draws in (masked(free, allowed), free, masked(free, allowed)):  # one after the other
        assert sample(logits, draws, sampler) == sample_reference(rows, draws)
    with_masks = sampler.plan(logits, masked(free, allowed))
    launches = sampler.plan(logits, free).launches
    expected = fresh.plan(logits, free).launches
    assert [(one.kernel, len(one.args), list(one.facts)) for one in launches] == [
        (one.kernel, len(one.args), list(one.facts)) for one in expected
    ]
    assert all("masks" not in one.facts for one in launches)
    replaced = [one.kernel.replace("_masked", "") for one in with_masks.launches]
    assert replaced == [one.kernel for one in launches]  # a mask costs no launch
    assert sum("_masked" in one.kernel for one in with_masks.launches) == 1
    assert "masks" not in fresh._buffers


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"min_p": 0.5}])
@pytest.mark.tier("sim", fast=lambda case: "min_p" in case.filters)
def test_a_filter_alone_over_flat_logits_lets_through_what_the_reference_does(
    filters: dict[str, Any],
) -> None:
    row = np.random.default_rng(6).normal(0, 0.6, 67).astype(np.float32)
    params = SamplingParams(temperature=50.0, **filters)
    assert len(set(both(np.tile(row, (16, 1)), [TokenChoice(params, n) for n in range(16)]))) > 2


@pytest.mark.tier("sim")
def test_top_p_alone_over_many_ties_stops_at_the_same_token() -> None:
    rows = np.repeat(np.array([[0.0, 1.0, 0.5]], np.float32), 700, axis=1)
    draws = [
        TokenChoice(SamplingParams(temperature=1.0, top_p=0.3), position) for position in range(3)
    ]
    both(np.tile(rows, (3, 1)), draws)
    for top_k in (1, 701, 1400, 2100, 9999):
        both(rows, [TokenChoice(SamplingParams(temperature=1.0, top_k=top_k, top_p=0.99), 5)])


@pytest.mark.parametrize(
    ("number", "chosen"), [(0.0, 1), (0.499, 1), (0.5, 1050), (0.999, 1050), (1 - 2.0**-53, 1050)]
)
def test_the_draw_takes_the_first_token_beyond_its_share(
    number: float, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypocenter.kernels.sampling.draw.uniform", lambda seed, position: number)
    row = np.full((1, 1060), -np.inf, np.float32)
    row[0, [1, 1050]] = 0
    assert both(row, [TokenChoice(SamplingParams(temperature=1.0), 0)]) == [chosen]


def test_a_token_differs_only_within_the_documented_bound_of_a_boundary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(11)
    row = rng.normal(0, 1, (1, 4097)).astype(np.float32)
    weights = sampling.exp_reference(row[0].astype(np.float64) - row[0].max())
    cumulated = np.cumsum(weights) / weights.sum()
    for token in rng.integers(0, 4096, 4):
        for side in (-1, 1):
            number = float(cumulated[token] + side * 2.0**-40)
            monkeypatch.setattr(draw, "uniform", lambda seed, position, number=number: number)
            both(row, [TokenChoice(SamplingParams(temperature=1.0), 0)])


@pytest.mark.tier("sim")
def test_one_sampler_serves_steps_of_any_size_and_context() -> None:
    devices.open_device(SIM)
    sampler = DeviceSampler(SIM, 129, 3)
    filtered = SamplingParams(temperature=1.0, top_k=3, repeat_penalty=1.5)
    rng = np.random.default_rng(3)
    for num_rows in (1, 3, 2, 3):
        rows = rng.normal(0, 2, (num_rows, 129)).astype(np.float32)
        both(rows, [TokenChoice(GREEDY, 0)] * num_rows, sampler)
        both(rows, [counted(filtered, 9, 129, row) for row in range(num_rows)], sampler)
    assert sampler.kernels[:2] == ("greedy_blocks", "greedy_rows")
    assert sampler.kernels[-1] == "sample_draw"
    sampler.free()


def test_guarded_kernels_choose_alike() -> None:
    devices.open_device(SIM)
    rows = np.random.default_rng(5).normal(0, 2, (1, 129)).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.8, repeat_penalty=1.5)
    guarded = DeviceSampler(SIM, 129, 1, mode="guarded")
    both(rows, [TokenChoice(GREEDY, 0)], guarded)
    both(rows, [counted(params, 9, 129, 1)], guarded)
    both(rows, masked([TokenChoice(GREEDY, 0)], rows > 0), guarded)
    both(rows, masked([counted(params, 9, 129, 1)], rows > 0), guarded)


@pytest.fixture
def host_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    devices.open_device(SIM)
    gpu: Any = devices.backend_of(SIM)
    sizes: list[int] = []
    copy_out = gpu.copy_out

    def counting(address: int, num_bytes: int) -> Any:
        sizes.append(num_bytes)
        return copy_out(address, num_bytes)

    monkeypatch.setattr(gpu, "copy_out", counting)
    return sizes


class EveryThird:
    """A matcher that allows the tokens with one remainder, and with the next one after each."""

    cost = MaskCost()

    def __init__(self) -> None:
        self._number = 0

    def mask(self) -> npt.NDArray[np.int32]:
        bits = np.arange(-(-VOCAB_SIZE // 32) * 32) % 3 == self._number % 3
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        assert token_id % 3 == self._number % 3
        self._number += 1
        return False


def _generated(
    model: Path, device: str, params: SamplingParams, *, is_one_held: bool = False
) -> tuple[list[list[int]], int, Route]:
    """The outputs of two requests, the number of steps, and the route."""
    config = EngineConfig(device=device, context_length=64, max_batch_tokens=8, num_threads=1)
    with open_gguf(model) as file:
        engine = Engine(load_runner(file, config), cast(Any, FakeTokenizer()))
        for prompt in ([1, 2, 3], [4, 5]):
            engine.submit(engine.request(prompt, params))
        requests = list(engine._admission._inbox)
        if is_one_held:
            requests[1].matcher = cast(Any, EveryThird())
        num_steps = 0
        while engine.step():
            num_steps += 1
        assert all(request.error is None for request in requests)
        return [list(request.output_ids) for request in requests], num_steps, engine.route()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=6, ignore_eos=True),
        SamplingParams(
            max_tokens=4, ignore_eos=True, temperature=2.0, top_k=5, repeat_penalty=1.2, seed=4
        ),
    ],
)
@pytest.mark.tier("sim", fast=lambda case: case.params.temperature > 0)
def test_a_generation_equals_the_cpus_and_copies_once_per_step(
    params: SamplingParams, tmp_path: Path, host_copies: list[int]
) -> None:
    # Embeddings as wide as these make the outputs vary.
    tables = {
        f"{name}.weight": np.random.default_rng(seed).normal(0, 1, (VOCAB_SIZE, WIDTH))
        for name, seed in (("output", 7), ("token_embd", 57))
    }
    model = write_tiny(tmp_path / "tiny.gguf", tensors=tables)
    expected, _, route = _generated(model, "cpu", params)
    assert not [name for name in route.kernels if name.startswith(("greedy", "sample"))]
    host_copies.clear()
    found, num_steps, route = _generated(model, SIM, params)
    assert found == expected
    assert num_steps == params.max_tokens
    assert len({*found[0]}) > 2  # or else equality says little
    # Two requests: an id and a count for each of them, and nothing else.
    assert host_copies == [2 * 2 * 4] * num_steps
    chooses = ("sample_draw",) if params.temperature else ("greedy_blocks", "greedy_rows")
    assert route.kernels[-len(chooses) :] == chooses


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.tier("sim")
def test_a_held_request_beside_a_free_one_goes_as_on_the_cpu(
    temperature: float, tmp_path: Path, host_copies: list[int]
) -> None:
    tables = {
        f"{name}.weight": np.random.default_rng(seed).normal(0, 1, (VOCAB_SIZE, WIDTH))
        for name, seed in (("output", 7), ("token_embd", 57))
    }
    model = write_tiny(tmp_path / "tiny.gguf", tensors=tables)
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=temperature, seed=4)
    free, _, _ = _generated(model, "cpu", params)
    expected, _, _ = _generated(model, "cpu", params, is_one_held=True)
    host_copies.clear()
    found, num_steps, route = _generated(model, SIM, params, is_one_held=True)
    assert found == expected
    assert [token % 3 for token in found[1]] == [0, 1, 2, 0, 1, 2]
    assert found[0] == free[0]
    assert found[1] != free[1]
    assert host_copies == [2 * 2 * 4] * num_steps
    assert any("_masked" in name for name in route.kernels)


def _masks_from_step_to_step(device: str) -> None:
    """One plan, replayed as a graph from its second run on, reads each step's own masks."""
    rng = np.random.default_rng(8)
    rows = rng.normal(0, 2, (4, 4097)).astype(np.float32)
    logits = memory.allocate("logits", "test", DType.F32, rows.shape, device=device)
    copies.to_device(logits, rows)
    sampler = DeviceSampler(device, 4097, 4)
    for params in (GREEDY, SamplingParams(temperature=1.0, top_k=40)):
        for step in range(4):
            allowed = rng.random(rows.shape) < 0.05
            draws = masked([TokenChoice(params, step)] * 4, allowed)
            assert sample(logits, draws, sampler) == sample_reference(rows, draws)
        assert sampler.num_graphs
    sampler.free()


@pytest.mark.tier("sim")
def test_a_captured_plan_reads_the_masks_of_its_step() -> None:
    devices.use_backend(open_sim(SIM, graphs=True))
    _masks_from_step_to_step(SIM)


def _vendor() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return "hip" if torch.version.hip else "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(_vendor() is None, reason="no GPU here; scripts/gpu runs this on one")
def test_on_a_gpu_masks_leave_the_tokens_that_the_reference_chooses() -> None:
    _masks_from_step_to_step(devices.open_device(cast(str, _vendor())))


@pytest.mark.tier("sim")
def test_the_first_step_of_a_long_prompt_has_nothing_to_choose_from() -> None:
    """What stands in the place of its logits must not say how large the vocabulary is."""
    devices.use_backend(open_sim(SIM))
    config = EngineConfig(device=SIM, context_length=32, max_batch_tokens=4)
    with LLM(model_path(), config) as llm:
        answer = llm.generate([72, 105, 300, 4, 5, 6], max_tokens=2, temperature=0.5, seed=1)
        assert len(answer.token_ids) == 2
