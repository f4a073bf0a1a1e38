"""Layers that carry a state: whose it is, where it stands; company changes no bit of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.families import FamilyModel, engine_logits, hf_logits, make_family
from models.family_table import FAMILIES
from models.resident import resident_bytes
from ops.kernel_launch import bits

from hypocenter import LLM, EngineConfig, SamplingParams
from hypocenter.base.errors import BadSetting, IntegrityError, LaunchRejected
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.cli.tool_options import BenchOptions
from hypocenter.cli.verbs import bench, inspect
from hypocenter.device import devices
from hypocenter.device.sim.sim import open_sim
from hypocenter.engine.batch import Batch
from hypocenter.engine.request import Request
from hypocenter.engine.runner import Runner, load_runner
from hypocenter.engine.state_ledger import BatchStates, StateLedger, sequence_starts, spans_of
from hypocenter.engine.state_slots import StateSlots
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.tensors import footprint

SMALL = EngineConfig(
    context_length=64, block_size=16, num_threads=2, kv_dtype="f32", max_batch_requests=3,
    max_batch_tokens=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    return make_family("qwen35", tmp_path_factory.mktemp("states"))


@pytest.fixture
def runner(model: FamilyModel) -> Runner:
    with open_gguf(model.path) as file:
        return load_runner(file, replace(SMALL, max_batch_requests=4))


@pytest.fixture
def llm(model: FamilyModel) -> Iterator[LLM]:
    with LLM(model.path, SMALL) as llm:
        yield llm


def ids(array: list[int] | np.ndarray) -> np.ndarray:
    return np.array(array, np.int32)


def step(
    runner: Runner,
    *sequences: tuple[list[int], int, int],
    slots: list[int] | None = None,
    owners: tuple[int, ...] | None = None,
    **states: Any,
) -> np.ndarray:
    """All logits of tokens start .. start + num of each (tokens, start, num), of which the first
    has block 0 and slot 0 and is request 0's, and so on, where nobody says otherwise."""
    size, positions = runner.block_size, [np.arange(x, x + n) for _, x, n in sequences]
    tables = np.arange(len(sequences))[:, None]
    batch = Batch(
        ids(np.concatenate([tokens[x : x + n] for tokens, x, n in sequences])),
        ids(np.concatenate(positions)),
        ids(np.concatenate([row * size + at for row, at in enumerate(positions)])),
        ids(np.repeat(np.arange(len(sequences)), [n for _, _, n in sequences])),
        ids(tables),
        ids(np.arange(sum(n for _, _, n in sequences))),
        states=replace(
            BatchStates.own(
                tuple(range(len(sequences))) if owners is None else owners,
                ids(np.arange(len(sequences)) if slots is None else slots),
            ),
            **states,
        ),
    )
    return np.array(runner.run(batch).data[:, : runner.vocab_size])


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest, of the largest logit; `test_families.py` has the bound."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize(
    "name", ["qwen35", "lfm2-tied", "lfm2moe", "granitehybrid", "falcon-h1-normed"]
)
@pytest.mark.tier("sim", fast=lambda case: case.name in ("qwen35", "falcon-h1-normed"))
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Each family is compared in the tier sim; here chunks end where blocks of states do not."""
    model = make_family(name, tmp_path)
    tokens = model.token_ids[:128]
    ours = engine_logits(model.path, tokens, 128, max_batch_tokens=37)
    assert difference(ours, hf_logits(model.hf_model, tokens)) < 3e-5


def test_company_slots_and_chunks_change_no_bit(runner: Runner, model: FamilyModel) -> None:
    first, second = model.token_ids[:12], model.token_ids[20:32]
    alone = [step(runner, (tokens, 0, 12)) for tokens in (first, second)]
    # Begun in slots in which others have left a state, and gone on with in several steps.
    begun = step(runner, (first, 0, 5), (second, 0, 7), slots=[1, 0])
    ended = step(runner, (first, 5, 7), (second, 7, 5), slots=[1, 0])
    found = [np.concatenate([begun[:5], ended[:7]]), np.concatenate([begun[5:], ended[7:]])]
    for one, expected in zip(found, alone, strict=True):
        assert (bits(one) == bits(expected)).all()


def test_a_state_of_another_or_elsewhere_is_refused(runner: Runner, model: FamilyModel) -> None:
    tokens = model.token_ids[:12]
    with pytest.raises(LaunchRejected, match=r"state_slots\[0\] is 0, which has nobody's state"):
        step(runner, (tokens, 3, 2))
    step(runner, (tokens, 0, 4))
    for start, owner, slot, text in (
        (4, 7, 0, r"is 0, which has the state of request 0, but the tokens are of request 7"),
        (4, 0, 1, r"is 1, which has nobody's state"),
        (5, 0, 0, r"stands for 4 tokens, but its sequence goes on from position 5"),
        (4, 0, 4, r"state_slots\[0\] is 4, which is kept for checkpoints"),
        (4, 0, 12, r"state_slots\[0\] = 12, but the states"),
    ):
        with pytest.raises(LaunchRejected, match=text):
            step(runner, (tokens, start, 2), slots=[slot], owners=(owner,))
    with pytest.raises(LaunchRejected, match="state_slots"):
        step(runner, (tokens, 0, 2), (tokens, 0, 2), slots=[1, 1])
    with pytest.raises(LaunchRejected, match="1 state_slots for 2 sequences"):
        step(runner, (tokens, 0, 2), (tokens, 0, 2), slots=[1])
    step(runner, (tokens, 4, 2))  # and nothing has changed


@pytest.mark.parametrize(
    ("rows", "positions", "name"),
    [
        ([0, 1, 0], [0, 0, 1], "sequence_rows"),
        ([0, 0, 1], [0, 2, 0], "positions"),
        ([1, 1, 1], [0, 1, 2], "sequence_rows"),
        ([0, 0, 0], [0, 1, 2], "sequence_rows"),
    ],
)
def test_tokens_of_a_sequence_stand_together(
    rows: list[int], positions: list[int], name: str
) -> None:
    with pytest.raises(LaunchRejected, match=name):
        StateLedger(4).check(BatchStates.own((5, 6), ids([2, 3])), ids(rows), ids(positions))


def test_a_draft_model_with_states_is_refused(model: FamilyModel, tmp_path: Path) -> None:
    other = make_family("qwen3", tmp_path)
    with pytest.raises(BadSetting, match="layers of this model carry states"):
        LLM(other.path, SMALL, draft_model=str(model.path))


def test_where_sequences_start() -> None:
    assert sequence_starts(ids([0, 0, 1, 2, 2]), 4).tolist() == [0, 2, 3, 5, 5]


def test_a_failed_launch_leaves_states_that_nobody_goes_on_from() -> None:
    ledger = StateLedger(2)
    states = BatchStates.own((3,), ids([1]))
    first = spans_of(states, ids([0, 2]), ids([0, 1]))
    ledger.note(first, is_whole=False)
    with pytest.raises(LaunchRejected, match="nobody's state"):
        ledger.check(states, ids([0]), ids([2]))
    ledger.note(first, is_whole=True)
    ledger.check(states, ids([0]), ids([2]))


def test_slots_are_given_and_given_back() -> None:
    slots = StateSlots(2)
    slots.take(8)
    slots.take(9)
    assert (slots.slot_of(8), slots.slot_of(9)) == (0, 1)
    slots.check_integrity({8, 9}, {})
    with pytest.raises(IntegrityError, match="have slots"):
        slots.check_integrity({8}, {})
    slots.give_back(8)
    slots._free.append(1)
    with pytest.raises(IntegrityError, match="free or taken"):
        slots.check_integrity({9}, {})


def finish(llm: LLM, requests: list[Request]) -> None:
    for request in requests:
        llm.engine.submit(request)
    while llm.engine.step():
        llm.engine.check_integrity()
    assert all(request.done and request.error is None for request in requests)


def requests_of(llm: LLM, model: FamilyModel, **settings: Any) -> list[Request]:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, **settings)
    prompts = [model.token_ids[start : start + 11 + 7 * start] for start in range(5)]
    return [llm.engine.request(prompt, params) for prompt in prompts]


def test_requests_together_as_alone_preempted_too(model: FamilyModel, llm: LLM) -> None:
    alone = requests_of(llm, model, logprobs=2)
    for request in alone:
        finish(llm, [request])
    # Nothing is adopted, and the room is that of two of them.
    config = replace(SMALL, kv_tokens=80, state_checkpoints=0)
    with LLM(model.path, config) as narrow:
        together = requests_of(narrow, model, logprobs=2)
        finish(narrow, together)
    assert sum(request.num_preemptions for request in together) > 0
    for one, other in zip(alone, together, strict=True):
        assert (one.output_ids, one.logprobs) == (other.output_ids, other.logprobs)
        assert other.num_cached == 0


def test_logprobs_of_a_prompt(model: FamilyModel, llm: LLM) -> None:
    """The second time, too, when the first has left blocks that others would adopt."""
    found = []
    for _ in range(2):
        request = llm.engine.request(
            model.token_ids[:40], SamplingParams(max_tokens=1, prompt_logprobs=0)
        )
        finish(llm, [request])
        found.append(request.prompt_logprobs)
    assert found[0] == found[1]
    assert len(found[0]) == 39


def one_of_each(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FamilyModel:
    """A layer that carries a state, and one with attention."""
    family = FAMILIES["qwen35"]
    sizes = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    keys: dict[str, Any] = {**family.metadata, "attention.recurrent_layers": [True, False]}
    fewer = replace(family, config={**family.config, **sizes}, metadata=keys)
    monkeypatch.setitem(FAMILIES, "qwen35", fewer)
    return make_family("qwen35", folder)


@pytest.mark.parametrize(
    "name", ["qwen35", "lfm2-tied", "granitehybrid-moe", "falcon-h1-normed", "mamba2"]
)
@pytest.mark.tier("sim")
def test_a_gpu_gives_the_same_logits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_made = name == "qwen35"  # which has more layers than that
    model = one_of_each(monkeypatch, tmp_path) if is_made else make_family(name, tmp_path)
    tokens = model.token_ids[:5]
    ours = engine_logits(model.path, tokens, 64, device="sim:h200")
    assert difference(ours, hf_logits(model.hf_model, tokens)) < 3e-5
    # The last one goes on alone from the state of four, which a convolution reaches back into.
    in_two = engine_logits(model.path, tokens, 64, max_batch_tokens=4, device="sim:h200")
    assert (bits(in_two) == bits(ours)).all()


@pytest.mark.tier("sim")
def test_a_gpu_runs_ahead_with_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot goes to the next request while a step of the last one, thrown away, still writes."""
    model = one_of_each(monkeypatch, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [model.token_ids[:3], model.token_ids[5:7], model.token_ids[9:13]]
    found = []
    devices.use_backend(open_sim("sim:h200", graphs=True))
    for num_requests in (1, 2):
        config = replace(
            SMALL, device="sim:h200", max_batch_tokens=4, max_batch_requests=num_requests
        )
        with LLM(model.path, config) as llm:
            assert llm.engine.runner.runs_ahead
            requests = [llm.engine.request(prompt, params) for prompt in prompts]
            finish(llm, requests)
            found.append([request.output_ids for request in requests])
    assert found[0] == found[1]


def test_bench_measures_behind_states(runner: Runner) -> None:
    """Repetitions begin again, where a state cannot."""
    options = BenchOptions(
        num_prompt=(8,), num_generate=2, num_sequences=(1, 2), depth=(0, 5), repetitions=2
    )
    with ProgressDisplay(quiet=True) as progress:
        found = [one.name for one in bench._measure(runner, options, progress)]
    assert found == ["pp8", "tg2", "tg2 x2", "pp8 @ d5", "tg2 @ d5", "tg2 x2 @ d5"]


def test_inspect_tells_of_states(model: FamilyModel, runner: Runner) -> None:
    """Bytes of one request: a slot's share of what is allocated."""
    with open_gguf(model.path) as file:
        report = inspect.collect(file, 64)
    states = runner._decoder._state_net.states  # type: ignore[union-attr]
    tensors = [*states.convs.values(), *states.states.values()]
    held = sum(tensor.num_elements for tensor in tensors) * 4
    assert report["problem"] is None
    memory = report["memory"]
    assert memory["state_bytes"] * runner.num_state_slots + memory["checkpoints_bytes"] == held
    assert any(line.startswith("  state ") for line in inspect._memory_lines(report))


@pytest.mark.parametrize(
    "name",
    [
        *("qwen35", "qwen3next", "lfm2", "lfm2moe"),
        *("granitehybrid", "granitehybrid-moe", "falcon-h1", "falcon-h1-normed", "mamba2"),
    ],
)
@pytest.mark.tier("sim", fast=lambda case: case.name in ("qwen35", "lfm2moe", "mamba2"))
def test_needed_bytes_are_those_that_are_allocated(name: str, tmp_path: Path) -> None:
    path = make_family(name, tmp_path).path
    config = EngineConfig(
        context_length=40,
        kv_tokens=40,
        max_batch_tokens=8,
        max_batch_requests=3,
        state_checkpoints=2,
    )
    with open_gguf(path) as file:
        arch = read_architecture(file)
        needed = footprint.needed_bytes(file, arch, config, 40)
        held = resident_bytes(load_runner(file, config))
    angles_in_f64 = 40 * arch.rope.dim // 2 * 3 * 8
    assert sum(needed.values()) == held + angles_in_f64


def test_no_blocks_outlive_a_process_without_their_states(
    model: FamilyModel, tmp_path: Path
) -> None:
    memory = tmp_path / "blocks"
    memory.write_bytes(bytes(1 << 22))
    with open_gguf(model.path) as file:
        assert load_runner(file, SMALL, block_memory=str(memory)).archive is None
    assert not any(memory.read_bytes())
