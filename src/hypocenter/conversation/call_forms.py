"""When an answer's calls of tools are held to a form, and which: what to call, and with what.

A call is held to its tool's schema where a client asks for one (`tool_choice`), where its tool is
`strict`, and where only some of the tools may be called. Nothing here is a grammar: that is made of
a `CallForm` by `call_grammar.py`.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec

from hypocenter.base.errors import UsageError
from hypocenter.conversation.call_shapes import shape_of
from hypocenter.conversation.thoughts import FORMATS_READ, marks_of, reads_calls_of
from hypocenter.conversation.tools import Tools, check_tools

#: Of the schemas of one request together.
MAX_SCHEMA_BYTES = 256 << 10
#: As a request names what it may ask.
_CHOICES = "'auto', 'none', 'required', a function's name or allowed_tools"
_MODES = ("auto", "required")


class CallRules(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `tool_choice` says, once it is read.

    `must_call`: the answer is a call. `names`: only these may be called; None: all that are
    offered. `is_one_call`: one at most.
    """

    must_call: bool = False
    names: tuple[str, ...] | None = None
    is_one_call: bool = False


#: What `tool_choice` "auto" says.
FREE = CallRules()


class FormOfTool(msgspec.Struct, frozen=True):
    """A tool, its arguments' schema, and whether one that cannot be read is an error."""

    name: str
    schema: dict[str, Any]
    strict: bool


class CallForm(msgspec.Struct, frozen=True):
    """The form of an answer that calls tools, as a worker's grammar is made of it.

    `shape` names how calls are written (`call_shapes.py`), or is "harmony".
    `thought`: the marks of a thought that may stand before the answer; empty: there are none.
    """

    tools: tuple[FormOfTool, ...]
    must_call: bool
    is_one_call: bool
    shape: str
    thought: tuple[str, ...]
    begins_in_thought: bool


def read_choice(choice: object, tools: Tools | None, *, one_call: bool = False) -> CallRules:
    """OpenAI's `tool_choice`, which may not be "none". Raises UsageError for another."""
    if choice in (None, "auto"):
        return CallRules(is_one_call=one_call)
    offered = [str(tool["function"]["name"]) for tool in tools or ()]
    if not offered:
        raise UsageError(f"tool_choice is {reprlib.repr(choice)}, but there are no tools")
    if choice == "required":
        return CallRules(True, None, one_call)
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind == "function":
            return CallRules(True, (_name_of(choice, offered),), True)
        allowed = choice.get("allowed_tools")
        if kind == "allowed_tools" and isinstance(allowed, Mapping):
            mode, given = allowed.get("mode"), allowed.get("tools")
            if mode in _MODES and isinstance(given, list) and given:
                names = tuple(dict.fromkeys(_name_of(tool, offered) for tool in given))
                return CallRules(mode == "required", names, one_call)
            raise UsageError(
                "tool_choice.allowed_tools must have a mode, 'auto' or 'required', and tools, each "
                "with the name of a function"
            )
    raise UsageError(f"tool_choice is {reprlib.repr(choice)}, but must be {_CHOICES}")


def _name_of(tool: object, offered: list[str]) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in offered:
        raise UsageError(
            f"tool_choice names {reprlib.repr(name)}, but the tools are {', '.join(offered)[:200]}"
        )
    return name


def call_form(
    chat_template: str, tools: Tools | None, rules: CallRules, *, begins_in_thought: bool
) -> str | None:
    """The form that calls are held to, as JSON; None: whatever is called is free.

    Raises UsageError for schemas that are too long together, and for calls that are not read.
    """
    offered = check_tools(tools) or []
    if not offered or not needs_form(offered, rules):
        return None
    if not reads_calls_of(chat_template):
        raise UsageError(f"tools must be left out: {FORMATS_READ}")
    named = [tool["function"] for tool in offered]
    forms = tuple(
        FormOfTool(function["name"], _schema_of(function, rules), bool(function.get("strict")))
        for function in named
        if rules.names is None or function["name"] in rules.names
    )
    if (num_bytes := sum(len(json.dumps(form.schema)) for form in forms)) > MAX_SCHEMA_BYTES:
        raise UsageError(
            f"the schemas of tools have {num_bytes} bytes, but calls are held to at most "
            f"{MAX_SCHEMA_BYTES}; offer fewer tools, or name fewer in tool_choice"
        )
    whole = CallForm(
        forms,
        rules.must_call,
        rules.is_one_call,
        shape_of(chat_template),
        marks_of(chat_template),
        begins_in_thought,
    )
    return msgspec.json.encode(whole).decode()


def needs_form(tools: Tools, rules: CallRules) -> bool:
    """Whether calls of these tools are held to anything."""
    is_strict = any(tool["function"].get("strict") for tool in tools)
    return rules.must_call or rules.names is not None or is_strict


def _schema_of(function: Mapping[str, Any], rules: CallRules) -> dict[str, Any]:
    """The schema of a tool's arguments; of one that is not strict and need not be called, any."""
    given = function.get("parameters")
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not (rules.must_call or function.get("strict")):
        return {"type": "object"}
    return {"type": "object", **given}
