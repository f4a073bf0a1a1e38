"""The body of OpenAI's `/v1/responses`, and the chat that it asks for.

https://platform.openai.com/docs/api-reference/responses/create describes it. Each setting of a
request (`top_k`, `stop`, `grammar` and so on) may stand beside OpenAI's fields.
"""

from __future__ import annotations

import base64
import binascii
import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from hypocenter.conversation.cut_json import read_cut_string
from hypocenter.conversation.message_fields import CALLS, THOUGHT
from hypocenter.server.api_error import ApiError
from hypocenter.server.dialects.turns import (
    Noted,
    TurnList,
    as_json,
    mapping_of,
    refuse,
    text_of,
)
from hypocenter.server.fields import ChatBody, JsonSchema, ResponseFormat, SharedBody

_ROLES = ("user", "assistant", "system", "developer")
#: By kind: the fields of an item that are read. Others are passed over.
_ITEMS: dict[str, frozenset[str]] = {
    "message": frozenset({"type", "role", "content", "id", "status"}),
    "function_call": frozenset({"type", "call_id", "name", "arguments", "id", "status"}),
    "function_call_output": frozenset({"type", "call_id", "output", "id", "status"}),
    "custom_tool_call": frozenset({"type", "call_id", "name", "input", "id", "status"}),
    "custom_tool_call_output": frozenset({"type", "call_id", "output", "id", "status"}),
    "reasoning": frozenset({"type", "content", "summary", "encrypted_content", "id", "status"}),
    "item_reference": frozenset({"type", "id"}),
}
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_PART = frozenset({"type", "text", "refusal", "annotations", "logprobs"})
_TOOL = frozenset({"type", "name", "description", "parameters", "strict"})
_CUSTOM_TOOL = frozenset({"type", "name", "description", "format"})
#: What a tool that takes free text has as its only parameter.
_INPUT = "input"
_INPUT_BEGUN = re.compile(r'\s*\{\s*"input"\s*:\s*(?=")')
#: Tools of the server that clients offer to every model; the model is not told of them.
_PASSED_OVER = ("web_search", "web_search_preview")
#: How a thought begins that a client keeps as `encrypted_content`.
_SEALED = "thought:"
ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


class ResponsesBody(SharedBody, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


#: What an item says that a client names by its id, as JSON; None: there is none.
FindItem = Callable[[str], bytes | None]
#: So many may be named in one request.
MAX_REFERENCES = 256


def seal(thought: str) -> str:
    """A thought for a client that sends it back as it came: it is the client's own, no secret."""
    return _SEALED + base64.b64encode(thought.encode()).decode()


def chat_of(
    body: ResponsesBody, earlier: Sequence[dict[str, Any]], find_item: FindItem
) -> tuple[ChatBody, list[dict[str, Any]], list[str]]:
    """The same as a chat; its messages without the instructions, which hold for one answer only;
    and the fields that were passed over.

    `earlier` are the messages of the response that this one follows. Raises ApiError.
    """
    if body.n not in (None, 1):
        raise ApiError(400, f"n is {body.n}, but a response has one answer", param="n")
    noted = Noted()
    turns = TurnList()
    for message in earlier:
        noted.count("input")
        turns.messages.append(dict(message))
    _add_input(turns, body.input, find_item, noted)
    if not turns.messages:
        raise ApiError(400, "input is empty; give a text or an item", param="input")
    opening = [{"role": "system", "content": body.instructions}] if body.instructions else []
    shared = {
        name: value
        for name in SharedBody.__struct_fields__
        if (value := getattr(body, name)) is not None
    }
    if body.max_output_tokens is not None:
        if "max_tokens" in shared:
            raise ApiError(400, "both max_tokens and max_output_tokens; give one")
        shared["max_tokens"] = body.max_output_tokens
    if (form := _form_of(body, noted)) is not None:
        shared["response_format"] = form
    noted.others(body.reasoning or {}, frozenset({"effort"}), "reasoning")
    for name in body.include or ():
        if name not in (ENCRYPTED, LOGPROBS):
            noted.pass_over(f"include[{name}]")
    if body.truncation not in (None, "disabled"):
        noted.pass_over("truncation")
    effort = (body.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise ApiError(
            400,
            f"reasoning.effort is {reprlib.repr(effort)}, but must be a text",
            param="reasoning",
        )
    chat = ChatBody(
        **shared,
        messages=[*opening, *turns.messages],
        tools=_tools_of(body, noted),
        tool_choice=_choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=effort,
        chat_template_kwargs=body.chat_template_kwargs,
        logprobs=tells_logprobs(body) or None,
        top_logprobs=body.top_logprobs if tells_logprobs(body) else None,
    )
    return chat, turns.messages, noted.names


def tells_logprobs(body: ResponsesBody) -> bool:
    """Whether texts come with the log probabilities of their tokens."""
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def _add_input(
    turns: TurnList, given: str | list[dict[str, Any]], find_item: FindItem, noted: Noted
) -> None:
    if isinstance(given, str):
        turns.say("user", [given])
        return
    noted.require_room(len(given), "input")
    named: dict[str, dict[str, Any]] = {}
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if item.get("type") == "item_reference":
            name = text_of(item, "id", where)
            if name not in named:
                named[name] = _find_referred(name, where, find_item)
            if len(named) > MAX_REFERENCES:
                raise ApiError(
                    400, f"input names more than {MAX_REFERENCES} items; send them", param="input"
                )
            item = named[name]
        _add_item(turns, item, where, noted)


def _find_referred(name: str, where: str, find_item: FindItem) -> dict[str, Any]:
    found = find_item(name)
    if found is None:
        raise ApiError(
            400, f"{where} names the item {name[:100]!r}, which is not kept", param="input"
        )
    item: dict[str, Any] = msgspec.json.decode(found)
    return item


def _add_item(turns: TurnList, item: dict[str, Any], where: str, noted: Noted) -> None:
    noted.count("input")
    kind = item.get("type", "message" if "role" in item else None)
    known = _ITEMS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise refuse(kind, where, tuple(_ITEMS))
    noted.others(item, known, "input[]")
    match kind:
        case "message":
            role = item.get("role")
            if role not in _ROLES:
                raise ApiError(
                    400,
                    f"{where}.role is {reprlib.repr(role)}, but must be {', '.join(_ROLES)}",
                    param="input",
                )
            turns.say(str(role), _texts_of(item.get("content"), f"{where}.content", noted))
        case "function_call":
            name, arguments = text_of(item, "name", where), text_of(item, "arguments", where)
            turns.call(text_of(item, "call_id", where), name, arguments)
        case "custom_tool_call":
            given = {_INPUT: text_of(item, "input", where)}
            call_id, name = text_of(item, "call_id", where), text_of(item, "name", where)
            turns.call(call_id, name, as_json(given))
        case "function_call_output" | "custom_tool_call_output":
            said = _texts_of(item.get("output"), f"{where}.output", noted)
            turns.result(text_of(item, "call_id", where), "\n".join(said))
        case _:
            if thought := _thought_of(item, where, noted):
                turns.think(thought)


def _thought_of(item: dict[str, Any], where: str, noted: Noted) -> str:
    """What a reasoning item says; empty for one that only its maker can read."""
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(_SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError, ValueError) as error:
            raise ApiError(
                400, f"{where}.encrypted_content is not as it was sent", param="input"
            ) from error
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise ApiError(400, f"{where}.{name} must be a list", param="input")
        if parts:
            at = f"{where}.{name}"
            texts = [text_of(mapping_of(part, at), "text", at) for part in parts]
            return "\n".join(texts)
    if sealed:
        noted.pass_over("input[].encrypted_content")
    return ""


def _texts_of(content: object, where: str, noted: Noted) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ApiError(
            400, f"{where} is {reprlib.repr(content)}, but must be a text or parts", param="input"
        )
    texts = []
    for place, part in enumerate(content):
        at = f"{where}[{place}]"
        noted.count("input")
        kind = mapping_of(part, at).get("type")
        name = _PARTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            raise refuse(kind, at, tuple(_PARTS))
        noted.others(part, _PART, "input[].content[]")
        texts.append(text_of(part, name, at))
    return texts


def _tools_of(body: ResponsesBody, noted: Noted) -> list[dict[str, Any]] | None:
    if body.tools is None:
        return None
    tools = []
    for number, tool in enumerate(body.tools):
        noted.count("tools")
        kind = tool.get("type")
        if isinstance(kind, str) and kind.startswith(_PASSED_OVER):
            noted.pass_over(f"tools[{kind}]")
            continue
        if kind == "custom":
            tools.append(_function_of_text(tool, noted))
            continue
        if kind != "function":
            raise ApiError(
                400,
                f"tools[{number}].type is {reprlib.repr(kind)}, but tools that are run here are "
                "not offered; give functions, or custom tools",
                param="tools",
            )
        noted.others(tool, _TOOL, "tools[]")
        function = {
            name: tool[name]
            for name in ("name", "description", "parameters", "strict")
            if tool.get(name) is not None
        }
        tools.append({"type": "function", "function": function})
    return tools


def _function_of_text(tool: dict[str, Any], noted: Noted) -> dict[str, Any]:
    """A tool that takes free text, as a function of one text. A grammar of it is passed over."""
    noted.others(tool, _CUSTOM_TOOL, "tools[]")
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") != "text":
        noted.pass_over("tools[].format")
    parameters = {
        "type": "object",
        "properties": {_INPUT: {"type": "string"}},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    function = {"name": tool.get("name"), "parameters": parameters}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def custom_names(body: ResponsesBody) -> frozenset[str]:
    """The names of tools that take free text."""
    custom = (tool for tool in body.tools or () if tool.get("type") == "custom")
    return frozenset(name for tool in custom if isinstance(name := tool.get("name"), str))


def text_given(arguments: str) -> str:
    """The text that a tool is given which takes one, as far as it goes where the answer was cut
    off; what is no such call stays as it is."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        begun = _INPUT_BEGUN.match(arguments)
        return read_cut_string(arguments[begun.end() :]) if begun is not None else arguments
    return given.get(_INPUT, arguments)


def _choice_of(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """`tool_choice` as a chat has it, which says what is wrong with it."""
    if not isinstance(given, dict):
        return given
    match given.get("type"):
        case "function" | "custom":
            return _name_function(given)
        case "allowed_tools":
            tools = given.get("tools")
            named = [_name_function(tool) for tool in tools] if isinstance(tools, list) else tools
            allowed = {"mode": given.get("mode"), "tools": named}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return given


def _name_function(tool: object) -> dict[str, Any]:
    name = tool.get("name") if isinstance(tool, dict) else None
    return {"type": "function", "function": {"name": name}}


def _form_of(body: ResponsesBody, noted: Noted) -> ResponseFormat | None:
    """The form that the answer is held to."""
    text = body.text or {}
    noted.others(text, frozenset({"format"}), "text")
    given = text.get("format")
    if given is None:
        return None
    asked = mapping_of(given, "text.format")
    kind, schema = asked.get("type"), asked.get("schema")
    if kind in ("text", "json_object"):
        return ResponseFormat(str(kind))
    if kind == "json_schema" and isinstance(schema, dict):
        return ResponseFormat("json_schema", JsonSchema(schema))
    raise ApiError(
        400,
        f"text.format is {reprlib.repr(given)}, but must have the type text, json_object, or "
        "json_schema with a schema",
        param="text",
    )


def items_of(messages: Sequence[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """The messages of a conversation as items, with ids of the response of that name."""
    for place, message in enumerate(messages):
        at = f"{name}_{place}"
        role = message["role"]
        if role == "tool":
            called = {"call_id": message["tool_call_id"], "output": message["content"]}
            yield {"type": "function_call_output", "id": f"fco_{at}", **called}
            continue
        if thought := message.get(THOUGHT):
            parts = [{"type": "reasoning_text", "text": thought}]
            yield {"type": "reasoning", "id": f"rs_{at}", "content": parts, "summary": []}
        content, kind = message["content"], "output_text" if role == "assistant" else "input_text"
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        if any(texts):
            parts = [{"type": kind, "text": text} for text in texts]
            yield {"type": "message", "id": f"msg_{at}", "role": role, "content": parts}
        for number, call in enumerate(message.get(CALLS) or ()):
            called = {"call_id": call["id"], **call["function"]}
            yield {"type": "function_call", "id": f"fc_{at}_{number}", **called}
