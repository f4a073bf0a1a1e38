"""The program of the process that reads a form: a small text may ask for hours or gigabytes.

`grammar.py` starts it with a form on standard input and takes what it says on standard output;
nobody else imports it. It has limits, and its own process can be ended, which a thread cannot.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import llguidance
import msgspec

from hypocenter.conversation.call_forms import CallForm
from hypocenter.conversation.call_grammar import grammar_of
from hypocenter.engine.schema import endless_place, place_of

_TextForm = Literal["grammar", "regex", "choice"]
#: Fields whose form is a text; the library calls them the same.
_TEXT_FORMS: dict[str, _TextForm] = {"grammar": "grammar", "regex": "regex", "choice": "choice"}

#: A state takes one or two kB, and each request keeps its own.
_MAX_LEXER_STATES = 50_000
#: Between the tokens of JSON, as llama.cpp has it: without a bound a model may write blanks alone.
_WHITESPACE = r"\x20|\x0A{1,2}[\x20\x09]{0,20}"


class Unreadable(Exception):
    """A form that the library refuses, or that no text has."""


def limits() -> llguidance.LLParserLimits:
    """What a matcher may take, here and in the engine."""
    return llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)


def main(memory_bytes: int, cpu_seconds: int) -> None:
    """Read {"field", "text"}, and write {"compiled"} or {"reason"}."""
    asked = json.load(sys.stdin)
    bound_memory(memory_bytes)
    _bound_time(cpu_seconds)
    try:
        reply = {"compiled": read_form(asked["field"], asked["text"])}
    except Unreadable as error:
        reply = {"reason": str(error)}
    json.dump(reply, sys.stdout)


def read_form(field: str, text: str) -> str:
    """The form as the library has it, once a matcher over bytes could begin with it.

    Raises Unreadable.
    """
    if field == "tools":
        return _read_calls(text)
    if field in _TEXT_FORMS:
        compiled = _read_text(_TEXT_FORMS[field], text)
        if reason := _refusal_of(compiled):
            raise Unreadable(reason)
    else:
        compiled = _read_schema(json.loads(text))
    _begin(compiled)
    return compiled


def _read_schema(schema: dict[str, Any]) -> str:
    """Raises Unreadable, which names the part of the schema."""
    compiled = _compile_schema(schema)
    if reason := _refusal_of(compiled):
        place = place_of(schema, lambda part: _refusal_of(_compile_schema(part)) == reason)
        raise Unreadable(reason if place == "#" else f"{place}: {reason}")
    if place := endless_place(schema):
        raise Unreadable(f"{place}: no text is valid, since each holds another of it")
    return compiled


def _read_calls(text: str) -> str:
    """A grammar for calls; an argument's schema that cannot be read is any object, or an error.

    Raises Unreadable.
    """
    asked = json.loads(text)
    form = msgspec.convert(asked["form"], CallForm)
    schemas = []
    for tool in form.tools:
        schema: dict[str, Any] = tool.schema
        try:
            if reason := _begin(_read_schema(schema)):
                raise Unreadable(reason)
        except Unreadable as error:
            if tool.strict:
                raise Unreadable(f"the parameters of {tool.name}: {error}") from None
            schema = {"type": "object"}
        held = {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
        schemas.append(json.dumps(held))
    _begin(grammar_of(form, schemas, {}))
    compiled = grammar_of(form, schemas, asked["ids"])
    if reason := _refusal_of(compiled):
        raise Unreadable(reason)
    return compiled


def _begin(compiled: str) -> str:
    """Take the first step over bytes, which may take long; what the library says against it.

    It also says something against tokens that a grammar names, for there are none here.
    """
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), compiled, log_level=0, limits=limits()
    )
    matcher.compute_bitmask()
    return str(matcher.get_error()) if matcher.is_error() else ""


def _read_text(form: _TextForm, text: str) -> str:
    try:
        return llguidance.grammar_from(form, text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(str(error)) from None


def _compile_schema(schema: object) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults={"whitespace_pattern": _WHITESPACE}
    )


def _refusal_of(compiled: str) -> str:
    """What the library says against a form; empty where that is nothing."""
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        compiled, limits=limits()
    )
    return messages[0] if is_error else ""


def bound_memory(memory_bytes: int) -> None:
    """Bound what this process may take on top of today's. Only Linux has such a limit."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used_bytes + memory_bytes
    lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (lowest, lowest))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _bound_time(cpu_seconds: int) -> None:
    """Bounds its own time, for the case that nobody waits for it and ends it."""
    if sys.platform != "linux":
        return
    import resource

    # At the second limit the kernel sends SIGKILL, as somebody from outside would.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
