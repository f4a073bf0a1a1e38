"""The demo model's tools end to end on a tiny recipe, and the facts of the bundled file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from repository import DEMO, ROOT

BUNDLED = DEMO


@dataclass(frozen=True)
class Built:
    """What one run of the tools left behind."""

    model: Any
    fresh: Any
    folder: Path
    f16: Path


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from tools.demo_model import corpus, export, recipe, train

        folder = tmp_path_factory.mktemp("demo")
        library = folder / "library"
        (library / "tests").mkdir(parents=True)
        (library / "tests" / "skipped.py").write_text("never_read = 1\n" * 99)
        (library / "short.py").write_text("short = 1\n")
        (library / "latin.py").write_bytes(b"# caf\xe9\n" * 99)
        for index in range(4):
            lines = [f"def f{index}_{n}(x):\n    return x + {n * n}\n" for n in range(60)]
            (library / f"module{index}.py").write_text("".join(lines))
        # init_std is large so that attention is far from uniform: a wrong rotation must show.
        tiny = recipe.Recipe(
            vocab_size=300,
            width=32,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            feed_forward=64,
            context_length=24,
            init_std=0.4,
            batch_size=2,
            num_steps=3,
            validation_share=4,
        )
        texts = corpus.collect(library, tiny)
        model = train.build(texts, tiny, folder)
        torch.manual_seed(tiny.training_seed)
        fresh = train.Llama(tiny)
        f16 = folder / "demo-f16.gguf"
        export.export(folder / "model.safetensors", folder / "tokenizer.json", f16)
    return Built(model, fresh, folder, f16)


def test_corpus_skips_tests_short_and_foreign_files(built: Built, tmp_path: Path) -> None:
    from tools.demo_model import corpus, recipe

    texts = corpus.collect(built.folder / "library", built.model.recipe)
    assert (len(texts["train"]), len(texts["validation"])) == (3, 1)
    assert all("never_read" not in text for part in texts.values() for text in part)
    with pytest.raises(ValueError, match="0 usable Python files"):
        corpus.collect(tmp_path, recipe.Recipe())


def test_training_moves_every_weight_and_repeats_itself(built: Built, tmp_path: Path) -> None:
    from tools.demo_model import corpus, train

    before, after = built.fresh.state_dict(), built.model.state_dict()
    assert [name for name in after if torch.equal(before[name], after[name])] == []
    texts = corpus.collect(built.folder / "library", built.model.recipe)
    again = train.build(texts, built.model.recipe, tmp_path).state_dict()
    assert [name for name in after if not torch.equal(again[name], after[name])] == []


def test_learning_rate_warms_up_and_ends_at_its_share() -> None:
    from tools.demo_model import recipe, train

    full = recipe.Recipe()
    rates = [train.learning_rate(step, full) for step in range(full.num_steps + 1)]
    assert rates[0] == pytest.approx(full.learning_rate / full.num_warmup_steps)
    assert max(rates) == pytest.approx(full.learning_rate, rel=0.01)
    assert rates[-1] == pytest.approx(full.learning_rate * full.final_rate_share)


def test_validation_loss_is_finite_and_repeats_itself(built: Built) -> None:
    from tools.demo_model import train

    ids = torch.arange(100) % built.model.recipe.vocab_size
    losses = [train.validate(built.model, ids, num_batches=2) for _ in range(2)]
    assert np.isfinite(losses[0])
    assert losses[0] == losses[1]


def test_exported_file_gives_the_logits_of_the_trained_model(built: Built) -> None:
    """GGUF's llama rotates neighbours: a forward pass that does so must agree with training."""
    model = built.model
    halved = {name: value.half().float() for name, value in model.state_dict().items()}
    norms = {name: value for name, value in model.state_dict().items() if value.dim() == 1}
    model.load_state_dict(halved | norms, strict=True)
    ids = np.random.default_rng(0).integers(0, model.recipe.vocab_size, 20)
    with torch.no_grad():
        wanted = model(torch.tensor(ids)[None])[0].numpy()
    got = _llama_logits(built.f16, ids)
    # Both compute in float32 from equal weights: only the order of the sums differs.
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


def test_exported_file_has_the_keys_and_tokens_of_the_bundled_one(built: Built) -> None:
    ours, bundled = gguf.GGUFReader(built.f16), gguf.GGUFReader(BUNDLED)
    own = {"general.quantization_version"}
    assert set(ours.fields) == set(bundled.fields) - own
    assert {_role(t.name) for t in ours.tensors} == {_role(t.name) for t in bundled.tensors}
    for key in ("general.name", "general.license", "tokenizer.ggml.pre"):
        assert ours.fields[key].contents() == bundled.fields[key].contents()
    vocabulary = json.loads((built.folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = ours.fields["tokenizer.ggml.tokens"].contents()
    assert {token: index for index, token in enumerate(tokens)} == vocabulary
    assert ours.fields["tokenizer.ggml.token_type"].contents() == [3, 3, *[1] * 298]


@pytest.mark.parametrize(("kind", "file_type"), [("F16", 1), ("Q8_0", 7), ("Q4_0", 2)])
def test_quantise_changes_matrices_and_keeps_everything_else(
    built: Built, tmp_path: Path, kind: Any, file_type: int
) -> None:
    from tools.demo_model import quantise

    output = tmp_path / "out.gguf"
    quantise.quantise(built.f16, output, kind)
    source, result = gguf.GGUFReader(built.f16), gguf.GGUFReader(output)
    for key, field in source.fields.items():
        if not key.startswith("GGUF.") and key != "general.file_type":
            assert result.fields[key].contents() == field.contents(), key
            assert result.fields[key].types == field.types, key
    assert result.fields["general.file_type"].contents() == file_type
    assert result.fields["general.quantization_version"].contents() == 2
    for before, after in zip(source.tensors, result.tensors, strict=True):
        assert before.name == after.name
        if before.data.ndim == 1:
            assert after.tensor_type == gguf.GGMLQuantizationType.F32
            np.testing.assert_array_equal(before.data, after.data)
            continue
        assert after.tensor_type == gguf.GGMLQuantizationType[kind]
        exact = before.data.astype(np.float32)
        # Half a step of a block's scale: its largest magnitude over 127, over 8 for Q4_0.
        step = {"F16": 0.0, "Q8_0": 1 / 127, "Q4_0": 1 / 8}[kind]
        blocks = exact.reshape(-1, 32)
        largest = np.abs(blocks).max(1, keepdims=True)
        error = np.abs(
            gguf.quants.dequantize(after.data, after.tensor_type).reshape(-1, 32) - blocks
        )
        # Q4_0's far end is 7 steps where 8 would be needed, hence a whole step there. The scale
        # is rounded to F16: 2^-11 of the largest magnitude.
        allowed = step * (1.0 if kind == "Q4_0" else 0.5) + (2**-11 if step else 0.0)
        assert np.all(error <= allowed * largest)


def test_quantise_refuses_what_it_cannot_do(built: Built, tmp_path: Path) -> None:
    from tools.demo_model import quantise

    with pytest.raises(ValueError, match=r"token_embd.weight is Q8_0, but must be F16 or F32"):
        quantise.quantise(BUNDLED, tmp_path / "out.gguf", "Q4_0")
    with pytest.raises(ValueError, match="same file"):
        quantise.quantise(built.f16, built.f16, "Q8_0")


def test_bundled_model_is_what_its_readme_says() -> None:
    file = gguf.GGUFReader(BUNDLED)
    facts = {key: field.contents() for key, field in file.fields.items()}
    assert 5_500_000 < BUNDLED.stat().st_size < 6_500_000
    assert not [key for key in facts if key.startswith("tokenizer.chat_template")]
    assert facts["general.architecture"] == "llama"
    assert facts["general.name"].startswith("hypocenter demo: 6M-parameter Llama")
    assert facts["general.license"].startswith("Apache-2.0; training text: CPython")
    assert facts["llama.context_length"] == 512
    assert len(facts["tokenizer.ggml.tokens"]) == facts["llama.vocab_size"] == 4096
    for tensor in file.tensors:
        wanted = "Q8_0" if tensor.data.ndim == 2 else "F32"
        assert tensor.tensor_type.name == wanted, tensor.name


def _role(name: str) -> str:
    return ".".join(part for part in name.split(".") if not part.isdigit())


def _llama_logits(path: Path, ids: np.ndarray) -> np.ndarray:
    """GGUF's llama in plain numpy, [num_tokens, vocab_size]; head counts read from the file."""
    file = gguf.GGUFReader(path)
    weights = {
        t.name.removesuffix(".weight"): gguf.quants.dequantize(t.data, t.tensor_type)
        for t in file.tensors
    }

    def fact(key: str) -> Any:
        return file.fields[f"llama.{key}"].contents()

    num_heads, num_kv_heads = fact("attention.head_count"), fact("attention.head_count_kv")
    head_dim, num_tokens = fact("rope.dimension_count"), len(ids)
    frequencies = fact("rope.freq_base") ** (-np.arange(0, head_dim, 2) / head_dim)
    turn = np.exp(1j * np.arange(num_tokens)[:, None] * frequencies)[:, None]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean = np.mean(x * x, -1, keepdims=True)
        epsilon = fact("attention.layer_norm_rms_epsilon")
        result: np.ndarray = x / np.sqrt(mean + epsilon) * weights[name]
        return result

    def rotate(x: np.ndarray) -> np.ndarray:  # neighbours are one complex number
        pairs = x.reshape(num_tokens, -1, head_dim // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        return np.stack([turned.real, turned.imag], -1).reshape(num_tokens, -1, head_dim)

    x = weights["token_embd"][ids]
    for layer in range(fact("block_count")):
        w = {name: weights.get(f"blk.{layer}.{name}", np.empty(0)) for name in _LAYER_TENSORS}
        h = norm(x, f"blk.{layer}.attn_norm")
        group = num_heads // num_kv_heads
        query = rotate(h @ w["attn_q"].T)
        key = rotate(h @ w["attn_k"].T).repeat(group, 1)
        value = (h @ w["attn_v"].T).reshape(num_tokens, -1, head_dim).repeat(group, 1)
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(head_dim)
        scores += np.triu(np.full((num_tokens, num_tokens), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, value).reshape(num_tokens, -1)
        x = x + mixed @ w["attn_output"].T
        h = norm(x, f"blk.{layer}.ffn_norm")
        gate = h @ w["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    logits: np.ndarray = norm(x, "output_norm") @ weights["token_embd"].T
    return logits


_LAYER_TENSORS = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
