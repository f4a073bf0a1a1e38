"""A head of the model's own file that drafts (MTP): what it computes, and the same tokens as
without."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.adapter_gguf import merged, random_adapter, read_pairs, write_adapter
from models.families import make_family
from models.gguf_edit import Tensors, rewritten
from models.state_heads import end_with_attention
from models.tiny_gguf import (
    FFN_WIDTH,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    VOCAB_SIZE,
    WIDTH,
    write_tiny,
)
from outside.terminal import hypo_in_process

from hypocenter import LLM
from hypocenter.base.errors import BadModelFile, BadSetting
from hypocenter.device import copies, devices
from hypocenter.device.backend import Room
from hypocenter.device.sim.sim import open_sim
from hypocenter.engine.batch import Chunk
from hypocenter.engine.drafting import drafter
from hypocenter.engine.drafting.drafter import Drafter
from hypocenter.engine.drafting.head_model import HeadModel
from hypocenter.engine.drafting.model_drafter import DraftRecord
from hypocenter.engine.request import Request
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.facts.nextn import head_of
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.placement import draft_needs, kv_room
from hypocenter.record import recorder
from hypocenter.settings.config import KV_DTYPES, EngineConfig, SamplingParams

SIM = "sim:h200"
TOKENS = list("abcdefg")
_EPS = 1e-5
#: Of the largest logit: float32 sums of some ten matrices a layer, as in `tests/model`.
TOLERANCE = 3e-5


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens are tried as may be, however often they are wrong."""
    monkeypatch.setattr(Drafter, "_left", lambda self, num_output, gains=True: math.inf)
    monkeypatch.setattr(drafter, "best_number", lambda odds, most, price_of: (most, True))
    monkeypatch.setattr(DraftRecord, "awaits_steps", False)


def head_tensors(layer: int = 1, seed: int = 3) -> dict[str, Any]:
    """A head of random numbers behind a tiny model of `layer` layers."""
    kv_rows, rng = NUM_KV_HEADS * HEAD_DIM, np.random.default_rng(seed)
    shapes = {
        "attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (kv_rows, WIDTH),
        "attn_v": (kv_rows, WIDTH), "attn_output": (WIDTH, WIDTH), "ffn_norm": (WIDTH,),
        "ffn_gate": (FFN_WIDTH, WIDTH), "ffn_up": (FFN_WIDTH, WIDTH),
        "ffn_down": (WIDTH, FFN_WIDTH), "nextn.enorm": (WIDTH,), "nextn.hnorm": (WIDTH,),
        "nextn.eh_proj": (WIDTH, 2 * WIDTH), "nextn.shared_head_norm": (WIDTH,),
    }  # fmt: skip
    return {
        f"blk.{layer}.{name}.weight": rng.standard_normal(shape) / math.sqrt(shape[-1])
        for name, shape in shapes.items()
    }


def with_head(path: Path, tensors: Mapping[str, Any] = {}, **metadata: Any) -> Path:
    """A tiny model with a head of random numbers, or with these in place of them."""
    keys = {"block_count": 2, "nextn_predict_layers": 1, **metadata}
    return write_tiny(path, metadata=keys, tensors={**head_tensors(), **tensors}, tokens=TOKENS)


# -- what it computes ------------------------------------------------------------------------------


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    normed: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + _EPS) * weight
    return normed


def rotated(x: np.ndarray) -> np.ndarray:
    """Heads [num_tokens, num_heads, HEAD_DIM] turned by their positions, neighbours in pairs."""
    angles = np.arange(len(x))[:, None] / 10000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    out = np.empty_like(x)
    out[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., ::2] * sin + x[..., 1::2] * cos
    return out


def layer_reference(x: np.ndarray, of: Callable[[str], np.ndarray]) -> np.ndarray:
    """What one llama layer makes of x [num_tokens, WIDTH]."""
    normed, num = rms(x, of("attn_norm")), len(x)
    q = rotated((normed @ of("attn_q").T).reshape(num, NUM_HEADS, HEAD_DIM))
    k = rotated((normed @ of("attn_k").T).reshape(num, NUM_KV_HEADS, HEAD_DIM))
    v = (normed @ of("attn_v").T).reshape(num, NUM_KV_HEADS, HEAD_DIM)
    scores = np.einsum("ihd,jd->hij", q, k[:, 0]) / math.sqrt(HEAD_DIM)
    scores = np.where(np.tri(num, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    attended = np.einsum("hij,jd->ihd", shares, v[:, 0]).reshape(num, -1)
    x = x + attended @ of("attn_output").T
    normed = rms(x, of("ffn_norm"))
    gate, up = normed @ of("ffn_gate").T, normed @ of("ffn_up").T
    out: np.ndarray = x + (gate / (1 + np.exp(-gate)) * up) @ of("ffn_down").T
    return out


def _tensor(tensors: Mapping[str, np.ndarray], layer: int, name: str) -> np.ndarray:
    return tensors[f"blk.{layer}.{name}.weight"]


class Reference:
    """A tiny llama of one layer and its head, by the published formula in float64."""

    def __init__(self, path: Path) -> None:
        with open_gguf(path) as file:
            tensors = {
                name: file.raw(name).view(np.float32).reshape(info.shape).astype(np.float64)
                for name, info in file.tensors.items()
            }
        self.of_model, self.of_head = (partial(_tensor, tensors, n) for n in range(2))
        self.embedding, self.norm = tensors["token_embd.weight"], tensors["output_norm.weight"]

    def left(self, ids: Sequence[int]) -> np.ndarray:
        """What the model leaves of the token before each."""
        found = rms(layer_reference(self.embedding[list(ids)], self.of_model), self.norm)
        return np.concatenate([np.zeros((1, WIDTH)), found[:-1]])

    def given(self, ids: Sequence[int], left: np.ndarray) -> np.ndarray:
        """What the head gives behind each token, behind its norm."""
        read = [rms(self.embedding[list(ids)], self.of_head("nextn.enorm"))]
        read.append(rms(left, self.of_head("nextn.hnorm")))
        x = np.concatenate(read, axis=1) @ self.of_head("nextn.eh_proj").T
        return rms(layer_reference(x, self.of_head), self.of_head("nextn.shared_head_norm"))

    def logits(self, given: np.ndarray) -> np.ndarray:
        found: np.ndarray = given @ self.of_head("nextn.shared_head_head").T
        return found

    def drafts(self, ids: Sequence[int], num: int) -> list[int]:
        """The most likely tokens behind a text, each read behind what the head gave before it."""
        ids, left = list(ids), self.left(ids)
        for _ in range(num):
            given = self.given(ids, left)
            left = np.concatenate([left, given[-1:]])
            ids.append(int(self.logits(given[-1:]).argmax()))
        return ids[len(ids) - num :]


def logits_of_head(
    path: Path,
    ids: list[int],
    device: str = "cpu",
    context_length: int = 64,
    lora: tuple[str, ...] = (),
) -> np.ndarray:
    """Logits of the head behind each token of a text, [num_tokens, vocab_size], read in pieces."""
    config = EngineConfig(
        device=device, context_length=context_length, max_batch_tokens=16, kv_dtype="f32",
        spec="mtp", lora=lora,
    )  # fmt: skip
    with LLM(path, config) as llm:
        model = llm.engine.draft_model
        assert isinstance(model, HeadModel)
        request = llm.engine.request(ids, SamplingParams(max_tokens=1, ignore_eos=True))
        llm.engine.submit(request)
        scheduler = llm.engine.scheduler
        scheduler.with_drafts = lambda chunks: chunks  # type: ignore[method-assign]
        remove = scheduler.remove
        scheduler.remove = lambda *a, **n: None  # type: ignore[method-assign]
        while not request.done:
            llm.engine.step()
        logits = []
        for stop in (4, len(ids)):
            span = model._next_span(request, stop, 16)
            assert span is not None
            of_each = np.arange(len(span.token_ids), dtype=np.int32)
            batch = replace(model._batch([span], len(of_each)), logit_rows=of_each)
            logits.append(copies.to_host(model.runner.run(batch)).copy())
        model.forget(request.id)
        remove(request)
    return np.concatenate(logits)


@pytest.mark.parametrize("device", ["cpu", SIM])
@pytest.mark.tier("sim", fast=lambda case: case.device == "cpu")
def test_a_head_computes_its_formula(tmp_path: Path, device: str) -> None:
    """Behind each token of a text, by what the model left of the token before."""
    if device == SIM:
        devices.use_backend(open_sim(SIM))
    own = {"blk.1.nextn.shared_head_head.weight": np.random.default_rng(1).normal(size=(7, WIDTH))}
    path, ids = with_head(tmp_path / "model.gguf", own), [1, 4, 2, 6, 0, 3, 5, 5, 1]
    reference = Reference(path)
    wanted = reference.logits(reference.given(ids, reference.left(ids)))
    assert relative_error(logits_of_head(path, ids, device), wanted) < TOLERANCE


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("device", ["cpu", SIM])
@pytest.mark.tier("sim", fast=lambda case: case.device == "cpu")
@pytest.mark.usefixtures("eager")
def test_behind_its_own_tokens_it_reads_its_own_norm(
    tmp_path: Path, device: str, is_adapted: bool
) -> None:
    if device == SIM:
        devices.use_backend(open_sim(SIM, graphs=True))
    own = {"blk.1.nextn.shared_head_head.weight": np.random.default_rng(1).normal(size=(7, WIDTH))}
    path = with_head(tmp_path / "model.gguf", own)
    lora, whole = with_adapter(path) if is_adapted else ((), path)
    reference, num_seen = Reference(whole), 0
    config = EngineConfig(
        device=device, context_length=64, kv_dtype="f32", spec="mtp", draft_max=3, lora=lora
    )
    with LLM(path, config) as llm:
        scheduler = llm.engine.scheduler
        take_back = scheduler.take_back

        def compare(chunk: Chunk, num_right: int) -> None:
            nonlocal num_seen
            ids = chunk.request.token_ids[: chunk.stop - len(chunk.drafts)]
            assert list(chunk.drafts) == reference.drafts(ids, len(chunk.drafts))
            num_seen += len(chunk.drafts)
            take_back(chunk, num_right)

        scheduler.take_back = compare  # type: ignore[method-assign]
        # Of several requests each reads what was given for itself, also behind one that has ended.
        asked = ([3], 9), ([1, 4, 2, 6, 0, 3, 5], 24), ([6, 6, 2], 16)
        requests = [
            llm.engine.request(ids, SamplingParams(max_tokens=num, ignore_eos=True))
            for ids, num in asked
        ]
        llm.engine.complete(requests)
    assert num_seen > 40


def with_adapter(path: Path) -> tuple[tuple[str, ...], Path]:
    """An adapter beside all matrices of a model and its head, and the model with it merged in."""
    adapter = random_adapter(path.with_name("adapter.gguf"), path, rank=3, alpha=6.0)
    beside = {name.split(".")[-2] for name in read_pairs(adapter) if name.startswith("blk.1.")}
    assert {"eh_proj", "attn_q", "ffn_gate"} <= beside
    return (str(adapter),), merged(path.with_name("merged.gguf"), path, [(read_pairs(adapter), 2)])


@pytest.mark.parametrize("device", ["cpu", SIM])
@pytest.mark.tier("sim", fast=lambda case: case.device == "cpu")
def test_an_adapter_of_a_head_is_what_merging_it_would_be(tmp_path: Path, device: str) -> None:
    if device == SIM:
        devices.use_backend(open_sim(SIM))
    own = {"blk.1.nextn.shared_head_head.weight": np.random.default_rng(1).normal(size=(7, WIDTH))}
    path, ids = with_head(tmp_path / "model.gguf", own), [1, 4, 2, 6, 0, 3, 5, 5, 1]
    lora, whole = with_adapter(path)
    reference, plain = Reference(whole), Reference(path)
    wanted = reference.logits(reference.given(ids, reference.left(ids)))
    assert relative_error(logits_of_head(path, ids, device, lora=lora), wanted) < TOLERANCE
    assert relative_error(plain.logits(plain.given(ids, plain.left(ids))), wanted) > 0.05
    idle = logits_of_head(path, ids, device, lora=(f"{lora[0]}:0",))
    assert relative_error(idle, plain.logits(plain.given(ids, plain.left(ids)))) < TOLERANCE


def test_without_a_head_that_runs_its_adapters_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = with_head(tmp_path / "model.gguf")
    (adapter,), whole = with_adapter(path)
    only = {name: pair for name, pair in read_pairs(Path(adapter)).items() if "blk.1." in name}
    alone = str(write_adapter(tmp_path / "only.gguf", path, only))
    found = []
    for one, lora in ((path, [adapter, alone]), (path, [alone]), (path, []), (whole, [])):
        with LLM(one, device="cpu", context_length=64, kv_dtype="f32", lora=lora) as llm:
            found.append(np.array(llm.logits([1, 4, 2, 6])))
    assert relative_error(found[0], found[3]) < TOLERANCE
    assert (found[1] == found[2]).all()
    lines = [record.getMessage() for record in caplog.records if "MTP" in record.getMessage()]
    assert lines[0] == (
        f"{adapter}: {len(only)} pairs stand beside layers that propose tokens (MTP) and do not "
        "run here; --spec mtp runs the first such layer"
    )
    assert len(lines) == 3


@pytest.mark.parametrize("name", ["glm4moe", "deepseek2-v3", "qwen3next", "qwen35", "qwen35moe"])
@pytest.mark.tier("sim", fast=lambda case: case.name in ("glm4moe", "deepseek2-v3", "qwen35"))
def test_a_head_of_a_family_is_one_of_its_layers(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer of a model of transformers, between what a head has before and behind it."""
    if name.startswith("qwen"):
        end_with_attention(monkeypatch, name)
    made = make_family(name, tmp_path)
    model, random = made.hf_model, np.random.default_rng(4)
    last, width = len(model.model.layers) - 1, model.config.hidden_size
    shift = 1.0 if made.family.shifted_norms else 0.0
    own = {
        "enorm": 1 + 0.3 * random.standard_normal(width),
        "hnorm": 1 + 0.3 * random.standard_normal(width),
        "eh_proj": random.standard_normal((width, 2 * width)) / math.sqrt(width),
        "shared_head_norm": model.model.norm.weight.detach().numpy() + 0.1 + shift,
    }

    def with_own(tensors: Tensors) -> Tensors:
        values = {
            f"blk.{last}.nextn.{part}.weight": x.astype(np.float32) for part, x in own.items()
        }
        return tensors | values

    key = f"{made.family.arch}.nextn_predict_layers"
    path = rewritten(made.path, tmp_path / "head.gguf", with_own, {key: 1})
    ids = made.token_ids[:16]
    ours = logits_of_head(path, ids, context_length=made.context_length)
    theirs = head_of_transformers(model, ids, own, shift)
    assert relative_error(ours, theirs) < TOLERANCE


def head_of_transformers(
    model: Any, ids: list[int], own: Mapping[str, np.ndarray], shift: float
) -> np.ndarray:
    """Logits of a head that has the last layer of `model`, whose own norms add `shift` to their
    weights, in float32."""
    inner, layers = model.model, model.model.layers
    eps, tensors = model.config.rms_norm_eps, {k: torch.tensor(x).float() for k, x in own.items()}

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + eps) * weight

    with torch.no_grad():
        embedded = inner.embed_tokens(torch.tensor([ids]))
        inner.layers = layers[:-1]
        left = inner(inputs_embeds=embedded, use_cache=False).last_hidden_state
        before = torch.cat([torch.zeros_like(left[:, :1]), left[:, :-1]], dim=1)
        read = normed(embedded, tensors["enorm"]), normed(before, tensors["hnorm"])
        inner.layers, inner.norm.weight.data = layers[-1:], tensors["shared_head_norm"] - shift
        if shift:  # what a layer is it is told by its place
            inner.config.layer_types = inner.config.layer_types[-1:]
        x = torch.cat(read, dim=-1) @ tensors["eh_proj"].T
        last = inner(inputs_embeds=x, use_cache=False).last_hidden_state
        return np.asarray(model.lm_head(last)[0].numpy())


def test_a_head_without_tensors_of_its_own_takes_the_models(tmp_path: Path) -> None:
    path = with_head(tmp_path / "model.gguf", {"blk.1.nextn.shared_head_norm.weight": None})
    with LLM(path, device="cpu", spec="mtp") as llm:
        own, model = llm.engine.draft_model.runner.weights, llm.engine.runner.weights  # type: ignore[union-attr]
        assert own.output is model.output
        assert own.token_table is model.token_table
        assert own.output_norm is not None
        assert model.output_norm is not None
        assert (copies.to_host(own.output_norm) == copies.to_host(model.output_norm)).all()


# -- answers ---------------------------------------------------------------------------------------


def alphabet(path: Path, *, is_right: bool) -> Path:
    """A model that most likely says after each token the one that follows it in the vocabulary, and
    whose head says so, too, or says another."""
    each = np.eye(7, WIDTH, dtype=np.float32)
    nothing = np.zeros((WIDTH, 2 * WIDTH), np.float32)
    of_embedding = nothing.copy()
    of_embedding[:, :WIDTH] = 20 * np.eye(WIDTH)
    ones = np.ones(WIDTH)
    tensors = {
        "token_embd.weight": 50 * each,
        "output.weight": 1.2 * np.roll(each, 1, axis=0),
        "blk.1.nextn.shared_head_head.weight": 1.2 * np.roll(each, 1 if is_right else 3, axis=0),
        "blk.1.nextn.eh_proj.weight": of_embedding,
        "blk.1.nextn.enorm.weight": ones,
        "blk.1.nextn.shared_head_norm.weight": ones,
    }
    return with_head(path, tensors)


#: What requests ask for that a device drafts for by itself, and the last one not.
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.3, "seed": 5},
    {"temperature": 0.5, "seed": 6, "top_p": 0.95, "logprobs": 2},
    {"min_tokens": 9, "stop_token_ids": (3,), "ignore_eos": False},
    {"frequency_penalty": 0.1},
)


def answers(path: Path, device: str, spec: str) -> list[Request]:
    config = EngineConfig(
        device=device, context_length=64, max_batch_tokens=16, spec=spec, draft_max=4
    )
    with LLM(path, config) as llm:
        if device != "cpu":
            llm.engine.capture()
        requests = [
            llm.engine.request(
                [n, n + 1] * 12, SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | fields)
            )
            for n, fields in enumerate(KINDS)
        ]
        llm.engine.complete(requests[:1])
        llm.engine.complete(requests[1:])
        llm.engine.check_integrity()
    return requests


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("device", ["cpu", SIM])
@pytest.mark.tier("sim", fast=lambda case: case.device == "cpu")
@pytest.mark.usefixtures("eager")
def test_answers_are_those_without(tmp_path: Path, device: str, is_right: bool) -> None:
    path = alphabet(tmp_path / "model.gguf", is_right=is_right)
    found = []
    for spec in ("off", "mtp"):
        if device == SIM:
            recorder.close_recorder()
            devices.use_backend(open_sim(SIM, graphs=True))
        found.append(answers(path, device, spec))
    for one, other in zip(*found, strict=True):
        assert one.output_ids == other.output_ids
        assert one.logprobs == other.logprobs
    timings = [request.timings() for request in found[1]]
    drafted = sum(one.num_drafted_tokens for one in timings)
    accepted = sum(one.num_accepted_tokens for one in timings)
    assert drafted > 30
    assert (accepted > drafted // 2) == is_right


@pytest.mark.tier("sim")
@pytest.mark.usefixtures("eager")
def test_a_sampled_token_has_the_distribution_of_the_logits(tmp_path: Path) -> None:
    """Chi-square of what is chosen behind a draft that was right, over many seeds."""
    path, hot = alphabet(tmp_path / "model.gguf", is_right=True), 3.5
    seen: Counter[int] = Counter()
    with LLM(path, device="cpu", context_length=64, spec="mtp", draft_max=3, num_threads=1) as llm:

        def ask(ids: list[int], **fields: Any) -> Request:
            request = llm.engine.request(ids, SamplingParams(ignore_eos=True, **fields))
            llm.engine.complete([request])
            return request

        prompt, likely = [4, 5, 6, 0, 1, 2], 3
        plain = ask([*prompt, likely], max_tokens=1, drafts=False, logprobs=VOCAB_SIZE)
        for seed in range(1500):
            request = ask(prompt, max_tokens=3, temperature=hot, seed=seed)
            if request.output_ids[0] == likely and request.timings().num_accepted_tokens:
                seen[request.output_ids[1]] += 1
    shares = {one.token_id: math.exp(one.logprob / hot) for one in plain.logprobs[0].top}
    means = {token: seen.total() * x / sum(shares.values()) for token, x in shares.items()}
    common = {token: mean for token, mean in means.items() if mean >= 5}
    statistic = sum((seen[token] - mean) ** 2 / mean for token, mean in common.items())
    assert seen.total() > 150
    assert len(common) > 2
    assert statistic < len(common) + 4 * math.sqrt(2 * len(common))


@pytest.mark.usefixtures("eager")
def test_what_it_wrote_it_reads_again_behind_what_the_model_left(tmp_path: Path) -> None:
    """Its cache holds what the text alone makes of it, whatever was tried before."""
    path = with_head(tmp_path / "model.gguf")
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, seed=1)
    config = EngineConfig(device="cpu", context_length=64, spec="mtp", draft_max=3)
    first: list[list[int]] = []
    with LLM(path, config) as llm:
        model = llm.engine.draft_model
        assert isinstance(model, HeadModel)
        rows_before = model._rows_before

        def seen(span: Any) -> list[int]:
            if span.row_before is None:
                first.append([span.start, span.start + len(span.token_ids)])
            return rows_before(span)

        model._rows_before = seen  # type: ignore[method-assign]
        request = llm.engine.request([1, 2, 3], params)
        llm.engine.complete([request])
    assert first[0][0] == 0
    for (_, stop), (start, _) in itertools.pairwise(first):
        assert start == stop, "each token is read once behind what the model left"


@pytest.mark.usefixtures("eager")
def test_a_prompt_that_began_alike_goes_on(tmp_path: Path) -> None:
    """What the model left of kept tokens stays where these are."""
    path, ids = with_head(tmp_path / "model.gguf"), [1, 2, 3, 4, 5, 6] * 6
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    counts = []
    for begins_alike in (False, True):
        with LLM(path, device="cpu", context_length=64, block_size=16, spec="mtp") as llm:
            if begins_alike:
                llm.engine.complete([llm.engine.request(ids[:34], params)])
            request = llm.engine.request(ids, params)
            llm.engine.complete([request])
            timings = request.timings()
            counts.append((request.output_ids, timings.num_accepted_tokens))
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("eager")
def test_a_request_that_starts_anew_says_the_same(tmp_path: Path) -> None:
    """As after a preemption, or in the worker that follows one that died."""
    path, found = with_head(tmp_path / "model.gguf"), []
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, seed=1)
    for is_preempted in (False, True):
        with LLM(path, device="cpu", context_length=64, spec="mtp", draft_max=3) as llm:
            request = llm.engine.request([1, 2, 3] * 8, params)
            llm.engine.submit(request)
            while not request.done:
                llm.engine.step()
                if is_preempted and len(request.output_ids) > 7:
                    llm.engine.scheduler.preempt(request)
                    is_preempted = False
            llm.engine.check_integrity()
        found.append(request.output_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "shown"),
    [("llama", "1; --spec mtp uses the first"), ("olmo2", "1; not run: what a head of olmo2")],
)
def test_inspect_tells_of_it(tmp_path: Path, name: str, shown: str) -> None:
    keys = {"block_count": 2, "nextn_predict_layers": 1}
    tensors = head_tensors() if name == "llama" else {}
    path = write_tiny(tmp_path / "model.gguf", name, metadata=keys, tensors=tensors, tokens=TOKENS)
    assert (
        f"layers that propose tokens (MTP): {shown}" in hypo_in_process("inspect", str(path)).stdout
    )


# -- what is refused -------------------------------------------------------------------------------


def test_a_file_without_a_head_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", tokens=TOKENS)
    with pytest.raises(BadSetting, match="no layers that propose tokens"):
        LLM(path, device="cpu", spec="mtp")


def test_a_family_whose_heads_are_not_known_is_refused(tmp_path: Path) -> None:
    keys = {"block_count": 2, "nextn_predict_layers": 1}
    path = write_tiny(tmp_path / "model.gguf", "olmo2", metadata=keys, tokens=TOKENS)
    with pytest.raises(BadSetting, match="what a head of olmo2 models computes is not known"):
        LLM(path, device="cpu", spec="mtp")


def test_a_head_whose_tensors_were_left_out_is_refused(tmp_path: Path) -> None:
    """As converters and quantisers do, which leave the number of its layers in the keys."""
    keys = {"block_count": 2, "nextn_predict_layers": 1}
    path = write_tiny(tmp_path / "model.gguf", metadata=keys, tokens=TOKENS)
    reason = "its keys name layers that propose tokens (MTP), but it has no tensors of them"
    assert f"(MTP): 1; not run: {reason}" in hypo_in_process("inspect", str(path)).stdout
    with pytest.raises(BadSetting, match=re.escape(f"{reason}; use ngram, or a draft model")):
        LLM(path, device="cpu", spec="mtp")


@pytest.mark.parametrize("name", ["nextn.enorm", "nextn.hnorm", "nextn.eh_proj", "attn_output"])
def test_a_head_that_lacks_a_tensor_is_refused(tmp_path: Path, name: str) -> None:
    """And inspect does not say that it would run."""
    path = with_head(tmp_path / "model.gguf", {f"blk.1.{name}.weight": None})
    reason = f"the head lacks blk.1.{name}.weight"
    assert f"(MTP): 1; not run: {reason}" in hypo_in_process("inspect", str(path)).stdout
    with pytest.raises(BadSetting, match=re.escape(reason)):
        LLM(path, device="cpu", spec="mtp")
    path = with_head(tmp_path / "other.gguf", {"blk.1.ffn_up.weight": None})
    with pytest.raises(BadModelFile, match="ffn_up"):
        LLM(path, device="cpu", spec="mtp")


def test_it_is_not_given_with_what_it_does_not_fit() -> None:
    with pytest.raises(BadSetting, match="one GPU"):
        EngineConfig(device="cuda", tensor_parallel=2, spec="mtp")
    with pytest.raises(BadSetting, match="spec"):
        EngineConfig(spec="mtp", draft_model="x.gguf")


def test_memory_has_room_for_it(tmp_path: Path) -> None:
    """For each token of the cache what its layer keeps, and what the model leaves of it."""
    path = with_head(tmp_path / "model.gguf")
    config = EngineConfig(device="cuda", context_length=64)
    with open_gguf(path) as file:
        arch = read_architecture(file)
        beside = replace(config, spec="mtp")
        needs = draft_needs(file, arch, beside)
        head = head_of(file, arch)
        assert (head.num_layers, head.first_layer, arch.vocab_size) == (1, 1, VOCAB_SIZE)
        assert needs.bytes_per_token == head.kv_bytes_per_token(KV_DTYPES["f16"]) + 4 * 64
        room = Room(1 << 30, 1 << 30)
        without, with_one = (kv_room(file, arch, one, room) for one in (config, beside))
    assert with_one < without / 2
