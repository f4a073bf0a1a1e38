"""`hypo embed`: lines of numbers, scores, JSON, and what is refused, on random models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from models.encoder_gguf import make_encoder

from hypocenter.base.errors import EXIT_USAGE
from hypocenter.cli.app import main

WORDS = ("--device", "cpu", "-q")


def ask(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as left:
        main(["embed", *words, *WORDS])
    assert left.value.code == code
    out, err = capfd.readouterr()
    return err if code else out


def test_texts_become_lines_of_numbers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = str(make_encoder("bert", tmp_path).path)
    lines = ask(capfd, model, "hello world", "the king", "--dimensions", "4").splitlines()
    numbers = np.array([[float(word) for word in line.split(" ")] for line in lines])
    assert numbers.shape == (2, 4)
    assert np.linalg.norm(numbers, axis=1) == pytest.approx([1, 1], abs=1e-5)
    found = json.loads(ask(capfd, model, "the king", "--dimensions", "4", "--json"))
    assert found["embeddings"][0] == pytest.approx(numbers[1], abs=1e-6)
    refusal = ask(capfd, model, "x", "--query", "y", code=EXIT_USAGE)
    assert "has no head that scores a document; take a reranking model" in refusal


def test_documents_are_told_best_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = str(make_encoder("bert-scores", tmp_path).path)
    texts = ("hello world", "the\tking", "a cafe")
    lines = ask(capfd, model, *texts, "--query", "king").splitlines()
    rows = [line.split(maxsplit=2) for line in lines]
    assert [float(row[0]) for row in rows] == sorted((float(row[0]) for row in rows), reverse=True)
    assert {row[1]: row[2] for row in rows} == {"0": "hello world", "1": "the king", "2": "a cafe"}
    found = json.loads(ask(capfd, model, *texts, "--query", "king", "--json"))["results"]
    assert [one["index"] for one in found] == [int(row[1]) for row in rows]
