"""The grammar of an answer that calls tools, from what `call_forms.py` says of it.

Text is free up to the mark that begins a call; from there on the call is held to its tool's schema.
A mark that is a token of its own is named by its id (llguidance: a text never spells such a token).
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md describes the dialect of Lark.
Knows nothing of a vocabulary; reads no schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from hypocenter.conversation import calls_in_tags, harmony
from hypocenter.conversation.call_forms import CallForm

_ANY = "(?s:.*)"
#: Of white space between a thought and what follows it.
_BLANKS = "BLANKS: /[ \\n]{1,8}/"


def grammar_of(form: CallForm, schemas: Sequence[str], ids: Mapping[str, int]) -> str:
    """Lark for the form, its tools' arguments held to `schemas`, one for each as JSON text.

    `ids` are of the marks that are tokens of their own.
    """
    grammar = _Grammar(ids)
    if form.is_harmony:
        _write_channels(grammar, form)
    else:
        _write_tags(grammar, form)
    for number, schema in enumerate(schemas):
        grammar.add(f"arguments_{number}: %json {schema}")
    return grammar.text()


class _Grammar:
    """Rules, and marks as these name them."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._lines = ["%llguidance {}"]

    def add(self, line: str) -> None:
        self._lines.append(line)

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def is_token(self, mark: str) -> bool:
        return mark in self._ids

    def mark(self, mark: str) -> str:
        return f"<[{self._ids[mark]}]>" if mark in self._ids else json.dumps(mark)

    def add_until(self, rule: str, mark: str, not_first: str = "") -> None:
        """A rule for any text up to a mark, and for the mark; `not_first` does not begin it."""
        if self.is_token(mark):
            self.add(f"{rule}: {rule.upper()}? {self.mark(mark)}")
            self.add(f"{rule.upper()}: /(?s:.+)/{_unless(not_first)}")
        else:
            self.add(f"{rule}[lazy]: {rule.upper()}")
            self.add(f"{rule.upper()}: /{_ANY}{_pattern(mark)}/{_unless(not_first)}")

    def add_rest(self, token: str, mark: str, not_first: str = "") -> None:
        """A terminal for any text without the mark, and for at least one character."""
        without = "" if self.is_token(mark) else f" & ~/{_ANY}{_pattern(mark)}{_ANY}/"
        self.add(f"{token}: /(?s:.+)/{without}{_unless(not_first)}")


def _write_tags(grammar: _Grammar, form: CallForm) -> None:
    begin, end = calls_in_tags.BEGIN, calls_in_tags.END
    thought = _write_thought(grammar, form)
    called = f'"\\n" call "\\n" {grammar.mark(end)}'
    grammar.add(f"call: {_choice(form)}")
    for number, tool in enumerate(form.tools):
        head = f'{{"name": {json.dumps(tool.name)}, "arguments": '
        grammar.add(f'tool_{number}: {json.dumps(head)} arguments_{number} "}}"')
    if form.must_call:
        once = f"{grammar.mark(begin)} {called}"
        more = "" if form.is_one_call else f' ("\\n" {once})*'
        grammar.add(f"start: {thought} {once}{more}")
        return
    # Words with which a thought would begin are no part of the answer.
    not_first = form.thought[0] if form.thought and not form.begins_in_thought else ""
    not_first = "" if grammar.is_token(not_first) else not_first
    grammar.add_until("before_call", begin, not_first)
    grammar.add_rest("REST", begin, not_first)
    grammar.add(f"start: {thought} (before_call {called}){'?' if form.is_one_call else '*'} REST?")


def _write_thought(grammar: _Grammar, form: CallForm) -> str:
    """What stands before the answer: the rest of a thought that has begun, or a whole one."""
    if not form.thought:
        return ""
    begin, end = form.thought
    grammar.add(_BLANKS)
    if form.begins_in_thought:
        grammar.add_until("thought", end)
        return "thought BLANKS?"
    if grammar.is_token(begin):
        grammar.add_until("thought", end)
        return f"({grammar.mark(begin)} thought BLANKS?)?"
    if grammar.is_token(end):
        grammar.add(f"THOUGHT: /\\s*{_pattern(begin)}{_ANY}/")
        return f"(THOUGHT {grammar.mark(end)} BLANKS?)?"
    grammar.add("thought[lazy]: THOUGHT")
    grammar.add(f"THOUGHT: /\\s*{_pattern(begin)}{_ANY}{_pattern(end)}/")
    return "(thought BLANKS?)?"


def _write_channels(grammar: _Grammar, form: CallForm) -> None:
    """The prompt ends with `<|start|>assistant`; a call is the last message of its answer."""
    channel, message = grammar.mark(harmony.CHANNEL), grammar.mark(harmony.MESSAGE)
    again = f'{grammar.mark(harmony.START)} "assistant"'
    grammar.add_until("said", harmony.END)
    beside = '"analysis"' if form.must_call else '("analysis" | "commentary")'
    grammar.add(f"beside: {channel} {beside} {message} said {again}")
    to = json.dumps(f"commentary to={harmony.PREFIX}")
    grammar.add(f"call: {channel} {to} ({_choice(form)})")
    for number, tool in enumerate(form.tools):
        head = f'{json.dumps(f"{tool.name} ")} {grammar.mark(harmony.CONSTRAIN)} "json" {message}'
        grammar.add(f"tool_{number}: {head} arguments_{number}")
    if form.must_call:
        grammar.add("start: beside* call")
        return
    grammar.add_rest("ANSWER", harmony.END)
    grammar.add(f'final: {channel} "final" {message} ANSWER?')
    grammar.add("start: beside* (call | final)")


def _choice(form: CallForm) -> str:
    return " | ".join(f"tool_{number}" for number in range(len(form.tools)))


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _unless(begun: str) -> str:
    return f" & ~/\\s*{_pattern(begun)}{_ANY}/" if begun else ""
