"""`hypo perplexity`: its sums, its protocol, and bases that are written, read and refused."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from repository import DEMO, PACKAGE_DIR

from hypocenter.base.errors import UsageError
from hypocenter.cli.tool_options import PerplexityOptions
from hypocenter.cli.verbs.perplexity import perplexity
from hypocenter.engine.llm import LLM
from hypocenter.engine.perplexity import (
    LogitsReader,
    LogitsWriter,
    chunks_of,
    compare,
    measure,
    scored_logits,
)
from hypocenter.settings.config import EngineConfig

CONTEXT = 32
TEXT = (PACKAGE_DIR / "engine" / "batch.py").read_text()[:600]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(context_length=64, prefix_cache=False) as made:
        yield made


def _quiet(number: int, total: int, so_far: float) -> None:
    assert 0 < number <= total
    assert so_far > 1


def test_it_is_the_mean_of_what_each_token_cost(llm: LLM) -> None:
    chunks = chunks_of(llm, TEXT, CONTEXT, 2)
    assert [len(chunk) for chunk in chunks] == [CONTEXT, CONTEXT]
    costs: list[float] = []
    for chunk in chunks:
        # By hand: BOS in place of the first token, and only the second half.
        logits = llm.logits([llm.tokenizer.bos_id or 0, *chunk[1:]]).astype(np.float64)
        for at in range(CONTEXT // 2, CONTEXT - 1):
            row = logits[at]
            costs.append(np.log(np.exp(row).sum()) - row[chunk[at + 1]])
    found = measure(llm, chunks, None, _quiet)
    assert found.num_tokens == len(costs) == 2 * (CONTEXT // 2 - 1)
    assert found.perplexity == pytest.approx(math.exp(np.mean(costs)), rel=1e-9)
    spread = np.std(costs, ddof=1) / math.sqrt(len(costs))
    assert found.error == pytest.approx(found.perplexity * spread, rel=1e-6)


def test_too_short_a_text_is_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match="two chunks of 32 are needed"):
        chunks_of(llm, "def", CONTEXT, None)


@pytest.fixture(scope="module")
def base(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bases") / "base"
    chunks = chunks_of(llm, TEXT, CONTEXT, 3)
    writer = LogitsWriter(path, chunks, llm.vocab_size)
    measure(llm, chunks, writer, _quiet)
    writer.close()
    return path


def test_a_base_holds_logarithms_to_a_step(llm: LLM, base: Path) -> None:
    reader = LogitsReader(base)
    assert reader.chunks == chunks_of(llm, TEXT, CONTEXT, 3)
    for chunk in reader.chunks:
        logits = scored_logits(llm, chunk).astype(np.float64)
        wanted = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        lowest = wanted.max(1, keepdims=True) - 16
        off = np.abs(reader.read() - np.maximum(wanted, lowest))
        assert off.max() < 16 / 65535
    reader.close()


def test_a_model_is_as_far_from_itself_as_a_step(llm: LLM, base: Path) -> None:
    reader = LogitsReader(base)
    found = compare(llm, reader, _quiet)
    reader.close()
    assert abs(found.divergence.mean) < 1e-4
    assert found.same_top.mean == 1
    assert found.correlation > 0.999


def test_another_model_is_farther(base: Path) -> None:
    with LLM(
        context_length=64, prefix_cache=False, override_kv={"llama.rope.freq_base": 3e4}
    ) as other:
        reader = LogitsReader(base)
        found = compare(other, reader, _quiet)
        reader.close()
    assert found.divergence.mean > 1e-3
    assert found.divergence_max >= found.quantiles["99"] >= found.quantiles["50"]
    assert found.model.perplexity != found.base.perplexity


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"_logics_", "is no base"),
        (8, (2).to_bytes(4, "little"), "its context is 2"),
        (12, (1 << 30).to_bytes(4, "little"), "its vocabulary is 1073741824"),
        (16, (4).to_bytes(4, "little"), "bytes, and .* by what it says"),
        (20, (1 << 20).to_bytes(4, "little"), "outside its vocabulary"),
    ],
)
def test_a_damaged_base_is_refused(
    tmp_path: Path, base: Path, at: int, value: bytes, message: str
) -> None:
    raw = bytearray(base.read_bytes())
    raw[at : at + len(value)] = value
    path = tmp_path / "damaged"
    path.write_bytes(raw)
    with pytest.raises(UsageError, match=message):
        LogitsReader(path)


@pytest.mark.parametrize("context", [1, 2, 3])
def test_a_chunk_in_which_nothing_is_scored_is_refused(llm: LLM, context: int) -> None:
    with pytest.raises(UsageError, match=f"-c is {context}, but a chunk must have at least 4"):
        chunks_of(llm, TEXT, context, None)


@pytest.mark.parametrize("head", [(np.nan, -1), (1, np.inf), (-1e-3, 0), (0, -1e30), (1e30, -9)])
def test_a_base_whose_numbers_are_none_is_refused(
    tmp_path: Path, base: Path, head: tuple[float, float]
) -> None:
    whole, raw = LogitsReader(base), bytearray(base.read_bytes())
    for _ in whole.chunks:
        whole.read()  # all of a sound one is read
    row_bytes = 2 * whole._row
    # The second row of the second chunk.
    at = 20 + 4 * 3 * CONTEXT + (whole.num_scored + 1) * row_bytes
    whole.close()
    raw[at : at + 8] = np.array(head, "<f4").tobytes()
    path = tmp_path / "none"
    path.write_bytes(raw)
    reader = LogitsReader(path)
    reader.read()
    with pytest.raises(UsageError, match="none: row 1 of chunk 2 has probabilities whose sum"):
        reader.read()
    reader.close()


def test_a_pipe_is_no_base(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)  # so that no reader waits
    os.write(held, bytes(64))
    with pytest.raises(UsageError, match="pipe is no regular file"):
        LogitsReader(path)
    os.close(held)


def test_a_base_that_was_not_finished_is_not_there(llm: LLM, tmp_path: Path) -> None:
    chunks = chunks_of(llm, TEXT, CONTEXT, 2)
    writer = LogitsWriter(tmp_path / "base", chunks, llm.vocab_size)

    def interrupt(number: int, total: int, so_far: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(llm, chunks, writer, interrupt)
    assert not (tmp_path / "base").exists()
    writer.close()
    assert [*tmp_path.iterdir()] == []


def test_a_base_is_compared_with_its_own_text_alone(llm: LLM, base: Path) -> None:
    for asked, config, message in (
        ({"file": "text"}, EngineConfig(), "leave out -f"),
        ({}, EngineConfig(context_length=64), f"-c is 64, and the chunks of .* are of {CONTEXT}"),
    ):
        options = PerplexityOptions(base=str(base), is_compared=True, **asked)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=message):
            perplexity(str(DEMO), options, config)
    reader = LogitsReader(base)
    found = compare(llm, reader, _quiet, 2)
    reader.close()
    assert (found.model.num_chunks, found.base.num_chunks) == (2, 2)
