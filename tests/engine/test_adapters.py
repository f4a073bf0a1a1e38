"""LoRA adapters: against models into which they are merged, in company, and what is refused."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from models.adapter_gguf import (
    Pair,
    adapted_matrices,
    merged,
    random_adapter,
    random_pairs,
    read_pairs,
    with_token_table,
    write_adapter,
)
from models.families import make_family
from models.family_table import FAMILIES as TABLE
from ops.kernel_launch import bits
from repository import DEMO

from hypocenter import LLM, SamplingParams
from hypocenter.base.errors import (
    BadLogits,
    BadModelFile,
    BadSetting,
    HypoError,
    UnsupportedModel,
    UsageError,
)
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.kv_cache import BlockDigests
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.facts.part import Part
from hypocenter.model.facts.split import part_of
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.tensors.adapters import open_adapters, part_of_adapters
from hypocenter.model.tensors.part_of_file import PartOfFile
from hypocenter.settings.adapters import AdapterChoice, read_choice

#: As in tests/model/test_families.py, for which these sums are two more of some ten for each layer.
TOLERANCE = 3e-5
IDS = [int(x) for x in np.random.default_rng(5).integers(3, 90, 40)]
Lora = dict[str, float] | list[str] | str | None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def demo(folder: Path) -> Iterator[LLM]:
    """The bundled model with three adapters, of which the last stands beside attention alone."""
    first = random_adapter(folder / "first.gguf", DEMO, rank=4, seed=1)
    second = random_adapter(folder / "second.gguf", DEMO, rank=11, seed=2, alpha=None)
    pairs = random_pairs(DEMO, 8, 3)
    few = {name: pair for name, pair in pairs.items() if "attn_q" in name}
    third = write_adapter(folder / "third.gguf", DEMO, few)
    with LLM(DEMO, lora=[str(first), f"{second}:0", f"q={third}:0"], device="cpu") as llm:
        yield llm


def logits_of(llm: LLM, *asked: tuple[list[int], Lora]) -> list[np.ndarray]:
    """The logits of prompts that run together, each with its own adapters."""
    requests = [
        llm.engine.request(ids, SamplingParams(max_tokens=0, lora=lora), RequestTerms(True))
        for ids, lora in asked
    ]
    llm.engine.complete(requests)
    return [np.concatenate(request.logits) for request in requests]


def whole_logits(path: Path, *lora: str, ids: list[int] = IDS, **fields: Any) -> np.ndarray:
    settings = {"kv_dtype": "f32", "context_length": 64, "device": "cpu", **fields}
    with LLM(path, lora=list(lora), **settings) as llm:
        return np.array(llm.logits(ids))


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


# -- against merged models ------------------------------------------------------------------------


def is_of_few(case: SimpleNamespace) -> bool:
    """Plain, of joined matrices, of rows by turns with states, and of experts."""
    return case.name in ("llama", "phi3", "qwen35", "qwen3moe")


FAMILIES = ("llama", "phi3", "qwen35", "gemma2", "falcon-h1", "deepseek2-v2", "qwen2moe",
    "granite", "command-r", "gemma4-e", "lfm2", "qwen3moe", "gpt-oss", "mixtral",
    "gemma4-experts")  # fmt: skip


@pytest.mark.tier("sim", fast=is_of_few)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_is_what_merging_it_would_be(name: str, folder: Path) -> None:
    model = make_family(name, folder)
    first = random_adapter(folder / f"{name}-1.gguf", model.path, rank=3, seed=7, alpha=6.0)
    second = random_adapter(folder / f"{name}-2.gguf", model.path, rank=8, seed=8, size=0.3)
    both = [(read_pairs(first), 2.0 * 0.75), (read_pairs(second), 2.0 * -0.5)]
    right = whole_logits(merged(folder / f"{name}-merged.gguf", model.path, both))
    ours = whole_logits(model.path, f"{first}:0.75", f"{second}:-0.5")
    assert relative_error(ours, right) < TOLERANCE
    base = whole_logits(model.path)
    assert relative_error(base, right) > 300 * TOLERANCE, "the adapters change the model"
    by_token = whole_logits(model.path, f"{first}:0.75", f"{second}:-0.5", max_batch_tokens=1)
    assert (bits(by_token) == bits(ours)).all()
    idle = whole_logits(model.path, f"{first}:0", f"{second}:0")
    assert (bits(idle) == bits(base)).all()


@pytest.mark.tier("sim", fast=lambda case: case.name == "llama")
@pytest.mark.parametrize("name", ["llama", "phi2", "gpt-oss"])
def test_rows_of_the_token_table_are_adapted(name: str, folder: Path) -> None:
    """Of models that make logits with another table."""
    model = make_family(name, folder)
    path = folder / f"{name}-table.gguf"
    pairs = with_token_table(model.path, random_pairs(model.path, 3, 7), 5, 8)
    write_adapter(path, model.path, pairs, alpha=6.0)
    few = folder / f"{name}-few.gguf"
    write_adapter(few, model.path, with_token_table(model.path, {}, 9, 9), alpha=None)
    # Of each pair alpha / rank counts.
    scaled = {one: (down, up * 6.0 / up.shape[1]) for one, (down, up) in read_pairs(path).items()}
    both = [(scaled, 0.75), (read_pairs(few), -0.5)]
    right = whole_logits(merged(folder / f"{name}-table-merged.gguf", model.path, both))
    ours = whole_logits(model.path, f"{path}:0.75", f"{few}:-0.5")
    assert relative_error(ours, right) < TOLERANCE
    base = whole_logits(model.path)
    assert relative_error(base, right) > 300 * TOLERANCE, "the adapters change the model"
    alone = whole_logits(model.path, f"{few}:-0.5", f"{path}:0")
    assert relative_error(alone, base) > 100 * TOLERANCE, "the token table alone does"
    assert (bits(whole_logits(model.path, f"{path}:0", f"{few}:0")) == bits(base)).all()


#: Of what each rank has: heads and inner columns, joined matrices, a shared expert, biases and
#: copies of keys, an untied table in parts.
SPLIT = ("llama", "phi3", "qwen2moe", "mixtral", "gemma2", "qwen2", "starcoder2")


@pytest.mark.tier("sim")
@pytest.mark.parametrize("name", SPLIT)
def test_each_rank_applies_its_part(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = changed_family(name, tmp_path, monkeypatch, num_hidden_layers=1)
    pairs = random_pairs(model, 5, 9)
    with open_gguf(model) as file:
        if "output.weight" in file.tensors:
            pairs = with_token_table(model, pairs, 5, 8)
    adapter = write_adapter(tmp_path / "tp.gguf", model, pairs)
    right = whole_logits(merged(tmp_path / "merged.gguf", model, [(read_pairs(adapter), 3.2)]))
    base = whole_logits(model)
    fields: dict[str, Any] = {"device": "sim:h200", "kv_dtype": "f32", "tensor_parallel": 2}
    fields |= {"context_length": 64, "max_batch_tokens": 8, "prefix_cache": False}
    with LLM(model, lora=[str(adapter)], **fields) as llm:
        ours, plain = logits_of(llm, (IDS[:3], None), (IDS[:2], []))
        alone = logits_of(llm, (IDS[:3], {"tp": 1.0}))[0]
    assert relative_error(ours, right[:3]) < TOLERANCE
    assert relative_error(plain, base[:2]) < TOLERANCE
    assert (bits(alone) == bits(ours)).all()
    assert relative_error(base, right) > 300 * TOLERANCE, "the adapter changes the model"


def changed_family(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: int
) -> Path:
    config = {**TABLE[name].config, **changes}
    monkeypatch.setitem(TABLE, name, dataclasses.replace(TABLE[name], config=config))
    return make_family(name, folder).path


@pytest.mark.tier("sim", fast=lambda case: (case.name, case.num_ranks) == ("phi3", 4))
@pytest.mark.parametrize("name", ["llama", "phi3", "qwen2"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parts_of_an_adapter_are_the_whole(
    name: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of A where a rank has columns of the matrix, rows of B where it has rows."""
    wide = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    model = changed_family(name, tmp_path, monkeypatch, **wide)
    adapter = random_adapter(tmp_path / "parts.gguf", model, rank=3)
    with open_gguf(model) as file:
        arch = read_architecture(file)
        whole = open_adapters([str(adapter)], file, arch)
        assert whole is not None
        parts = []
        for rank in range(num_ranks):
            part = Part(rank, num_ranks)
            of_rank = PartOfFile(file, arch, part), part_of(arch, part)
            found = part_of_adapters(whole, (file, arch), of_rank)
            assert found is not None
            assert found.digest([1.0]) == whole.digest([1.0]), "it stands for the same"
            parts.append(found)
    for target, pair in whole.files[0].pairs.items():
        own = [one.files[0].pairs[target] for one in parts]
        kinds = {"attn_output": "columns", "ffn_down": "columns", "output": "rows", "token": ""}
        kind = next((kind for part, kind in kinds.items() if part in target), "rows")
        if kind == "columns":
            assert all((one.up == pair.up).all() for one in own)
            joined = np.concatenate([one.down for one in own], axis=1)
            assert (joined == pair.down).all(), target
        elif own[0].up.shape != pair.up.shape:
            assert all((one.down == pair.down).all() for one in own)
            rows = {row.tobytes() for one in own for row in one.up}
            assert rows == {row.tobytes() for row in pair.up}, target


@pytest.mark.tier("sim")
@pytest.mark.parametrize("device", ["sim:h200", "sim:mi300x"])
def test_a_gpu_applies_adapters_alike(device: str, folder: Path) -> None:
    model = make_family("llama", folder)
    adapter = random_adapter(folder / "gpu.gguf", model.path, rank=5, seed=9)
    right = whole_logits(merged(folder / "gpu-m.gguf", model.path, [(read_pairs(adapter), 3.2)]))
    fields: dict[str, Any] = {"device": device, "kv_dtype": "f32"}
    fields |= {"context_length": 64, "max_batch_tokens": 16}
    with LLM(model.path, lora=[str(adapter)], **fields) as llm:
        alone, base = logits_of(llm, (IDS[:3], None))[0], logits_of(llm, (IDS[:3], []))[0]
        together = logits_of(llm, (IDS[:2], {"gpu": 0.3}), (IDS[:3], None), (IDS[:3], []))
    assert relative_error(alone, right[:3]) < TOLERANCE
    assert (bits(together[1]) == bits(alone)).all()
    assert (bits(together[2]) == bits(base)).all()
    plain = whole_logits(model.path, ids=IDS[:3], **fields)
    assert (bits(plain) == bits(base)).all()


@pytest.mark.tier("sim", fast=lambda case: case.device == "cpu")
@pytest.mark.parametrize(
    ("name", "device"),
    [("qwen3moe", "cpu"), ("gpt-oss", "cpu"), ("qwen3moe", "sim:h200"), ("gpt-oss", "sim:mi300x")],
)
def test_requests_of_one_batch_have_other_experts_adapted(
    name: str, device: str, folder: Path
) -> None:
    """Stacks of experts alone are adapted, of quantised weights and of floats."""
    model = make_family(name, folder)
    pairs = {one: pair for one, pair in random_pairs(model.path, 5, 9).items() if "_exps" in one}
    assert len(pairs) > 3
    first = write_adapter(folder / f"{name}-a.gguf", model.path, pairs)
    few = {one: pair for one, pair in random_pairs(model.path, 9, 10).items() if "down_exps" in one}
    second = write_adapter(folder / f"{name}-b.gguf", model.path, few, alpha=None)
    fields: dict[str, Any] = {"device": device, "kv_dtype": "f32", "prefix_cache": False}
    fields |= {"context_length": 64, "max_batch_tokens": 16}
    asked: list[Lora] = [{"x": 0.5}, [], {"y": -1.0}, {"x": 0.25, "y": 1.0}]
    with LLM(model.path, lora=[f"x={first}", f"y={second}"], **fields) as llm:
        alone = [logits_of(llm, (IDS[:3], lora))[0] for lora in asked]
        together = logits_of(llm, *((IDS[:3], lora) for lora in asked))
    for one, other in zip(alone, together, strict=True):
        assert (bits(one) == bits(other)).all()
    scaled = {one: (down, up * np.float32(16 / 5)) for one, (down, up) in pairs.items()}
    both = [(scaled, 0.25), (few, 1.0)]
    right = whole_logits(merged(folder / f"{name}-ab.gguf", model.path, both), ids=IDS[:3])
    assert relative_error(together[3], right) < TOLERANCE
    plain = whole_logits(model.path, ids=IDS[:3])
    assert relative_error(together[1], plain) < TOLERANCE
    assert min(relative_error(one, plain) for one in together[2:]) > 100 * TOLERANCE


def test_quantised_weights_are_adapted_by_the_activations_themselves(folder: Path) -> None:
    """As far from the merged model in f32 as the plain model is, which codes make."""
    adapter = random_adapter(folder / "q8.gguf", DEMO, rank=4, seed=4, size=0.05)
    plain = merged(folder / "demo-f32.gguf", DEMO, [])
    whole = merged(folder / "demo-merged.gguf", DEMO, [(read_pairs(adapter), 4.0)])
    wide, adapted = whole_logits(plain), whole_logits(whole)
    noise = np.abs(whole_logits(DEMO) - wide).max()
    error = np.abs(whole_logits(DEMO, str(adapter)) - adapted).max()
    assert error < 4 * noise < 0.2 * np.abs(adapted - wide).max()


# -- company --------------------------------------------------------------------------------------

ASKED: list[Lora] = [None, [], "q", {"first": 0.5, "second": 1.5}, {"second": -1.0}, ["second"]]


def test_requests_have_adapters_of_their_own(demo: LLM) -> None:
    prompts = [IDS[: 20 + 3 * place] for place in range(len(ASKED))]
    together = logits_of(demo, *zip(prompts, ASKED, strict=True))
    for ids, lora, beside in zip(prompts, ASKED, together, strict=True):
        alone = logits_of(demo, (ids, lora))[0]
        assert (bits(alone) == bits(beside)).all(), lora
    plain = whole_logits(DEMO, ids=prompts[1], kv_dtype="f16")
    assert (bits(together[1]) == bits(plain)).all()
    first = np.stack([logits[:20] for logits in together])
    for one in range(len(ASKED)):
        for other in range(one):
            assert np.abs(first[one] - first[other]).max() > 0.1, (one, other)


def test_tokens_that_follow_are_those_of_each_alone(demo: LLM) -> None:
    params = [SamplingParams(max_tokens=12, lora=lora, logprobs=2) for lora in ASKED]
    together = demo.generate([IDS] * len(ASKED), params)
    for one, beside in zip(params, together, strict=True):
        alone = demo.generate(IDS, one)
        assert (alone.token_ids, alone.logprobs) == (beside.token_ids, beside.logprobs)
    assert len({one.token_ids for one in together}) > 3


def test_an_answer_goes_on_where_another_process_left_it(demo: LLM) -> None:
    params = SamplingParams(max_tokens=12, lora={"second": 0.8})
    whole = demo.generate(IDS, params).token_ids
    terms = RequestTerms(output_ids=whole[:5])
    request = demo.engine.request(IDS, params, terms)
    demo.engine.complete([request])
    assert tuple(request.output_ids) == whole


def test_f16_and_f32_of_the_same_numbers_give_the_same_bits(folder: Path) -> None:
    half = gguf.GGMLQuantizationType.F16
    small = random_adapter(folder / "half.gguf", DEMO, rank=9, seed=6, kind=half)
    wide = write_adapter(folder / "wide.gguf", DEMO, read_pairs(small))
    one, other = whole_logits(DEMO, str(small)), whole_logits(DEMO, str(wide))
    assert (bits(one) == bits(other)).all()
    codes = gguf.GGMLQuantizationType.Q8_0
    few = {name: (down, up) for name, (down, up) in random_pairs(DEMO, 32, 6).items()}
    coded = write_adapter(folder / "coded.gguf", DEMO, few, kind=codes)
    wide = write_adapter(folder / "coded-wide.gguf", DEMO, read_pairs(coded))
    one, other = whole_logits(DEMO, str(coded)), whole_logits(DEMO, str(wide))
    assert (bits(one) == bits(other)).all()


# -- the cache of prefixes ------------------------------------------------------------------------


def test_blocks_of_other_adapters_are_never_read(demo: LLM) -> None:
    ids = [int(x) for x in np.random.default_rng(8).integers(3, 90, 64)]
    seen: dict[str, int] = {}
    quarter, half, other = {"first": 0.25}, {"first": 0.5}, {"second": 0.25}
    asked: list[Lora] = [quarter, [], quarter, half, other, []]
    for lora in asked:
        completion = demo.generate(ids, max_tokens=1, lora=lora)
        again = seen.setdefault(repr(lora), 0)
        assert completion.timings.num_cached_tokens == 48 * again, lora
        seen[repr(lora)] = 1


def test_no_salt_says_what_another_does_with_an_adapter() -> None:
    ids = list(range(16))
    salts = ["", "a", "\udcff", "ÿ", "a" + "b" * 32, "\ufffdb"]
    made = {BlockDigests(16, salt).first(1, ids)[0] for salt in salts}
    for salt in ("", "a"):
        for adapters in (b"b" * 32, b"c" * 32):
            digests = BlockDigests(16, salt, adapters)
            made.add(digests.first(1, ids)[0])
            made.add(digests.of_long_texts().first(1, ids)[0])
    assert len(made) == len(salts) + 8


def test_what_counts_is_the_content_of_the_file(folder: Path, demo: LLM) -> None:
    """Blocks on disk outlive a process: an adapter of the same name may have other numbers then."""
    adapters = demo.engine.runner.adapters
    assert adapters is not None
    other = random_adapter(folder / "other.gguf", DEMO, rank=4, seed=77)
    with LLM(DEMO, lora=f"first={other}", device="cpu") as llm:
        found = llm.engine.runner.adapters
        assert found is not None
        assert found.digest([1.0]) != adapters.digest([1.0, 0.0, 0.0])
    assert adapters.digest([0.0, 0.0, 0.0]) == b""
    assert adapters.scales(()) == adapters.scales([("first", 0.0)]) == ()


# -- what is refused ------------------------------------------------------------------------------


def small() -> dict[str, Pair]:
    return {"blk.0.attn_q.weight": random_pairs(DEMO, 4, 1)["blk.0.attn_q.weight"]}


def without(end: str) -> Callable[[Any], Any]:
    return lambda tensors: {name: x for name, x in tensors.items() if not name.endswith(end)}


def with_nan(tensors: Any) -> Any:
    tensors["blk.0.attn_q.weight.lora_b"][3, 2] = np.nan
    return tensors


def cut(rows: slice, columns: slice, end: str) -> Callable[[Any], Any]:
    def change(tensors: Any) -> Any:
        name = f"blk.0.attn_q.weight{end}"
        return tensors | {name: np.ascontiguousarray(tensors[name][rows, columns])}

    return change


ALL, ONE = slice(None), np.ones((1, 1), np.float32)
Broken = tuple[dict[str, Any], type[HypoError], str]
BROKEN: dict[str, Broken] = {
    "another architecture": (
        {"keys": {"general.architecture": "qwen3"}},
        UnsupportedModel,
        "general.architecture is 'qwen3', but demo-q8_0.gguf is 'llama'; open the model that",
    ),
    "another kind": (
        {"keys": {"adapter.type": "control_vector"}},
        UnsupportedModel,
        "adapter.type is 'control_vector', but adapters of type lora are applied",
    ),
    "no a": (
        {"change": without(".lora_a")},
        BadModelFile,
        "blk.0.attn_q.weight.lora_a is missing, but its other half is there",
    ),
    "no b": (
        {"change": without(".lora_b")},
        BadModelFile,
        "blk.0.attn_q.weight.lora_b is missing, but its other half is there",
    ),
    "narrow a": (
        {"change": cut(ALL, slice(0, 128), ".lora_a")},
        BadModelFile,
        "lora_a shape is (4, 128), but blk.0.attn_q.weight of this model is (256, 256), so it "
        "must be (4, 256)",
    ),
    "short b": (
        {"change": cut(slice(0, 100), ALL, ".lora_b")},
        BadModelFile,
        "lora_b shape is (100, 4), but",
    ),
    "other ranks": (
        {"change": cut(ALL, slice(0, 3), ".lora_b")},
        BadModelFile,
        "lora_b shape is (256, 3), but",
    ),
    "no number": (
        {"change": with_nan},
        BadModelFile,
        "blk.0.attn_q.weight.lora_b[3, 2] is nan, but an adapter has finite numbers",
    ),
    "infinite alpha": (
        {"alpha": float("inf")},
        BadModelFile,
        "adapter.lora.alpha is inf, but it must be finite",
    ),
    "unknown tensor": (
        {"change": lambda x: x | {"blk.0.attn_norm.weight": np.ones((256,), np.float32)}},
        UnsupportedModel,
        "tensor is 'blk.0.attn_norm.weight', but an adapter is made of NAME.lora_a and",
    ),
    "a layer too many": (
        {"change": lambda x: {n.replace("blk.0", "blk.9"): v for n, v in x.items()}},
        UnsupportedModel,
        "adapted tensor is 'blk.9.attn_q.weight', but this llama model has no tensor of that name",
    ),
    "the token table": (
        {"change": lambda x: {n.replace("blk.0.attn_q", "token_embd"): v for n, v in x.items()}},
        UnsupportedModel,
        "adapted tensor is 'token_embd.weight', but this model makes its logits with that table",
    ),
    "a norm": (
        {"change": lambda x: {n.replace("attn_q", "attn_norm"): v for n, v in x.items()}},
        UnsupportedModel,
        "adapted tensor is 'blk.0.attn_norm.weight', but matrices of attention",
    ),
    "no tensors": (
        {"change": lambda x: {}},
        BadModelFile,
        "number of tensors is 0, but an adapter",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_adapter_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    given, kind, text = BROKEN[case]
    path = write_adapter(tmp_path / "bad.gguf", DEMO, small(), **given)
    with pytest.raises(kind) as error:
        LLM(DEMO, lora=[str(path)], device="cpu")
    assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("rank", [0, 1025])
def test_ranks_have_a_bound(rank: int, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "rank.gguf", DEMO, small())
    data = bytearray(path.read_bytes())
    for name, axis in (("blk.0.attn_q.weight.lora_a", 1), ("blk.0.attn_q.weight.lora_b", 0)):
        at = data.index(name.encode()) + len(name) + 4 + 8 * axis
        assert struct.unpack_from("<Q", data, at) == (4,)
        struct.pack_into("<Q", data, at, rank)
    # The file is as long as these shapes ask for.
    path.write_bytes(bytes(data) + bytes(4 * 1025 * 600))
    with pytest.raises(BadModelFile) as error:
        LLM(DEMO, lora=[str(path)], device="cpu")
    if rank:
        wanted = "rank of blk.0.attn_q.weight.lora_a is 1025, but must be 1 to 1024"
        assert wanted in str(error.value).replace("from 1", "1") or "overlap" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "cut.gguf", DEMO, small())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadModelFile, match=r"cut\.gguf: "):
        LLM(DEMO, lora=[str(path)], device="cpu")
    (tmp_path / "text.gguf").write_text("{}")
    with pytest.raises(BadModelFile, match="the file is a JSON text"):
        LLM(DEMO, lora=[str(tmp_path / "text.gguf")], device="cpu")
    with pytest.raises(UsageError, match="there is no such file"):
        LLM(DEMO, lora=[str(tmp_path / "absent.gguf")], device="cpu")


def test_a_model_is_no_adapter_and_an_adapter_no_model(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"a model, but --lora takes .*; give it as the model"
    ):
        LLM(DEMO, lora=[str(DEMO)], device="cpu")
    keys = {"general.type": "mmproj"}
    other = write_adapter(tmp_path / "see.gguf", DEMO, {}, keys=keys, change=lambda x: {"v.a": ONE})
    with pytest.raises(UnsupportedModel, match=r"\(mmproj\), but .*; give an adapter with --lora"):
        LLM(DEMO, lora=[str(other)], device="cpu")
    path = write_adapter(tmp_path / "only.gguf", DEMO, small())
    with pytest.raises(UnsupportedModel, match=r"a LoRA adapter, .* give this file with --lora"):
        LLM(path)


def test_numbers_beyond_f32_are_told_of_the_adapter_that_made_them(folder: Path) -> None:
    """The model's weights are not blamed alone, and requests without the adapter go on."""
    pairs = {
        name: (np.float32(1e37) * down, np.float32(1e37) * up)
        for name, (down, up) in random_pairs(DEMO, 2, 1).items()
    }
    path = write_adapter(folder / "far.gguf", DEMO, pairs)
    random_adapter(folder / "near.gguf", DEMO)
    with LLM(DEMO, lora=[str(path), f"{folder / 'near.gguf'}:0"], device="cpu") as llm:
        with pytest.raises(BadLogits) as caught:
            llm.generate("a", max_tokens=1)
        line = str(caught.value)
        assert caught.value.adapters == ("far",)
        assert "the request has adapters (far): leaving one out, or a smaller scale, shows" in line
        assert "\n" not in line
        assert llm.generate("a", max_tokens=1, lora=[]).token_ids


def test_names_that_are_not_there(demo: LLM) -> None:
    with pytest.raises(BadSetting, match="lora is 'frist', but must be one of the adapters: first"):
        demo.generate("x", lora="frist")
    with LLM(DEMO, device="cpu") as plain, pytest.raises(BadSetting, match="no adapter is open"):
        plain.generate("x", lora=["first"])


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("a.gguf", AdapterChoice("a", "a.gguf", 1.0)),
        ("/b/a.gguf:0.5", AdapterChoice("a", "/b/a.gguf", 0.5)),
        ("sql=/b/a.gguf:-2", AdapterChoice("sql", "/b/a.gguf", -2.0)),
        ("./x=y.gguf", AdapterChoice("x=y", "./x=y.gguf", 1.0)),
        ("C:x.gguf", AdapterChoice("C:x", "C:x.gguf", 1.0)),
    ],
)
def test_how_an_adapter_is_written(text: str, choice: AdapterChoice) -> None:
    assert read_choice(text) == choice


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["a.gguf", "b/a.gguf"], "'a.gguf' has the name 'a' too; write NAME=b/a.gguf"),
        (["a.gguf:inf"], "has the scale inf, which must be from -1000 to 1000"),
        ([""], "must be a file"),
        (["a=:1"], "must be a file"),
        ([3], "must be FILE"),
        ([f"{n}.gguf" for n in range(65)], "at most 64 adapters may be open"),
    ],
)
def test_settings_that_are_refused(given: list[Any], text: str) -> None:
    with pytest.raises(BadSetting) as error:
        LLM(DEMO, lora=given)
    assert text in str(error.value)


@pytest.mark.parametrize("given", [3, {"a": "x"}, [["a", 1, 2]], ["a", "a"], {"a": float("nan")}])
def test_requests_that_are_refused(given: Any) -> None:
    with pytest.raises(BadSetting):
        SamplingParams(lora=given)


def test_the_fixture_stands_beside_every_matrix(demo: LLM, folder: Path) -> None:
    with open_gguf(DEMO) as file:
        arch = read_architecture(file)
        adapters = open_adapters([str(folder / "first.gguf")], file, arch)
    assert adapters is not None
    assert adapters.targets == frozenset(adapted_matrices(DEMO))
    assert len(adapters.targets) == 43 - 1
    assert demo.engine.runner.adapters is not None
    assert not demo.engine.runner.adapters.targets, "numbers are kept once"
