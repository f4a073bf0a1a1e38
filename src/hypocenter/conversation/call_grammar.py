"""The grammar of an answer that calls tools, from what `call_forms.py` says of it.

Text is free up to the mark that begins a call; from there on the call is held to its tool's schema.
A mark that is a token of its own is named by its id (llguidance: a text never spells such a token).
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md describes the dialect of Lark.
Knows nothing of a vocabulary; reads no schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypocenter.conversation import harmony
from hypocenter.conversation.call_formats import is_text
from hypocenter.conversation.call_forms import CallForm
from hypocenter.conversation.call_shapes import HARMONY, SHAPES, Parameters

_ANY = "(?s:.*)"
#: Of white space between a thought and what follows it.
_BLANKS = "BLANKS: /[ \\n]{1,8}/"

#: What parts of a schema refer to, and how it is written.
_SHARED = ("$defs", "definitions", "x-guidance")
_NUMBER = "{number}"


def grammar_of(form: CallForm, schemas: Sequence[str], ids: Mapping[str, int]) -> str:
    """Lark for the form, its tools' arguments held to `schemas`, one for each as JSON text.

    `ids` are of the marks that are tokens of their own.
    """
    grammar = _Grammar(ids)
    if form.shape == HARMONY:
        _write_channels(grammar, form)
        for number, schema in enumerate(schemas):
            grammar.add(f"arguments_{number}: %json {schema}")
    else:
        _write_calls(grammar, form, schemas)
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

    def words(self, text: str, name: str = "") -> str:
        """A text that stands as it is, with the marks in it and `{name}` filled in."""
        said = []
        for number, part in enumerate(text.split(_NUMBER)):
            if number:
                said.append("/[0-9]{1,3}/")
            said += self._split_at_marks(part.replace("{name}", name))
        return " ".join(said) or '""'

    def _split_at_marks(self, text: str) -> Iterator[str]:
        while text:
            found = [(at, -len(mark), mark) for mark in self._ids if (at := text.find(mark)) >= 0]
            at, _, mark = min(found, default=(len(text), 0, ""))
            if at:
                yield json.dumps(text[:at])
            if mark:
                yield self.mark(mark)
            text = text[at + len(mark) :]

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


def _write_calls(grammar: _Grammar, form: CallForm, schemas: Sequence[str]) -> None:
    shape = SHAPES[form.shape]
    begin = shape.form.begin
    thought = _write_thought(grammar, form)
    for number, (tool, schema) in enumerate(zip(form.tools, schemas, strict=True)):
        held = f"arguments_{number}"
        if shape.parameters is None:
            grammar.add(f"{held}: %json {schema}")
        else:
            _write_parameters(grammar, shape.parameters, held, json.loads(schema))
        head = grammar.words(shape.head, tool.name)
        grammar.add(f"tool_{number}: {head} {held} {grammar.words(shape.tail)}")
    grammar.add(f"call: {_choice(form)}")
    again = "" if form.is_one_call else f" ({grammar.words(shape.between)} call)*"
    calls = f"{grammar.words(shape.opening)} call{again} {grammar.words(shape.closing)}"
    if form.must_call:
        grammar.add(f"start: {thought} {grammar.words(begin)} {calls}")
        return
    # Words with which a thought would begin are no part of the answer.
    not_first = form.thought[0] if form.thought and not form.begins_in_thought else ""
    not_first = "" if grammar.is_token(not_first) else not_first
    if not begin:  # the whole answer is a call, or none of it
        grammar.add(f"FREE: /[^{{<\\s](?s:.*)/{_unless(not_first)}")
        grammar.add(f"start: {thought} ({calls} | FREE)?")
        return
    grammar.add_until("before_call", begin, not_first)
    if shape.form.end:
        grammar.add_rest("REST", begin, not_first)
        times, rest = "?" if form.is_one_call else "*", " REST?"
        grammar.add(f"start: {thought} (before_call {calls}){times}{rest}")
    else:
        grammar.add_rest("REST", begin, not_first)
        grammar.add(f"start: {thought} (before_call {calls} | REST)?")


def _write_parameters(
    grammar: _Grammar, how: Parameters, rule: str, schema: Mapping[str, Any]
) -> None:
    """Arguments one by one in the order of the schema; those that need not be there may lack."""
    properties = schema.get("properties")
    needed = schema.get("required") or []
    if not isinstance(properties, Mapping):
        properties, needed = {}, []
        if schema.get("additionalProperties") is not False:
            _write_any(grammar, how, rule)
            return
    names = [name for name, value in properties.items() if value is not False]
    for number, name in enumerate(names):
        value = f"{rule}_{number}"
        _write_value(grammar, how, value, properties[name], schema)
        key = grammar.words(how.key, name)
        grammar.add(f"{value}: {key} {value}_held {grammar.words(how.behind)}")
    # `first` where nothing stands before, `next` where something does.
    between = grammar.words(how.between)
    for number, name in enumerate(names):
        value, follows = f"{rule}_{number}", f"{rule}_next_{number + 1}"
        first, skipped = f"{rule}_first_{number}", f"{rule}_first_{number + 1}"
        is_needed = name in needed
        grammar.add(f"{first}: {value} {follows}" + ("" if is_needed else f" | {skipped}"))
        following = f"{rule}_next_{number}: {between} {value} {follows}"
        grammar.add(following + ("" if is_needed else f" | {follows}"))
    for kind in ("first", "next"):
        grammar.add(f'{rule}_{kind}_{len(names)}: ""')
    grammar.add(f"{rule}: {rule}_first_0")


def _write_value(
    grammar: _Grammar, how: Parameters, value: str, given: Any, schema: Mapping[str, Any]
) -> None:
    """The rule `VALUE_held`: a value and its end."""
    end = grammar.words(how.end)
    before_end = grammar.words(how.before_end)
    choices = given.get("enum") if isinstance(given, Mapping) else None
    if how.quoted or not is_text(given):
        grammar.add(f"{value}_json: %json {_with_definitions(given, schema)}")
        grammar.add(f"{value}_held: {value}_json {before_end} {end}")
    elif choices:
        said = " | ".join(grammar.words(f"{how.quote}{text}{how.quote}") for text in choices)
        grammar.add(f"{value}_held: ({said}) {before_end} {end}")
    else:
        quote = grammar.words(how.quote)
        grammar.add_until(f"{value}_text", how.quote or how.end)
        grammar.add(f"{value}_held: {quote} {value}_text")


def _write_any(grammar: _Grammar, how: Parameters, rule: str) -> None:
    """Any arguments, of a tool that is held to none."""
    before, _, after = how.key.partition("{name}")
    grammar.add(f"{rule.upper()}_KEY: /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/")
    _write_value(grammar, how, f"{rule}_any", {} if how.between else {"type": "string"}, {})
    key = f"{grammar.words(before)} {rule.upper()}_KEY {grammar.words(after)}"
    grammar.add(f"{rule}_one: {key} {rule}_any_held {grammar.words(how.behind)}")
    between = grammar.words(how.between)
    grammar.add(f"{rule}: ({rule}_one ({between} {rule}_one)*)?")


def _with_definitions(given: Any, schema: Mapping[str, Any]) -> str:
    """The schema of a part, with what the whole defines."""
    if not isinstance(given, Mapping):
        return json.dumps(given)
    shared = {name: schema[name] for name in _SHARED if name in schema}
    return json.dumps({**given, **shared})


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
