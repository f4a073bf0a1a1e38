"""The body of Anthropic's `/v1/messages`, and the chat that it asks for.

https://docs.anthropic.com/en/api/messages describes it. Each setting of a request (`top_k`,
`json_schema`, `grammar` and so on) may stand beside Anthropic's fields.
"""

from __future__ import annotations

import reprlib
from typing import Any

from hypocenter.base.errors import BadSetting
from hypocenter.conversation.thoughts import EFFORTS, has_thoughts, variables
from hypocenter.server.api_error import ApiError
from hypocenter.server.dialects.turns import (
    Noted,
    TurnList,
    as_json,
    mapping_of,
    refuse,
    text_of,
)
from hypocenter.server.fields import (
    ChatBody,
    JsonSchema,
    ResponseFormat,
    SharedBody,
)

_ROLES = ("user", "assistant", "system")
_MESSAGE = frozenset({"role", "content"})
#: By kind: the fields of a block that are read. Others are passed over.
_BLOCKS: dict[str, frozenset[str]] = {
    "text": frozenset({"type", "text"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type"}),
    "tool_use": frozenset({"type", "id", "name", "input"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error"}),
    "document": frozenset({"type", "source", "title", "context"}),
    "search_result": frozenset({"type", "source", "title", "content"}),
}
_ASSISTANTS = frozenset({"thinking", "redacted_thinking", "tool_use"})
_OF_TEXT = ("text", "document", "search_result")
_TOOL = frozenset({"type", "name", "description", "input_schema", "strict"})
#: Begins a line before Claude Code's system prompt that is for whoever bills; each time it differs.
#: Anthropic's server reads it; no model is shown it.
BILLING_LINE = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_CHOICE = frozenset({"type", "name", "disable_parallel_tool_use"})


class MessagesBody(SharedBody, kw_only=True):
    """`max_tokens` may be left out: the answer then goes on until it ends."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    #: Its name before `output_config.format`.
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def chat_of(body: MessagesBody, chat_template: str) -> tuple[ChatBody, list[str]]:
    """The same as a chat, and the fields that were passed over. Raises ApiError."""
    if body.n not in (None, 1):
        raise ApiError(400, f"n is {body.n}, but a message has one answer", param="n")
    if not body.messages:
        raise ApiError(400, "messages is empty; give at least one", param="messages")
    noted = Noted()
    turns = _turns_of(body, noted)
    shared = {
        name: value
        for name in SharedBody.__struct_fields__
        if (value := getattr(body, name)) is not None
    }
    if body.stop_sequences is not None:
        if "stop" in shared:
            raise ApiError(400, "both stop and stop_sequences; give one", param="stop_sequences")
        shared["stop"] = body.stop_sequences
    if (form := _form_of(body)) is not None:
        shared["response_format"] = form
    chosen, one_call = _choice_of(body, noted)
    effort, told = _thinking_of(body, chat_template, noted)
    goes_on = bool(turns.messages) and turns.messages[-1]["role"] == "assistant"
    if goes_on and turns.last_calls:
        raise ApiError(
            400,
            "the last message calls a tool; put what the tool said behind it, as a tool_result",
            param="messages",
        )
    chat = ChatBody(
        **shared,
        messages=turns.messages,
        tools=_tools_of(body, noted),
        tool_choice=chosen,
        parallel_tool_calls=False if one_call else None,
        reasoning_effort=effort,
        chat_template_kwargs=told | (body.chat_template_kwargs or {}) or None,
        continue_final_message=goes_on or None,
    )
    return chat, noted.names


def shows_thoughts(body: MessagesBody) -> bool:
    """Whether the text of a thought is sent, and not only that there was one."""
    return (body.thinking or {}).get("display") != "omitted"


def _turns_of(body: MessagesBody, noted: Noted) -> TurnList:
    turns = TurnList()
    if body.system:
        texts = _without_billing(_texts_of(body.system, "system", noted), noted)
        if texts:
            turns.say("system", texts)
    noted.require_room(len(body.messages), "messages")
    for number, message in enumerate(body.messages):
        where = f"messages[{number}]"
        noted.count("messages")
        noted.others(message, _MESSAGE, "messages[]")
        role = message.get("role")
        if role not in _ROLES:
            raise ApiError(
                400,
                f"{where}.role is {reprlib.repr(role)}, but must be user, assistant or system",
                param="messages",
            )
        content = message.get("content")
        if isinstance(content, str):
            turns.say(role, [content])
        elif isinstance(content, list):
            _add_blocks(turns, role, content, where, noted)
        else:
            raise ApiError(
                400,
                f"{where}.content is {reprlib.repr(content)}, but must be a text or blocks",
                param="messages",
            )
    return turns


def _add_blocks(turns: TurnList, role: str, content: list[Any], where: str, noted: Noted) -> None:
    """Texts that stand together are one message; what tools said stands between them."""
    noted.require_room(len(content), "messages")
    texts: list[str] = []
    for place, block in enumerate(content):
        at = f"{where}.content[{place}]"
        kind = _kind_of(block, at, noted)
        if kind in _OF_TEXT:
            texts.append(_text_of_block(block, kind, at, noted))
            continue
        if (kind in _ASSISTANTS) != (role == "assistant") or role == "system":
            raise ApiError(400, f"{at} is {kind!r}, which no {role} says", param="messages")
        if texts:
            turns.say(role, texts)
            texts = []
        if kind == "thinking":
            turns.think(text_of(block, "thinking", at))
        elif kind == "tool_use":
            given = mapping_of(block.get("input"), f"{at}.input")
            turns.call(text_of(block, "id", at), text_of(block, "name", at), as_json(given))
        elif kind == "tool_result":
            said = _texts_of(block.get("content") or "", f"{at}.content", noted)
            # Templates have no other place for it.
            opening = "Error: " if block.get("is_error") is True else ""
            turns.result(text_of(block, "tool_use_id", at), opening + "\n".join(said))
        else:
            noted.pass_over(f"messages[].content[{kind}]")  # nobody else can read it
    if texts:
        turns.say(role, texts)


def _kind_of(block: object, at: str, noted: Noted) -> str:
    """The kind of a block that is read. Raises ApiError for another."""
    noted.count(at.partition("[")[0])
    kind = mapping_of(block, at).get("type")
    known = _BLOCKS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise refuse(kind, at, tuple(_BLOCKS))
    assert isinstance(block, dict)
    noted.others(block, known, f"{at.partition('[')[0]}[].content[]")
    return str(kind)


def _texts_of(content: object, where: str, noted: Noted) -> list[str]:
    """A text, or the texts of blocks. Raises ApiError."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ApiError(
            400,
            f"{where} is {reprlib.repr(content)}, but must be a text or blocks",
            param=where.partition("[")[0],
        )
    texts = []
    for place, block in enumerate(content):
        at = f"{where}[{place}]"
        kind = _kind_of(block, at, noted)
        if kind not in _OF_TEXT:
            raise refuse(kind, at, _OF_TEXT)
        texts.append(_text_of_block(block, kind, at, noted))
    return texts


def _without_billing(texts: list[str], noted: Noted) -> list[str]:
    """The texts of a system prompt without the line that is no part of it; behind a line that
    differs each time nothing would be found in the prefix cache."""
    if not texts or not texts[0].startswith(BILLING_LINE):
        return texts
    noted.pass_over(f"system.{BILLING_LINE.rstrip(':')}")
    _, _, rest = texts[0].partition("\n")
    return [rest, *texts[1:]] if rest else texts[1:]


def _text_of_block(block: dict[str, Any], kind: str, at: str, noted: Noted) -> str:
    if kind == "text":
        return text_of(block, "text", at)
    if kind == "search_result":
        parts = [text_of(block, "title", at), text_of(block, "source", at)]
        return "\n".join([*parts, *_texts_of(block.get("content"), f"{at}.content", noted)])
    source = mapping_of(block.get("source"), f"{at}.source")
    parts = [text for name in ("title", "context") if isinstance(text := block.get(name), str)]
    if source.get("type") == "text":
        return "\n".join([*parts, text_of(source, "data", f"{at}.source")])
    if source.get("type") == "content":
        return "\n".join([*parts, *_texts_of(source.get("content"), f"{at}.source.content", noted)])
    raise ApiError(
        400,
        f"{at}.source.type is {reprlib.repr(source.get('type'))}, but a document must be a text: "
        "type 'text' or 'content'",
        param=at.partition("[")[0],
    )


def _tools_of(body: MessagesBody, noted: Noted) -> list[dict[str, Any]] | None:
    if body.tools is None:
        return None
    tools = []
    for number, tool in enumerate(body.tools):
        noted.count("tools")
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise ApiError(
                400,
                f"tools[{number}].type is {reprlib.repr(kind)}, but there are no tools of the "
                "server's own; give a name and an input_schema",
                param="tools",
            )
        noted.others(tool, _TOOL, "tools[]")
        function = {
            to: tool[name]
            for name, to in (
                ("name", "name"),
                ("description", "description"),
                ("input_schema", "parameters"),
                ("strict", "strict"),
            )
            if tool.get(name) is not None
        }
        tools.append({"type": "function", "function": function})
    return tools


def _choice_of(body: MessagesBody, noted: Noted) -> tuple[str | dict[str, Any] | None, bool]:
    """`tool_choice` as a chat has it, and whether there may be one call only."""
    given = body.tool_choice
    if given is None:
        return None, False
    noted.others(given, _CHOICE, "tool_choice")
    one_call = given.get("disable_parallel_tool_use")
    kind = given.get("type")
    if one_call not in (None, False, True) or not (kind == "tool" or kind in tuple(_CHOICES)):
        raise ApiError(
            400,
            f"tool_choice is {reprlib.repr(given)}, but its type must be auto, any, tool or none, "
            "and disable_parallel_tool_use true or false",
            param="tool_choice",
        )
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}, bool(one_call)
    return _CHOICES[str(kind)], bool(one_call)


def _form_of(body: MessagesBody) -> ResponseFormat | None:
    """The schema that the answer is held to."""
    given = (body.output_config or {}).get("format")
    where = "output_config.format" if given is not None else "output_format"
    given = body.output_format if given is None else given
    if given is None:
        return None
    asked = mapping_of(given, where)
    schema = asked.get("schema")
    if asked.get("type") != "json_schema" or not isinstance(schema, dict):
        raise ApiError(
            400,
            f"{where} must have the type 'json_schema' and a schema",
            param=where.partition(".")[0],
        )
    return ResponseFormat("json_schema", JsonSchema(schema))


def _thinking_of(
    body: MessagesBody, chat_template: str, noted: Noted
) -> tuple[str | None, dict[str, Any]]:
    """How much is to be thought: an effort, or variables of the template.

    Clients ask every model, so a wish that this one cannot heed is passed over.
    """
    thinking = body.thinking or {}
    kind = thinking.get("type")
    if body.thinking is not None and kind not in ("enabled", "disabled", "adaptive"):
        raise ApiError(
            400,
            f"thinking.type is {reprlib.repr(kind)}, but must be enabled, disabled or adaptive",
            param="thinking",
        )
    noted.others(thinking, frozenset({"type", "display"}), "thinking")
    effort = (body.output_config or {}).get("effort")
    effort = "xhigh" if effort == "max" else effort
    if effort is not None and effort not in EFFORTS:
        raise ApiError(
            400,
            f"output_config.effort is {reprlib.repr(effort)}, but must be low, medium, high, "
            "xhigh or max",
            param="output_config",
        )
    if kind in ("enabled", "disabled") and (kind == "disabled" or effort is None):
        if kind == "disabled" and not has_thoughts(chat_template):
            return None, {}
        try:
            return None, variables(chat_template, "on" if kind == "enabled" else "off")
        except BadSetting:
            if kind == "disabled" or not has_thoughts(chat_template):
                noted.pass_over("thinking")
            return None, {}
    return effort, {}
