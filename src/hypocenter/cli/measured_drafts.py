"""`hypo bench --spec` and `--model-draft`: what drafts gain.

No model need be able to edit code: answers are held to the tokens of a text. So what is measured is
the engine and the drafts, and not what a model would have said. A draft model is held to that text
as well, but for a share of tokens that are others: it is as good as that says, and costs what it
does. One answer more is the models' own. Runs with drafts and without take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hypocenter.base import package
from hypocenter.base.dtypes import Int32s
from hypocenter.engine.llm import LLM
from hypocenter.engine.token_rules import TokenRules
from hypocenter.kernels.sampling.draw import mask_of
from hypocenter.settings.config import SamplingParams

#: What stands for a file that is edited; enough of it for any answer.
_SOURCES = ("engine/batch.py", "engine/scheduler.py", "engine/request.py", "engine/kv_cache.py")
#: Tokens that the edit puts in the place of others, in the middle of the text.
_NUM_EDITED = 12
#: Of a trap: so many tokens stood together before, and what followed them does not come.
_NUM_ALIKE, _TRAP = 3, 5
#: Shares of right tokens with which a draft model is measured.
QUALITIES = (0.75, 0.0)
#: Positions that a text takes beside its prompt and its answer, each as long.
_NUM_SPARE = 16


class Script(TokenRules):
    """Has an answer say the tokens of a text, whatever the logits are.

    Drafts are not told what it will say: or else none would be wrong. A draft model says it in the
    share `quality` of places, and another token in the others.
    """

    narrows_drafts = False

    def __init__(self, token_ids: Sequence[int], vocab_size: int, quality: float = 0.0) -> None:
        super().__init__(SamplingParams(), (), (), vocab_size)
        self._masks = [_only(token_id, vocab_size) for token_id in token_ids]
        self._of_drafts = [
            mask if right else _only((token_id + 1) % vocab_size, vocab_size)
            for token_id, mask, right in zip(
                token_ids, self._masks, are_right(len(token_ids), quality), strict=True
            )
        ]

    def mask_or_raise(
        self, output_ids: Sequence[int], num_output: int, form: Int32s | None
    ) -> Int32s | None:
        return self._masks[num_output]

    def draft_mask(
        self, output_ids: Sequence[int], num_output: int, form: Int32s | None
    ) -> Int32s | None:
        return self._of_drafts[num_output]


def _only(token_id: int, vocab_size: int) -> Int32s:
    return mask_of(np.arange(vocab_size) == token_id)


def are_right(num_tokens: int, quality: float) -> list[bool]:
    """Whether a draft of that quality is right at each place; the same in each run."""
    shares: list[float] = np.random.default_rng(75).random(num_tokens).tolist()
    return [share < quality for share in shares]


@dataclass(frozen=True)
class Pairs:
    """One text: tokens per second of each repetition, without drafts and with them."""

    name: str
    num_tokens: int
    without: tuple[float, ...]
    drafted: tuple[float, ...]
    num_drafted: int
    num_accepted: int

    @property
    def ratios(self) -> list[float]:
        return sorted(one / other for one, other in zip(self.drafted, self.without, strict=True))

    @property
    def text(self) -> str:
        ratios, name = self.ratios, f"{self.name}{self.num_tokens}"
        if not self.num_drafted:
            return f"{name}: nothing was drafted, so there is no ratio"
        return (
            f"{name}: {statistics.median(self.without):.1f} tokens/s without "
            f"drafts, {statistics.median(self.drafted):.1f} with them: "
            f"{statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f} in "
            f"{len(ratios)} pairs); {self.num_accepted} of {self.num_drafted} drafts right"
        )

    def as_object(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_tokens": self.num_tokens,
            "tokens_per_second": self.without,
            "drafted_tokens_per_second": self.drafted,
            "ratio": statistics.median(self.ratios) if self.num_drafted else None,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
        }


def num_positions(num_tokens: int) -> int:
    """What the context must hold for answers of so many tokens."""
    return 2 * num_tokens + _NUM_SPARE


def measure(
    llm: LLM, num_tokens: int, repetitions: int, progress: Callable[[str, float], None]
) -> Iterator[Pairs]:
    """Each text in pairs, after one that warms up and is not counted."""
    has_model = llm.engine.draft_model is not None
    for text in (_texts_of_quality if has_model else _texts)(llm, num_tokens):
        name = text.name
        speeds: dict[bool, list[float]] = {False: [], True: []}
        counts = 0, 0
        for repetition in range(-1, repetitions):
            progress(f"{name}{num_tokens}", (repetition + 1) / (repetitions + 1))
            for drafts in (False, True) if repetition % 2 else (True, False):
                speed, counts_now = _run(llm, text, num_tokens, drafts=drafts)
                if repetition >= 0:
                    speeds[drafts].append(speed)
                    counts = counts_now if drafts else counts
        yield Pairs(name, num_tokens, tuple(speeds[False]), tuple(speeds[True]), *counts)


def _run(llm: LLM, text: _Text, num_tokens: int, *, drafts: bool) -> tuple[float, tuple[int, int]]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, drafts=drafts)
    engine = llm.engine
    request = engine.request(text.prompt, params)
    if text.answer is not None:
        request.rules = Script(text.answer, engine.runner.vocab_size, text.quality)
    (completion,) = engine.complete([request])
    timings = completion.timings
    counts = timings.num_drafted_tokens, timings.num_accepted_tokens
    return timings.generated_tokens_per_second, counts


@dataclass(frozen=True)
class _Text:
    """A prompt and its answer; None: what the model says."""

    name: str
    prompt: list[int]
    answer: list[int] | None
    quality: float = 0.0  # of a draft model


def _texts_of_quality(llm: LLM, num_tokens: int) -> Iterator[_Text]:
    """Answers of which a draft model knows so many in a hundred tokens, and one of the model's."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, llm.engine.runner.vocab_size, 2 * num_tokens).tolist()
    for quality in QUALITIES:
        name = f"draft {quality:.0%} right, "
        yield _Text(name, tokens[:num_tokens], tokens[num_tokens:], quality)
    source = (Path(package.FOLDER) / _SOURCES[0]).read_text()
    yield _Text("draft as it is, ", list(llm.tokenizer.encode(source))[:num_tokens], None)


def _texts(llm: LLM, num_tokens: int) -> Iterator[_Text]:
    """A file and its edit, tokens that repeat nothing, and repeated
    beginnings that end otherwise each time."""
    random = np.random.default_rng(0)
    vocab_size = llm.engine.runner.vocab_size
    source = "".join((Path(package.FOLDER) / name).read_text() for name in _SOURCES)
    file = llm.tokenizer.encode(source)[:num_tokens]
    edited = list(file)
    at = len(file) // 2
    new = random.integers(0, vocab_size, _NUM_EDITED).tolist()
    edited[at : at + _NUM_EDITED] = new[: len(edited[at : at + _NUM_EDITED])]
    yield _Text("edit", list(file), edited)
    tokens = random.integers(0, vocab_size, 2 * num_tokens).tolist()
    yield _Text("random", tokens[:num_tokens], tokens[num_tokens:])
    alike = random.integers(0, vocab_size, _NUM_ALIKE).tolist()
    for start in range(0, len(tokens) - _NUM_ALIKE, _TRAP + _NUM_ALIKE):
        tokens[start : start + _NUM_ALIKE] = alike
    yield _Text("trap", tokens[:num_tokens], tokens[num_tokens:])
