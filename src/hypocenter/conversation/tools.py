"""Tools that a conversation offers to a model: OpenAI's definitions of functions, checked.

https://platform.openai.com/docs/api-reference/chat/create describes them. What holds calls to
`parameters` is in `call_forms.py`.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hypocenter.base.errors import UsageError

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 20
#: Of a function, as Anthropic and OpenAI's responses have it.
NAME = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)

#: Of what a model calls, which may be a tool of its own; and how many calls an answer may have.
CALLED_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
MAX_CALLS = 128

Tools = Sequence[Mapping[str, Any]]
#: What is read of a tool, and of its function; transformers documents `return` for templates.
#: `strict` is for whoever holds calls to a form, and no template is told of it.
FIELDS, FUNCTION_FIELDS = ("type", "function"), ("name", "description", "parameters", "return")
STRICT = "strict"


def check_tools(tools: Tools | None) -> list[dict[str, Any]] | None:
    """Plain copies of the tools, None where there are none.

    Fields that nobody reads are left out (`message_fields.py` names them). Raises UsageError that
    names the first wrong field.
    """
    if tools is None or (isinstance(tools, Sequence) and len(tools) == 0):
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise UsageError(f"tools is {reprlib.repr(tools)}, but must be a list of functions")
    if len(tools) > MAX_TOOLS:
        raise UsageError(f"tools has {len(tools)} functions, but may have {MAX_TOOLS}")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = _name_of(tool, f"tools[{index}]")
        if name in names:
            raise UsageError(f"tools has two functions {name!r}; give each a name of its own")
        names.add(name)
    try:
        known = [_known_fields(tool) for tool in tools]
        text = json.dumps(known, ensure_ascii=False, allow_nan=False)
        msgspec.msgpack.encode(known)  # as they go to other processes
        num_bytes = len(text.encode())
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise UsageError(f"tools cannot be given to a template: {error}") from None
    if num_bytes > MAX_TOOLS_BYTES:
        raise UsageError(f"tools have {num_bytes} bytes, but may have {MAX_TOOLS_BYTES}")
    copies: list[dict[str, Any]] = json.loads(text)
    return copies


def without_strict(tools: Tools) -> list[dict[str, Any]]:
    """Checked tools as a template is told of them."""
    return [
        {
            **tool,
            "function": {name: v for name, v in tool["function"].items() if name != STRICT},
        }
        for tool in tools
    ]


def _known_fields(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of which the name was checked, without what nobody reads."""
    function = tool["function"]
    known = {name: function[name] for name in (*FUNCTION_FIELDS, STRICT) if name in function}
    if known.get(STRICT, False) is None:
        del known[STRICT]
    return {**{name: tool[name] for name in FIELDS if name in tool}, "function": known}


def _name_of(tool: object, where: str) -> str:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise UsageError(f'{where} is {reprlib.repr(tool)}, but must have the type "function"')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise UsageError(f"{where}.function is {reprlib.repr(function)}, but must be a mapping")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UsageError(
            f"{where}.function.name is {reprlib.repr(name)}, but must be up to 128 letters, "
            "digits, '_' and '-'"
        )
    for field, kind, said in (
        ("description", str, "a text"),
        ("parameters", Mapping, "a JSON schema"),
        (STRICT, bool, "true or false"),
    ):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise UsageError(
                f"{where}.function.{field} is {reprlib.repr(value)}, but must be {said}"
            )
    return name
