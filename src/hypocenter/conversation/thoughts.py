"""Separates what a model thinks, and its calls of tools, from its answer.

Which marks a model writes is read from its chat template. gpt-oss has a format of its own
(`harmony.py`); others put a thought between two marks before the answer. The prompt may end with
the first of these, and the answer then begins within the thought.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from hypocenter.base.errors import BadSetting, UsageError
from hypocenter.conversation import harmony
from hypocenter.conversation.call_formats import (
    FORMATS,
    NO_TYPES,
    TextParameters,
    format_of,
)
from hypocenter.conversation.calls_in_tags import CallsInTags
from hypocenter.conversation.harmony import AnswerDelta
from hypocenter.conversation.marks import num_begun

#: So much of a prompt's end tells whether it begins a thought.
PROMPT_END_CHARS = 64


class _Marks(NamedTuple):
    begin: str
    end: str


#: Of Qwen, DeepSeek, GLM and most others; Seed-OSS; Magistral; Gemma 4.
_MARKS = (
    _Marks("<think>", "</think>"),
    _Marks("<seed:think>", "</seed:think>"),
    _Marks("[THINK]", "[/THINK]"),
    _Marks("<|channel>thought", "<channel|>"),
)
#: Variables by which templates switch thinking on and off, and by which they set how long it takes.
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_TEXT = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
#: Code in braces, in which a text may have braces; a comment, without group 1.
_CODE = re.compile(r"\{#.*?#\}|\{([{%])((?:" + _TEXT + r"|.)*?)[%}]\}", re.DOTALL)
_TEXT_IN_CODE = re.compile(_TEXT, re.DOTALL)
#: No attribute, and not the name of an argument.
_NAME = re.compile(r"(?<![.\w])[A-Za-z_]\w*(?!\w|\s*=(?!=))", re.ASCII)
MAX_VARIABLE_BYTES = 64 << 10
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}", re.ASCII)
#: Variables that are set here.
_OURS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
)
#: `on` and `off` switch, the others also say how much.
REASONING = ("auto", "on", "off", "minimal", "low", "medium", "high", "xhigh")
#: OpenAI's words, of which "none" is `off`.
EFFORTS = ("none", *REASONING[3:])


#: Why tools are refused.
FORMATS_READ = (
    "calls of this model are not read; read are those of gpt-oss, Hermes, Qwen, GLM, Llama 3, "
    "Mistral, DeepSeek, Kimi K2, MiniMax, Gemma 4, Granite and LFM2, as their templates mark them"
)


class AnswerReader(Protocol):
    """Separates thoughts from the answer, of one answer that comes in pieces."""

    def push(self, text: str, /) -> AnswerDelta:
        """What `text` adds to each; what may be a part of a mark is held back."""
        ...

    def flush(self, *, is_cut: bool = False) -> AnswerDelta:
        """What is held back; no more text will follow. `is_cut`: the answer was not at its end."""
        ...


def make_answer_reader(
    chat_template: str,
    prompt_end: str,
    *,
    is_constrained: bool = False,
    offers_tools: bool = False,
    in_thought: bool | None = None,
    types: TextParameters = NO_TYPES,
    must_call: bool = False,
) -> AnswerReader | None:
    """The reader of an answer to a prompt that ends so; None: the model has no marks.

    `in_thought` says whether the answer begins within a thought, where the prompt's end does not.
    An answer that is held to a form, as JSON is, begins with no thought though its prompt does.
    Calls are looked for where the conversation `offers_tools`; `types` are those of the tools. An
    answer that `must_call` is held to a form in which nothing but thoughts and calls stands.
    """
    if harmony.answers_in_channels(chat_template):
        return harmony.Channels(reads_calls=offers_tools)
    found = None
    if marks := marks_of(chat_template):
        begins = opens_thought(chat_template, prompt_end) if in_thought is None else in_thought
        found = Thoughts(*marks, begins_within=begins and not is_constrained)
    form = format_of(chat_template) if offers_tools else None
    if form is None:
        return found
    calls = CallsInTags(form, types, must_call=must_call)
    return calls if found is None else _CallsBehind(found, calls)


def marks_of(chat_template: str) -> tuple[str, ...]:
    """The two marks around a thought of this model; empty where there are none, or channels."""
    if harmony.answers_in_channels(chat_template):
        return ()
    return next((marks for marks in _MARKS if marks.end in chat_template), ())


def opens_thought(chat_template: str, prompt_end: str) -> bool:
    """Whether an answer to a prompt that ends so begins within a thought."""
    marks = marks_of(chat_template)
    return bool(marks) and prompt_end.rstrip().endswith(marks[0])


def has_thoughts(chat_template: str) -> bool:
    """Whether a model with this template marks what it thinks."""
    return harmony.answers_in_channels(chat_template) or bool(marks_of(chat_template))


def reads_calls_of(chat_template: str) -> bool:
    """Whether calls of tools are found in answers of a model with this template."""
    return harmony.answers_in_channels(chat_template) or format_of(chat_template) is not None


class _CallsBehind:
    """Calls in what `thoughts` leaves of an answer."""

    def __init__(self, thoughts: Thoughts, calls: CallsInTags) -> None:
        self._thoughts, self._calls = thoughts, calls

    def push(self, text: str) -> AnswerDelta:
        return self._of_answer(self._thoughts.push(text))

    def flush(self, *, is_cut: bool = False) -> AnswerDelta:
        left = self._of_answer(self._thoughts.flush(is_cut=is_cut))
        if is_cut and self._calls.must_call:
            left = AnswerDelta("", left.reasoning, left.calls)
        return left + self._calls.flush(is_cut=is_cut)

    def _of_answer(self, spoken: AnswerDelta) -> AnswerDelta:
        return AnswerDelta("", spoken.reasoning) + self._calls.push(spoken.content)


def marks_of_thoughts() -> list[str]:
    """The texts that an answer must show for its thoughts and calls to be found."""
    calls = [mark for form in FORMATS for mark in form.marks]
    return list(dict.fromkeys([*calls, *(mark for marks in _MARKS for mark in marks)]))


def marks_of_calls() -> list[str]:
    """All texts that stand around a call or a thought, and may be tokens of their own."""
    return [*marks_of_thoughts(), *harmony.MARKS, harmony.CONSTRAIN]


def split(answer: str, using: AnswerReader, *, is_cut: bool = False) -> AnswerDelta:
    """A whole answer, or one that `is_cut`; `using` is one that was not used before."""
    return using.push(answer) + using.flush(is_cut=is_cut)


class Thoughts:
    """Thoughts between two marks, at the beginning of an answer and nowhere else.

    Blanks around a thought belong to neither.
    """

    def __init__(self, begin: str, end: str, *, begins_within: bool = False) -> None:
        self._begin, self._end = begin, end
        self._held = ""
        self._is_within = begins_within
        self._has_thought = begins_within
        #: No mark can come any more.
        self._answers = False
        self._has_words = False  # of the thought

    def push(self, text: str) -> AnswerDelta:
        self._held += text
        content = reasoning = ""
        while self._held and not self._answers:
            if self._is_within:
                more, is_over = self._take_thought()
                reasoning += more
                if not is_over:
                    return AnswerDelta(content, reasoning)
            elif not self._take_beginning():
                return AnswerDelta(content, reasoning)
        content, self._held = content + self._held, ""
        return AnswerDelta(content, reasoning)

    def flush(self, *, is_cut: bool = False) -> AnswerDelta:
        held, self._held = self._held, ""
        if self._is_within:
            return AnswerDelta("", held.rstrip() if self._has_words else held.strip())
        return AnswerDelta("" if self._has_thought and not held.strip() else held, "")

    def _take_beginning(self) -> bool:
        """Take a mark off what is held, or find that none comes; False: that is not known yet."""
        text = self._held.lstrip()
        if text.startswith(self._begin):
            self._held = text[len(self._begin) :]
            self._is_within = self._has_thought = True
            self._has_words = False
            return True
        if self._begin.startswith(text):
            return False
        self._answers = True
        if self._has_thought:
            self._held = text
        return True

    def _take_thought(self) -> tuple[str, bool]:
        """What of the thought is held and surely a part of it, and whether it is over."""
        if not self._has_words:
            self._held = self._held.lstrip()
            self._has_words = bool(self._held)
        thought, mark, rest = self._held.partition(self._end)
        if mark:
            self._held, self._is_within = rest, False
            return thought.rstrip(), True
        num = len(self._held) - num_begun(self._held, self._end)
        num = len(self._held[:num].rstrip())
        taken, self._held = self._held[:num], self._held[num:]
        return taken, False


def variables(chat_template: str, reasoning: str) -> dict[str, Any]:
    """The variables by which this template is told to think so; `reasoning` is of `REASONING`.

    Raises BadSetting for a template that has no such switch.
    """
    if reasoning not in REASONING:
        raise BadSetting("reasoning", reasoning, f"must be one of {', '.join(REASONING)}")
    if reasoning == "auto":
        return {}
    known = names(chat_template)
    switches: dict[str, Any] = {name: reasoning != "off" for name in _SWITCHES if name in known}
    if _EFFORT in known and reasoning not in ("on", "off"):
        switches[_EFFORT] = reasoning
    if not switches:
        may_be = "low, medium or high, or nothing at all" if _EFFORT in known else "left out"
        limit = f"must be {may_be}: the model's chat template has no such switch"
        raise BadSetting("reasoning", reasoning, limit)
    return switches


def without_needless(chat_template: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables without those that switch thoughts off where a model has none."""
    if has_thoughts(chat_template):
        return dict(variables)
    known = names(chat_template)
    return {
        name: value
        for name, value in variables.items()
        if not (name in _SWITCHES and value is False and name not in known)
    }


def names(chat_template: str) -> set[str]:
    """The names in the code of a template: its variables, and others that do no harm here."""
    code = " ".join(found[2] for found in _CODE.finditer(chat_template) if found[1])
    return set(_NAME.findall(_TEXT_IN_CODE.sub("''", code)))


def require_variables(variables: object) -> None:
    """Raises UsageError for what cannot be variables of a template, whichever it is."""
    field = "chat_template_kwargs"
    if not isinstance(variables, Mapping):
        raise UsageError(f"{field} is {reprlib.repr(variables)}, but must be a mapping")
    for name in variables:
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name) or name in _OURS:
            raise UsageError(
                f"{field} has {reprlib.repr(name)}, but must have names of up to 64 letters, "
                f"digits and '_' that are not {', '.join(sorted(_OURS))}"
            )
    try:
        num_bytes = len(json.dumps(variables, ensure_ascii=False).encode())
        msgspec.msgpack.encode(variables)  # as it goes to other processes
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise UsageError(f"{field} cannot be given to a template: {error}") from None
    if num_bytes > MAX_VARIABLE_BYTES:
        raise UsageError(f"{field} has {num_bytes} bytes, but may have {MAX_VARIABLE_BYTES}")
