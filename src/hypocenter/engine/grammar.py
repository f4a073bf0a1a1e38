"""What a request's form (a JSON schema, any JSON object, a grammar) allows as the next token.

The library `llguidance` reads the form and follows the tokens. It is imported with the first
request that has one, and learns the vocabulary then. Chooses no token and masks no logits.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import reprlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hypocenter.base.dtypes import Int32s
from hypocenter.base.errors import BadSetting, GrammarError, TokenizerError, UsageError, Words
from hypocenter.base.wording import FROM_OUTSIDE, signal_name
from hypocenter.conversation.thoughts import marks_of_calls
from hypocenter.kernels.sampling.draw import mask_of
from hypocenter.model.text.chat_process import KEPT_VARIABLES
from hypocenter.settings.config import SamplingParams
from hypocenter.settings.grammar_text import CALLS

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from hypocenter.model.text.tokenizer import Tokenizer

#: Forms that are kept, each ready to be copied for the next request that has it.
_NUM_KEPT = 16
#: Tokens that are tried before a form is taken.
_NUM_TRIED = 4
#: What reading a form may take. The slowest that users write take a quarter of a second.
_MAX_SECONDS = 5.0
_MAX_BYTES = 512 << 20
_PROGRAM = (
    "import sys; sys.path.extend(sys.argv[3:]); "
    "from hypocenter.engine.grammar_worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_MAX_REASON_CHARS = 200
#: Part of what was known of a mask's time that is left by one that took less.
_DECAY = 0.9
_UNSPELLED = "the vocabulary has no tokens for the text that must come next"
#: Of messages: how a place is written, and lines that hold the source, a caret or nothing.
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_SHOWN = re.compile(r"\s*(\d+ \|.*|\^+|<non-verbose/>)?\s*")


@dataclass(slots=True)
class MaskCost:
    """Seconds that the next mask of a form may take: of its last ones the longest, more or less."""

    seconds: float = 0.0

    def note(self, seconds: float) -> None:
        self.seconds = max(seconds, self.seconds * _DECAY)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A form at the beginning of an answer, never to be moved, and what its masks take."""

    matcher: LLMatcher
    cost: MaskCost


class Grammars:
    """Makes the matchers of one model's requests. Safe from several threads.

    `vocab_size` is the number of logits, which may exceed that of the tokenizer's tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._library_tokenizer: LLTokenizer | None = None
        self._kept = functools.lru_cache(maxsize=_NUM_KEPT)(self._begin)

    def matcher(
        self,
        params: SamplingParams,
        emitted: Sequence[int] = (),
        call_form: str | None = None,
        compiled: str = "",
    ) -> Matcher | None:
        """A matcher for a request with these parameters; None where its answer is free.

        `call_form` is the form of its calls (`conversation/call_forms.py`), where it has no other.
        It stands where it stood after the tokens `emitted`, so that a request can be resumed.
        `compiled` is what `read` made of either elsewhere; without it the form is read here.
        Raises UsageError for a form that cannot be read, and for one that no text has.
        """
        constraint = params.constraint
        if constraint is None and call_form is not None:
            constraint = CALLS, self.with_marks(call_form)
        elif constraint is None and compiled:
            constraint = CALLS, ""  # read elsewhere, too
        if constraint is None:
            return None
        field, text = constraint
        num_known = min(self._tokenizer.vocab_size, self._vocab_size)
        begun = self._kept(field, text, compiled)
        matcher = Matcher(
            field,
            begun.matcher.deep_copy(),
            _first_bits(num_known, self._vocab_size),
            begun.cost,
        )
        for token_id in emitted:
            matcher.accept(token_id)
        return matcher

    def read(self, field: str, text: str) -> str:
        """The form as the library has it, tried with the vocabulary.

        For a process that has limits of its own, since nothing here has any. Raises as `matcher`.
        """
        from hypocenter.engine.grammar_worker import Unreadable, read_form

        try:
            compiled = read_form(field, text)
        except Unreadable as error:
            raise _bad_form(field, text, str(error)) from None
        self._begin(field, text, compiled)
        return compiled

    def learn_vocabulary(self) -> None:
        """Have the library know the tokens, which takes a second where there are many."""
        if self._tokenizer.end_ids:
            self._tokens()

    def _begin(self, field: str, text: str, compiled: str) -> _Begun:
        import llguidance

        from hypocenter.engine.grammar_worker import limits

        if not self._tokenizer.end_ids:
            raise UsageError(
                f"{field} is given, but the model's vocabulary names no end token, so an answer "
                "could not end where its form does; leave it out"
            )
        matcher = llguidance.LLMatcher(
            self._tokens(), compiled or _read(field, text), log_level=0, limits=limits()
        )
        if reason := self._failure_of_first_tokens(matcher.deep_copy()):
            raise _bad_form(field, text, reason)
        return _Begun(matcher, MaskCost())

    def _failure_of_first_tokens(self, matcher: LLMatcher) -> str:
        """What goes wrong within the first tokens of some answer, which reading does not find.

        A form with too many choices fails where an answer comes to them: most often at once. An
        answer that the vocabulary cannot spell further says nothing of the others, unless none can
        even begin.
        """
        has_begun = False
        for _ in range(_NUM_TRIED):
            words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
            if matcher.is_error():
                break
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            spelled = (i for i in bits.nonzero()[0].tolist() if i not in self._tokenizer.end_ids)
            token_id = next(spelled, None)
            if token_id is None or not matcher.consume_token(token_id) or matcher.is_stopped():
                break
            has_begun = True
        reason = str(matcher.get_error()) if matcher.is_error() else ""
        return "" if has_begun and _one_line(reason) == _UNSPELLED else reason

    def with_marks(self, call_form: str) -> str:
        """A form of calls, and the marks in it that are tokens which no text spells."""
        known = self._tokenizer.control_ids
        ids = {mark: known[mark] for mark in marks_of_calls() if mark in known}
        return json.dumps({"form": json.loads(call_form), "ids": ids})

    def _tokens(self) -> LLTokenizer:
        with self._lock:
            if self._library_tokenizer is None:
                import llguidance

                self._library_tokenizer = llguidance.LLTokenizer(
                    _Vocabulary(self._tokenizer),  # type: ignore[arg-type]
                    eos_token=sorted(self._tokenizer.end_ids),
                )
            return self._library_tokenizer


class Matcher:
    """Follows the answer of one request and knows what may come next. Not safe from two threads.

    `field` is what the request asked by, `known` i32 [num_words] has a bit for each token that the
    tokenizer has. `cost` is noted of all answers in the form.
    """

    def __init__(self, field: str, matcher: LLMatcher, known: Int32s, cost: MaskCost) -> None:
        self._field, self._matcher, self._known = field, matcher, known
        self.cost, self._failure = cost, ""

    def copy(self) -> Matcher:
        """Another one that stands where this one does."""
        return Matcher(self._field, self._matcher.deep_copy(), self._known, self.cost)

    @property
    def has_failed(self) -> bool:
        return bool(self._failure)

    def mask(self) -> Int32s:
        """A bit for each token that may come next: token t is bit t % 32 of word t // 32.

        End tokens are among them where the answer may end. A failure allows everything here, and
        is raised by `accept`, where it ends this request alone.
        """
        begun = time.perf_counter()
        found = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        self.cost.note(time.perf_counter() - begun)
        if self._matcher.is_error():
            self._failure = self._matcher.get_error()
            return np.full_like(self._known, -1)
        allowed = np.zeros_like(self._known)
        num_words = min(len(found), len(allowed))
        allowed[:num_words] = found[:num_words] & self._known[:num_words]
        if not allowed.any():
            self._failure = _UNSPELLED
            return np.full_like(self._known, -1)
        return allowed

    def accept(self, token_id: int) -> bool:
        """Take the token that was chosen; whether the answer is whole, and nothing may follow.

        Raises GrammarError for a token that may not come here, and for what went wrong in `mask`.
        """
        if not self._failure and not self._matcher.consume_token(token_id):
            self._failure = self._matcher.get_error()
        if self._failure:
            raise GrammarError(self._field, _one_line(self._failure))
        return bool(self._matcher.is_stopped())


class _Vocabulary:
    """A model's tokens in the form that the library asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.end_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.piece(token_id) for token_id in range(tokenizer.vocab_size)]
        # Control tokens never spell text: a grammar must name them.
        self.special_token_ids = sorted(tokenizer.guarded)

    def __call__(self, text: str) -> list[int]:
        """How the model would spell what the form leaves no choice about."""
        try:
            return self._tokenizer.encode(text, add_special=False, at_start=False)
        except TokenizerError:  # a character has no token: the mask will say that nothing is left
            return []


def _read(field: str, text: str) -> str:
    """The form as the library has it. Raises BadSetting for one that cannot be read within limits.

    A process of its own reads it: what a form takes does not follow from its size, and the library
    cannot be stopped.
    """
    limits = (str(_MAX_BYTES), str(int(_MAX_SECONDS) + 1))
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, *limits, *_import_folders()]
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    if not sys.executable:
        raise UsageError(
            f"sys.executable is empty, but reading {field} needs a Python interpreter of its own; "
            "set sys.executable in the embedding program"
        )
    try:
        done = subprocess.run(
            command,
            input=json.dumps({"field": field, "text": text}).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_MAX_SECONDS,
            process_group=0 if os.name == "posix" else None,  # Ctrl-C is for this process
        )
    except subprocess.TimeoutExpired:
        raise _bad_form(field, text, f"reading it takes more than {_MAX_SECONDS:g} s") from None
    except OSError as error:
        raise UsageError(f"{field} cannot be read: {command[0]}: {error.strerror}") from error
    if done.returncode == -signal.SIGXCPU:
        raise _bad_form(field, text, f"reading it takes more than {_MAX_SECONDS:g} s")
    if -done.returncode in FROM_OUTSIDE:
        raise UsageError(
            f"{field} was not read: the process that reads it was ended by "
            f"{signal_name(-done.returncode)}, and not by the form; ask again"
        )
    if done.returncode:
        limit = f"reading it takes more than {_MAX_BYTES >> 20} MiB of memory"
        raise _bad_form(field, text, f"{limit} (exit code {done.returncode})")
    reply = json.loads(done.stdout)
    if "reason" in reply:
        raise _bad_form(field, text, reply["reason"])
    return str(reply["compiled"])


def _import_folders() -> list[str]:
    """The folders of the packages that the process imports, wherever this one has them from."""
    found = [importlib.util.find_spec(name) for name in ("hypocenter", "llguidance", "msgspec")]
    origins = [spec.origin for spec in found if spec is not None and spec.origin is not None]
    return list(dict.fromkeys(str(Path(origin).parents[1]) for origin in origins))


def _bad_form(field: str, text: str, reason: str) -> BadSetting:
    # The text of tools is not the client's: it is made of the list that was sent.
    given = "a list of tools" if field == "tools" else reprlib.repr(text)
    return BadSetting(field, Words(given), _one_line(reason))


def _one_line(reason: str) -> str:
    """What the library says, without the lines that only show where."""
    lines = [line for line in reason.splitlines() if not _SHOWN.fullmatch(line)]
    line = _PLACE.sub(r"line \1, column \2: ", " ".join(" ".join(lines).split()))
    if line == "NoExtensionBias":
        return _UNSPELLED
    return line if len(line) <= _MAX_REASON_CHARS else f"{line[: _MAX_REASON_CHARS - 3]}..."


@functools.lru_cache(maxsize=4)
def _first_bits(num_bits: int, vocab_size: int) -> Int32s:
    """Words with a bit for each token of the vocabulary, of which the first `num_bits` are set."""
    return mask_of(np.arange(vocab_size) < num_bits)
