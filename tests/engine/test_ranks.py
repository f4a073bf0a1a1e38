"""Several processes that hold one model together, on simulated GPUs: their numbers, their ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models.families import FamilyModel, engine_logits, hf_logits, make_family
from models.family_table import FAMILIES

from hypocenter import LLM
from hypocenter.base.errors import BadSetting, RankLost, UsageError
from hypocenter.device import devices
from hypocenter.device.sim.sim import open_sim
from hypocenter.engine.ranks import ranks
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.facts.part import Part
from hypocenter.model.facts.split import part_of
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.tensors.part_of_file import PartOfFile
from hypocenter.record import ring
from hypocenter.settings.config import EngineConfig
from hypocenter.watch.dead_runs import dead_runs

SIM = "sim:h200"
#: As in `test_families.py`: sums in another order, no more.
TOLERANCE = 3e-5
#: Whole heads of their own, sinks and experts, fused matrices, a shared expert, both branches
#: beside each other with biases, norms behind them, an untied table of another length, norms of
#: heads that have a row each.
NAMES = ["llama", "gpt-oss", "phi3", "qwen2moe", "phi2", "gemma2", "qwen2", "starcoder2", "glm4moe"]
NAMES += ["command-r-plus", "stablelm-12b"]
#: Of which two are of keys and values.
FOUR_HEADS = {"num_attention_heads": 4, "hidden_size": 64}


def small(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_layers: int = 2,
    **changes: int,
) -> FamilyModel:
    """A model of so many layers at most, with these changes."""
    family = FAMILIES[name]
    num_layers = min(family.config.get("num_hidden_layers", num_layers), num_layers)
    config = {**family.config, "num_hidden_layers": num_layers, **changes}
    monkeypatch.setitem(FAMILIES, name, replace(family, config=config))
    return make_family(name, folder)


def processes_of(llm: LLM) -> tuple[int, ...]:
    assert llm.engine.runner.ranks is not None
    return llm.engine.runner.ranks.processes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.tier("sim")
def test_two_parts_give_the_logits_of_the_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(name, tmp_path, monkeypatch)
    ids = model.token_ids[:5]
    ours = engine_logits(model.path, ids, 64, 4, device=SIM, tensor_parallel=2)  # in two steps
    theirs = hf_logits(model.hf_model, ids)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "phi3", "qwen2"])
@pytest.mark.tier("sim")
def test_four_parts_of_two_heads_of_keys_give_the_logits_of_the_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts have copies of the same keys and values."""
    model = small(name, tmp_path, monkeypatch, **FOUR_HEADS)
    ids = model.token_ids[:5]
    ours = engine_logits(model.path, ids, 64, 4, device=SIM, tensor_parallel=4)
    theirs = hf_logits(model.hf_model, ids)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < TOLERANCE


@pytest.mark.tier("sim")
def test_of_four_parts_a_request_has_the_same_bits_alone_and_among_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library's sum of four parts depends on how many rows there are; ours does not."""
    model = small("llama", tmp_path, monkeypatch, **FOUR_HEADS)
    prompts = [list(model.token_ids[start : start + 3 + start]) for start in range(4)]
    with LLM(
        str(model.path), device=SIM, tensor_parallel=4, context_length=32, max_batch_tokens=32,
        max_batch_requests=4, prefix_cache=False,
    ) as llm:  # fmt: skip

        def told(*of: list[int]) -> list[list[str]]:
            outputs = llm.generate(list(of), max_tokens=3, temperature=0.0, logprobs=0)
            return [[one.logprob.hex() for one in output.logprobs or ()] for output in outputs]

        together = told(*prompts)
        assert [len(one) for one in together] == [3] * 4
        assert [told(prompt)[0] for prompt in prompts] == together


#: Heads, those of keys and values, and parts: one head of keys each, copies of one, several each.
DIVIDED = [(6, 3, 3), (6, 2, 6), (16, 8, 4), (8, 2, 8)]


def divided(
    sizes: tuple[int, int, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> FamilyModel:
    heads, kv_heads, _ = sizes
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    width = {"hidden_size": 16 * heads, "intermediate_size": 192}
    return small("llama", folder, monkeypatch, 1, **shape, **width)


@pytest.mark.parametrize("sizes", DIVIDED)
@pytest.mark.tier("sim")
def test_any_number_that_divides_the_heads_gives_the_logits_of_the_whole(
    sizes: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = divided(sizes, tmp_path, monkeypatch)
    ids = model.token_ids[:5]
    ours = engine_logits(model.path, ids, 64, 4, device=SIM, tensor_parallel=sizes[2])
    theirs = hf_logits(model.hf_model, ids)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < TOLERANCE


@pytest.mark.parametrize("sizes", DIVIDED)
def test_parts_of_any_such_number_are_the_whole_of_each_tensor(
    sizes: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, num_ranks = divided(sizes, tmp_path, monkeypatch), sizes[2]
    heads, kv_heads, _ = sizes
    num_copies = max(num_ranks // kv_heads, 1)
    with open_gguf(model.path) as file:
        facts = read_architecture(file)
        parts = [PartOfFile(file, facts, Part(rank, num_ranks)) for rank in range(num_ranks)]
        split = part_of(facts, Part(num_ranks - 1, num_ranks))
        assert split.num_heads == heads // num_ranks
        assert split.layers[0].num_kv_heads == max(kv_heads // num_ranks, 1)
        cuts = (("attn_q", 0, 1), ("attn_k", 0, num_copies), ("attn_v", 0, num_copies))
        for name, axis, copies in (
            *cuts,
            ("attn_output", 1, 1),
            ("ffn_gate", 0, 1),
            ("ffn_down", 1, 1),
        ):
            name = f"blk.0.{name}.weight"
            shape = parts[0].tensors[name].shape
            own = [part.raw(name).view(np.float32).reshape(shape) for part in parts]
            expected = file.raw(name).view(np.float32).reshape(file.tensors[name].shape)
            assert np.array_equal(np.concatenate(own[::copies], axis=axis), expected)


def test_tokens_are_drawn_by_the_first_rank_and_known_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a step that begins before those of the last one are on the host.

    A CPU, whose steps of a llama are compared with transformers elsewhere, draws the same.
    """
    model = small("llama", tmp_path, monkeypatch, 1)
    prompts = [model.token_ids[:5], model.token_ids[7:9]]

    def drawn(llm: LLM) -> list[tuple[int, ...]]:
        made = llm.generate(prompts, max_tokens=3, temperature=0.7, seed=3, ignore_eos=True)
        return [one.token_ids for one in made]

    with LLM(model.path, context_length=64) as llm:
        expected = drawn(llm)
    devices.use_backend(open_sim(SIM, graphs=True))
    with LLM(model.path, device=SIM, context_length=64, tensor_parallel=2) as llm:
        assert llm.engine.runner.runs_ahead
        assert drawn(llm) == expected


@pytest.mark.parametrize("mode", ["checked", "guarded", "traced"])
@pytest.mark.tier("sim")
def test_parts_run_in_other_modes_with_the_same_tokens(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as a CPU's, and so as those of the usual mode."""
    model = small("llama", tmp_path, monkeypatch, 1)
    usual = EngineConfig(context_length=64)
    parts = replace(usual, device=SIM, tensor_parallel=2, launch_mode=mode)
    answers = []
    for config in (usual, parts):
        with LLM(model.path, config) as llm:
            answers.append(llm.generate(model.token_ids[:3], max_tokens=2, ignore_eos=True))
    assert answers[0].token_ids == answers[1].token_ids


def test_a_rank_that_dies_takes_the_step_down_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small("llama", tmp_path, monkeypatch, 1)
    with LLM(model.path, device=SIM, context_length=64, tensor_parallel=2) as llm:
        llm.generate(model.token_ids[:3], max_tokens=1)
        [process] = processes_of(llm)
        os.kill(process, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankLost) as lost:
            llm.generate(model.token_ids[:3], max_tokens=4)
        assert time.monotonic() - began < 60
        assert (lost.value.rank, lost.value.process) == (1, process)
        assert f"rank 1 of 2, process {process}, ended by SIGKILL" in str(lost.value)
        assert "and a step needs all ranks (all_reduce)" in str(lost.value)


@pytest.mark.tier("whole")
def test_the_others_end_with_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And well: the next command is not told that a run died."""
    monkeypatch.setenv("HYPO_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.delenv("HYPO_RECORD", raising=False)
    model = small("llama", tmp_path, monkeypatch)
    with LLM(model.path, device=SIM, context_length=64, tensor_parallel=2) as llm:
        [process] = processes_of(llm)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    recorded = [ring.read_run(folder).pid for folder in ring.run_folders(tmp_path / "runs")]
    assert process in recorded
    assert process not in {one.pid for one in dead_runs(tmp_path / "runs")}
    assert not [one for one in threading.enumerate() if one.name.startswith("rank ")]


def test_a_part_has_its_rows_and_columns_of_each_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small("llama", tmp_path, monkeypatch)
    with open_gguf(model.path) as file:
        arch = read_architecture(file)
        parts = [PartOfFile(file, arch, Part(rank, 2)) for rank in range(2)]
        whole = part_of(arch, Part(1, 2))
        assert whole.num_heads == arch.num_heads // 2
        for name, axis in (("attn_q", 0), ("attn_output", 1), ("ffn_up", 0), ("ffn_down", 1)):
            name = f"blk.1.{name}.weight"
            shape = parts[0].tensors[name].shape
            halves = [part.raw(name).view(np.float32).reshape(shape) for part in parts]
            joined = np.concatenate(halves, axis=axis)
            expected = file.raw(name).view(np.float32).reshape(file.tensors[name].shape)
            assert np.array_equal(joined, expected)
        same = "blk.0.attn_norm.weight"
        assert np.array_equal(parts[1].raw(same), file.raw(same))


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_a_part_of_more_than_there_are_heads_of_keys_has_the_one_that_its_heads_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """phi3 has queries, keys and values in one tensor."""
    model = small(name, tmp_path, monkeypatch, 1, **FOUR_HEADS)
    with open_gguf(model.path) as file:
        arch = read_architecture(file)
        shape = arch.layers[0]
        assert (arch.num_heads, shape.num_kv_heads) == (4, 2)
        split = part_of(arch, Part(3, 4))
        assert (split.num_heads, split.layers[0].num_kv_heads) == (1, 1)
        tensor = "attn_qkv" if name == "phi3" else "attn_k"
        whole = file.raw(f"blk.0.{tensor}.weight").view(np.float32)
        whole = whole.reshape(-1, shape.head_dim, arch.width)  # a head each
        for rank in range(4):
            own = PartOfFile(file, arch, Part(rank, 4))
            tensors = own.tensors[f"blk.0.{tensor}.weight"]
            got = own.raw(f"blk.0.{tensor}.weight").view(np.float32).reshape(tensors.shape)
            of_keys = rank // 2
            heads = [rank, 4 + of_keys, 6 + of_keys] if name == "phi3" else [of_keys]
            assert np.array_equal(got, np.concatenate(whole[heads]))
            assert tensors.num_bytes == got.nbytes


@pytest.mark.parametrize(
    ("name", "num_ranks", "why"),
    [
        ("llama", 3, "2 key-value heads have no 3 equal parts"),
        ("olmo2", 2, "a norm goes over all heads"),
        ("lfm2", 2, "its layers carry states"),
        ("deepseek2-lite", 2, "its heads share one latent"),
    ],
)
@pytest.mark.tier("sim", fast=lambda case: case.name in ("llama", "lfm2"))
def test_what_cannot_be_split_is_refused_before_any_process_starts(
    name: str, num_ranks: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_family(name, tmp_path)
    monkeypatch.setattr(ranks, "Ranks", None)
    with pytest.raises(BadSetting, match=why) as refused:
        LLM(model.path, device=SIM, context_length=64, tensor_parallel=num_ranks)
    assert "tensor_parallel" in str(refused.value)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(BadSetting, match="tensor_parallel"):
        EngineConfig(device="cpu", tensor_parallel=2)


@pytest.mark.tier("whole")
def test_a_rank_that_cannot_begin_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPU is not there, as where two are asked for and one is."""
    model = small("llama", tmp_path, monkeypatch)
    monkeypatch.setattr(ranks, "device_of", lambda device, rank: f"cuda:{rank}")
    with pytest.raises(UsageError, match=r"rank 1 \(cuda:1\): .*cuda"):
        LLM(model.path, device=SIM, context_length=64, tensor_parallel=2)
