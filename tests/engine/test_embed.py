"""Vectors and scores of encoders and decoders against transformers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.encoder_gguf import NUM_POSITIONS, WIDTH, EncoderModel, make_encoder
from models.tiny_gguf import write_tiny

from hypocenter.base.errors import BadModelFile, BadSetting, ContextOverflow, UsageError
from hypocenter.engine.llm import LLM

TEXTS = ["hello the kings, world!", "a cafe", "the queen is über-kind to the king 42 times"]
#: Both sides sum in float32 over some ten matrices; a wrong norm, mask, position or row of the head
#: is off by a hundredth at least.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, made = tmp_path_factory.mktemp("encoders"), dict[str, EncoderModel]()

    def make(name: str) -> EncoderModel:
        if name not in made:
            made[name] = make_encoder(name, folder)
        return made[name]

    return make


def open_model(model: EncoderModel, **fields: Any) -> LLM:
    return LLM(model.path, **{"device": "cpu", "kv_dtype": "f32", "num_threads": 1, **fields})


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def pooled(rows: np.ndarray, kind: str) -> np.ndarray:
    found: np.ndarray = {"mean": rows.mean(axis=0), "cls": rows[0], "last": rows[-1]}[kind]
    return found


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "nomic-bert", "qwen3", "gemma-embedding"])
def test_vectors_are_those_of_transformers(name: str, models: Any) -> None:
    """Texts together and one by one: none sees another's tokens, and each sees all its own."""
    model = models(name)
    with open_model(model) as llm:
        assert llm.pooling is not None
        together = llm.embed(TEXTS, normalise=False)
        for text, ours in zip(TEXTS, together, strict=True):
            theirs = pooled(model.rows(list(llm.encode(text))), llm.pooling.kind)
            assert error(ours, theirs) < TOLERANCE
            assert np.array_equal(ours, llm.embed(text, normalise=False)), "company changed it"


def test_the_scores_of_a_roberta_are_those_of_transformers(models: Any) -> None:
    model = models("xlm-roberta-scores")
    with open_model(model) as llm:
        ours = llm.rerank("hello king", TEXTS)
        for text, score in zip(TEXTS, ours, strict=True):
            ids, _ = llm.encode_pair("hello king", text)
            assert abs(score - float(model.scores(list(ids))[0])) < 1e-4
        assert len(set(ours)) == len(TEXTS)


def test_the_scores_of_a_bert_tell_the_query_from_the_document(models: Any) -> None:
    model = models("bert-scores")
    with open_model(model) as llm:
        [score] = llm.rerank("hello king", TEXTS[:1])
        ids, first = llm.encode_pair("hello king", TEXTS[0])
        assert first is not None
        theirs = float(model.scores(list(ids), first)[0])
        assert abs(score - theirs) < 1e-4
        assert abs(theirs - float(model.scores(list(ids), len(ids))[0])) > 1e-2, "kinds matter"


def test_vectors_are_cut_and_divided_by_their_length(models: Any) -> None:
    with open_model(models("bert")) as llm:
        raw = llm.embed(TEXTS[0], normalise=False)
        assert raw.shape == (WIDTH,)
        whole, short = llm.embed(TEXTS[0]), llm.embed(TEXTS[0], dimensions=7)
        assert np.allclose(whole, raw / np.linalg.norm(raw), atol=1e-6)
        assert np.allclose(short, raw[:7] / np.linalg.norm(raw[:7]), atol=1e-6)
        for wrong in (0, WIDTH + 1):
            with pytest.raises(BadSetting, match=rf"dimensions.*{wrong}.*from 1 to {WIDTH}"):
                llm.embed(TEXTS[0], dimensions=wrong)


def test_the_pooling_that_is_asked_for_stands_over_that_of_the_file(models: Any) -> None:
    model = models("bert")
    with open_model(model, pooling="mean") as llm:
        rows = model.rows(list(llm.encode(TEXTS[0])))
        assert error(llm.embed(TEXTS[0], normalise=False), rows.mean(axis=0)) < TOLERANCE
    with open_model(model, pooling="none") as llm:
        assert error(llm.embed(TEXTS[0], normalise=False), rows) < TOLERANCE
    with pytest.raises(BadSetting, match=r"pooling is 'rank'.*no head that scores"):
        open_model(model, pooling="rank")
    with pytest.raises(BadSetting, match=r"pooling is 'cls'.*sees no other"):
        open_model(models("qwen3"), pooling="cls")


def test_heads_behind_the_mean_make_another_vector(tmp_path: Path) -> None:
    shapes = ((72, WIDTH), (20, 72))
    model = make_encoder("gemma-embedding", tmp_path, dense=shapes)
    random = np.random.default_rng(3)
    first, second = (random.standard_normal(shape) / shape[1] ** 0.5 for shape in shapes)
    with open_model(model) as llm:
        rows = model.rows(list(llm.encode(TEXTS[0])))
        theirs = second @ (first @ rows.mean(axis=0))
        assert error(llm.embed(TEXTS[0], normalise=False), theirs) < 5 * TOLERANCE


def test_a_text_in_several_steps_is_the_same(models: Any) -> None:
    """A decoder reads a text in parts; its last token alone counts."""
    model = models("qwen3")
    with open_model(model, max_batch_tokens=4) as llm:
        ours = llm.embed(TEXTS[2], normalise=False)
        assert error(ours, model.rows(list(llm.encode(TEXTS[2])))[-1]) < TOLERANCE


def test_what_has_no_room_is_refused(models: Any) -> None:
    with open_model(models("bert")) as llm:
        assert llm.embed([5] * NUM_POSITIONS).shape == (WIDTH,)
        with pytest.raises(ContextOverflow, match=str(NUM_POSITIONS)):
            llm.embed([5] * (NUM_POSITIONS + 1))
        with pytest.raises(UsageError, match="no tokens"):
            llm.embed([[5], []])
    with pytest.raises(BadSetting, match=r"max_batch_tokens is 8.*one step"):
        open_model(models("bert"), max_batch_tokens=8)


def test_a_model_that_embeds_writes_nothing_and_the_reverse(models: Any, tmp_path: Path) -> None:
    with open_model(models("bert")) as llm:
        with pytest.raises(UsageError, match="gives vectors of texts and writes no text"):
            llm.generate("hello")
        with pytest.raises(UsageError, match="no head that scores"):
            llm.rerank("hello", ["world"])
    with (
        open_model(models("xlm-roberta-scores")) as llm,
        pytest.raises(UsageError, match="gives scores of documents and no vectors"),
    ):
        llm.embed("hello")
    path = write_tiny(tmp_path / "chat.gguf", tokens=["<unk>", "<s>", "</s>", "a", "b", "c", "▁"])
    with LLM(path, device="cpu") as llm, pytest.raises(UsageError, match="pooling mean or last"):
        llm.embed([3, 4])
    with LLM(path, device="cpu", pooling="last") as llm:
        assert llm.embed([3, 4]).shape == (20,)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"pooling_type": 9}, "pooling_type is 9"),
        ({"pooling_type": 4}, "cls.weight is missing"),
        ({"context_length": 65}, "position_embd.weight shape"),
        ({"dense": ((8, 3),)}, "dense_2.weight shape"),
    ],
)
def test_files_that_contradict_themselves(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_encoder("bert", tmp_path, **metadata)
    with pytest.raises(BadModelFile, match=message):
        open_model(model)
