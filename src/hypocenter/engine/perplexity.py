"""How well a model predicts a text, by llama.cpp's protocol, and how far it is from a base model.

The protocol and the format of a base are those of llama.cpp's tools/perplexity/perplexity.cpp: the
text is cut into chunks of a context, each chunk begins with BOS where the model wants one, and the
tokens of its second half are scored. Prints nothing.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from hypocenter.base.dtypes import Float32s, Float64s
from hypocenter.base.errors import UsageError
from hypocenter.engine.llm import LLM
from hypocenter.trace.reading import open_regular

_MAGIC = b"_logits_"
#: Behind it: context, vocabulary, chunks, i32.
_SIZES = struct.Struct("<iii")
_MIN_CONTEXT, _MAX_CONTEXT, _MAX_VOCABULARY, _MAX_CHUNKS = 4, 1 << 20, 1 << 21, 1 << 20
#: Before the codes of a token: their step and the logarithm that 0 stands for, f32.
_HEAD = 4
#: Logarithms below the highest one by more are kept as the lowest.
_RANGE = 16.0
_Tell = Callable[[int, int, float], None]


class Perplexity(msgspec.Struct, frozen=True):
    """`perplexity` is exp of the mean negative logarithm of the probability that each scored token
    had, `error` its standard error."""

    perplexity: float
    error: float
    num_tokens: int
    num_chunks: int
    context_length: int


class Mean(msgspec.Struct, frozen=True):
    """A mean and its standard error."""

    mean: float
    error: float


class Divergence(msgspec.Struct, frozen=True):
    """How far a model is from a base that read the same tokens.

    `divergence` is the Kullback-Leibler divergence from the base per token, in nats, `quantiles`
    some of it by percent. `log_ratio` is the mean difference of the logarithms of perplexity,
    `correlation` that of the two logarithms of a token. `probability` is how much more likely the
    text's token is than in the base, `probability_rms` the root mean square of that.
    `same_top` is the share of tokens for which both have the same most likely one.
    """

    model: Perplexity
    base: Perplexity
    log_ratio: Mean
    correlation: float
    divergence: Mean
    divergence_max: float
    quantiles: dict[str, float]
    probability: Mean
    probability_rms: float
    same_top: Mean


def chunks_of(llm: LLM, text: str, context: int, most: int | None) -> list[list[int]]:
    """The tokens of `text` in chunks of `context`, at most so many; what is left is left out.

    Raises UsageError for a text of less than two chunks, for chunks in which nothing is scored, and
    for a model that ends texts with EOS.
    """
    if context < _MIN_CONTEXT:
        raise UsageError(f"-c is {context}, but a chunk must have at least {_MIN_CONTEXT} tokens")
    if llm.tokenizer.add_eos:
        raise UsageError("this model ends each text with EOS, for which the protocol has no place")
    ids = list(llm.tokenizer.encode(text))
    if len(ids) < 2 * context:
        raise UsageError(
            f"the text has {len(ids)} tokens, and two chunks of {context} are needed; give a "
            "longer one, or a smaller -c"
        )
    num_chunks = len(ids) // context
    num_chunks = num_chunks if most is None else min(num_chunks, most)
    return [ids[context * n : context * (n + 1)] for n in range(num_chunks)]


def measure(
    llm: LLM, chunks: Sequence[Sequence[int]], base: LogitsWriter | None, tell: _Tell
) -> Perplexity:
    """Score each chunk, and keep the logarithms in `base`; `tell` hears the perplexity so far."""
    scores = _Scores(len(chunks[0]))
    for number, chunk in enumerate(chunks):
        logits = scored_logits(llm, chunk)
        logs = _log_softmax(logits)
        scores.add(-logs[np.arange(len(logs)), _targets(chunk)])
        if base is not None:
            base.write(logits)
        tell(number + 1, len(chunks), scores.result().perplexity)
    return scores.result()


def compare(llm: LLM, base: LogitsReader, tell: _Tell, most: int | None = None) -> Divergence:
    """Score the chunks of a base, at most so many, and say how far the model is from it. Raises
    UsageError where the vocabularies differ."""
    if base.vocab_size != llm.vocab_size:
        raise UsageError(
            f"{base.path} is of a vocabulary of {base.vocab_size}, and the model has "
            f"{llm.vocab_size}; a base of the same model is needed"
        )
    columns: list[Float64s] = []
    scores = _Scores(base.context)
    chunks = base.chunks[:most]
    for number, chunk in enumerate(chunks):
        logs, of_base = _log_softmax(scored_logits(llm, chunk)), base.read()
        columns.append(_beside(logs, of_base, _targets(chunk)))
        scores.add(columns[-1][0])
        tell(number + 1, len(chunks), scores.result().perplexity)
    return _divergence(np.concatenate(columns, axis=1), base, scores)


def _beside(logs: Float64s, of_base: Float64s, targets: npt.NDArray[np.int64]) -> Float64s:
    """The rows [4, num_tokens]: both negative logarithms, the divergence, and whether the most
    likely token is the same."""
    rows = np.arange(len(logs))
    # What a base calls less likely than that counts for nothing.
    is_kept = of_base > -_RANGE
    terms = np.where(is_kept, np.exp(of_base) * (of_base - logs), 0.0)
    same = logs.argmax(1) == of_base.argmax(1)
    return np.array([-logs[rows, targets], -of_base[rows, targets], terms.sum(1), same])


def _divergence(columns: Float64s, base: LogitsReader, scores: _Scores) -> Divergence:
    of_model, of_base, divergence, same = columns
    base_scores = _Scores(base.context)
    for start in range(0, len(of_base), base.num_scored):
        base_scores.add(of_base[start : start + base.num_scored])
    more = np.exp(-of_model) - np.exp(-of_base)
    percents = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0)
    spread = float(of_model.std() * of_base.std())
    together = float(((of_model - of_model.mean()) * (of_base - of_base.mean())).mean())
    return Divergence(
        scores.result(),
        base_scores.result(),
        _mean(of_model - of_base),
        together / spread if spread else 1.0,
        _mean(divergence),
        float(divergence.max()),
        {f"{percent:g}": float(np.percentile(divergence, percent)) for percent in percents},
        _mean(more),
        float(np.sqrt((more * more).mean())),
        _mean(same.astype(np.float64)),
    )


def _mean(values: Float64s) -> Mean:
    error = float(values.std()) / math.sqrt(max(len(values) - 1, 1))
    return Mean(float(values.mean()), error)


class _Scores:
    """Sums of negative logarithms."""

    def __init__(self, context: int) -> None:
        self._context, self._num_chunks = context, 0
        self._num = 0
        self._sum = self._squares = 0.0

    def add(self, of_chunk: Float64s) -> None:
        self._num_chunks += 1
        self._num += len(of_chunk)
        self._sum += float(of_chunk.sum())
        self._squares += float((of_chunk * of_chunk).sum())

    def result(self) -> Perplexity:
        mean = self._sum / self._num
        variance = max(self._squares / self._num - mean * mean, 0.0)
        perplexity = math.exp(mean)
        error = math.sqrt(variance / max(self._num - 1, 1)) * perplexity
        return Perplexity(perplexity, error, self._num, self._num_chunks, self._context)


def scored_logits(llm: LLM, chunk: Sequence[int]) -> Float32s:
    """Logits behind each token of the second half but the last, f32 [num_scored, vocab_size]."""
    first = len(chunk) // 2
    tokenizer, ids = llm.tokenizer, list(chunk)
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        ids[0] = tokenizer.bos_id
    return llm.logits(ids)[first:-1]


def _targets(chunk: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(chunk[len(chunk) // 2 + 1 :], np.int64)


def _log_softmax(logits: Float32s) -> Float64s:
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    found: Float64s = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    return found


class LogitsWriter:
    """Writes what llama.cpp's `--kl-divergence-base` does: tokens, and logarithms in 16 bits.

    The file has its name from `close` on, and only when all chunks were written.
    """

    def __init__(self, path: Path, chunks: Sequence[Sequence[int]], vocab_size: int) -> None:
        """Raises UsageError where there is such a file already, or none can be made."""
        if path.exists():
            raise UsageError(f"{path} is there already; name a new file for the base")
        self._path, self._partial = path, path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._file = self._partial.open("xb")
        except OSError as error:
            raise UsageError(f"the base cannot be written to {path}: {error.strerror}") from error
        self._vocab_size, context = vocab_size, len(chunks[0])
        self._num_left = len(chunks)
        self._file.write(_MAGIC + _SIZES.pack(context, vocab_size, len(chunks)))
        self._file.write(np.array(chunks, "<i4").tobytes())

    def write(self, logits: Float32s) -> None:
        """Codes of a chunk's scored tokens: steps of a 65535th of the range of their logits."""
        high = logits.max(1, keepdims=True)
        low = np.maximum(logits.min(1, keepdims=True), high - np.float32(_RANGE))
        sums = np.exp((logits - high).astype(np.float64)).sum(1, keepdims=True)
        lowest = (low - high - np.log(sums)).astype("<f4")
        step = ((high - low) / np.float32(65535)).astype("<f4")
        codes = np.rint((logits - low) / np.where(step > 0, step, 1)).clip(0, 65535)
        padded = np.zeros((len(logits), _pitch(self._vocab_size)), "<u2")
        padded[:, :_HEAD] = np.concatenate([step, lowest], axis=1).view("<u2")
        padded[:, _HEAD : _HEAD + self._vocab_size] = codes
        self._file.write(padded.tobytes())
        self._num_left -= 1

    def close(self) -> None:
        try:
            self._file.close()
            if not self._num_left:
                os.replace(self._partial, self._path)
        finally:
            self._partial.unlink(missing_ok=True)


class LogitsReader:
    """Reads such a file, whoever wrote it."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError for what is no base, and for one that is not whole."""
        self.path = path
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error
        try:
            self._read_head(path)
        except BaseException:
            self._file.close()
            raise

    def _read_head(self, path: Path) -> None:
        head = self._file.read(len(_MAGIC) + _SIZES.size)
        if len(head) < len(_MAGIC) + _SIZES.size or not head.startswith(_MAGIC):
            raise UsageError(f"{path} is no base; `hypo perplexity --kl-divergence-base` makes one")
        self.context, self.vocab_size, num_chunks = _SIZES.unpack(head[len(_MAGIC) :])
        limits = (
            (self.context, _MIN_CONTEXT, _MAX_CONTEXT, "context"),
            (self.vocab_size, 1, _MAX_VOCABULARY, "vocabulary"),
            (num_chunks, 1, _MAX_CHUNKS, "number of chunks"),
        )
        for value, low, high, name in limits:
            if not low <= value <= high:
                raise UsageError(f"{path}: its {name} is {value}, but must be {low} to {high}")
        self._row = _pitch(self.vocab_size)
        wanted = len(head) + num_chunks * (4 * self.context + 2 * self.num_scored * self._row)
        if (size := path.stat().st_size) != wanted:
            raise UsageError(f"{path} has {size} bytes, and {wanted} by what it says of itself")
        raw = self._file.read(4 * num_chunks * self.context)
        ids = np.frombuffer(raw, "<i4").reshape(num_chunks, self.context)
        if not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise UsageError(f"{path} has a token id outside its vocabulary")
        self.chunks: list[list[int]] = ids.tolist()
        self._num_read = 0

    @property
    def num_scored(self) -> int:
        """Tokens of a chunk that are scored."""
        num_tokens: int = self.context - 1 - self.context // 2
        return num_tokens

    def read(self) -> Float64s:
        """The logarithms of the next chunk, f64 [num_scored, vocab_size]."""
        raw = self._file.read(2 * self.num_scored * self._row)
        rows = np.frombuffer(raw, "<u2").reshape(self.num_scored, self._row)
        step, lowest = np.ascontiguousarray(rows[:, :_HEAD]).view("<f4").astype(np.float64).T
        codes = rows[:, _HEAD : _HEAD + self.vocab_size].astype(np.float64)
        self._num_read += 1
        with np.errstate(invalid="ignore", over="ignore"):
            found: Float64s = step[:, None] * codes + lowest[:, None]
            totals = np.exp(found).sum(1)
        # The lowest that is kept, behind the sum of all others at their highest.
        floor = -_RANGE - math.log(self.vocab_size) - 0.01
        is_sound = (step >= 0) & (lowest >= floor) & (totals > 0.5) & (totals < 2.0)
        if not is_sound.all():
            row = int(np.flatnonzero(~is_sound)[0])
            raise UsageError(
                f"{self.path}: row {row} of chunk {self._num_read} has probabilities whose sum is "
                f"{totals[row]:g} (step {step[row]:g}, lowest logarithm {lowest[row]:g}), not 1; "
                "make the base again"
            )
        return found

    def close(self) -> None:
        self._file.close()


def _pitch(vocab_size: int) -> int:
    return 2 * ((vocab_size + 1) // 2) + _HEAD
