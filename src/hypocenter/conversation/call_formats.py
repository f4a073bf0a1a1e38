"""How models write calls of tools, each format as its makers' chat templates have it.

A format is known by a mark of the template. What stands behind its mark and is no such call stays a
part of the answer. Sources are the templates in the models' own repositories: Hermes and Qwen 2.5
and 3 (JSON in tags), Llama 3.x, Mistral, Qwen3-Coder, GLM 4.5, DeepSeek V3 and V3.1, Kimi K2,
MiniMax M2, Gemma 4, Granite 3, LFM2.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hypocenter.conversation.tools import CALLED_NAME

#: A name and arguments as JSON.
CalledTool = tuple[str, str]
#: By tool: its parameters that are texts. Formats without quotes do not tell `1` from "1".
TextParameters = Mapping[str, Sequence[str]]
NO_TYPES: TextParameters = {}
#: What is read by Python's own parser is no longer than that.
MAX_PYTHON_CHARS = 64 << 10


@dataclass(frozen=True)
class CallFormat:
    """`begin` stands before a call, or several; empty: at the beginning of an answer.

    `end` stands behind them; empty: they are the rest of the answer. `may_begin` tells early of
    text behind `begin`, without blanks before it, that it is no call. `read` gives the calls of the
    text between both, None where it is no call. With `may_lack_end` models leave the end out.
    `marks` are all that may be tokens of their own. `has_types`: values have no quotes.
    """

    name: str
    begin: str
    end: str
    may_begin: Callable[[str], bool]
    read: Callable[[str, TextParameters], list[CalledTool] | None]
    marks: tuple[str, ...] = ()
    may_lack_end: bool = False
    has_types: bool = False


def _starts(*openings: str) -> Callable[[str], bool]:
    """Whether a text begins with one of these, as far as it has come."""

    def may_begin(text: str) -> bool:
        return any(text.startswith(mark) or mark.startswith(text) for mark in openings)

    return may_begin


# -- JSON -----------------------------------------------------------------------------------------


def read_json_call(
    text: str, types: TextParameters = NO_TYPES, *, may_have: Sequence[str] = ()
) -> list[CalledTool] | None:
    """`{"name": NAME, "arguments": {...}}`, whose arguments may be called parameters.

    Fields of the names in `may_have` are passed over.
    """
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        for other in may_have:
            fields.pop(other, None)
        name = msgspec.json.decode(fields.pop("name", msgspec.Raw(b"0")), type=str)
        # Llama's word for them is "parameters".
        given = fields.pop("arguments", None) or fields.pop("parameters", None)
        if fields or not CALLED_NAME.fullmatch(name):
            return None
        arguments = "{}" if given is None else bytes(given).decode().strip()
        if arguments.startswith('"'):  # JSON that is written as a text
            inner = msgspec.json.decode(arguments, type=str)
            if inner.lstrip().startswith("{"):
                msgspec.json.decode(inner, type=dict[str, msgspec.Raw])
                arguments = inner
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return [(name, "{}" if arguments == "null" else arguments)]


def read_json_list(text: str, types: TextParameters) -> list[CalledTool] | None:
    """A list of calls as JSON, each with an id perhaps, which is another one here."""
    try:
        calls = msgspec.json.decode(text, type=list[dict[str, msgspec.Raw]])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    found: list[CalledTool] = []
    for call in calls:
        call.pop("id", None)
        one = read_json_call(msgspec.json.encode(call).decode())
        if one is None:
            return None
        found += one
    return found or None


def _read_objects(text: str, types: TextParameters) -> list[CalledTool] | None:
    """Llama's: one object or several, with `;` between them. Each has its arguments."""
    found: list[CalledTool] = []
    decoder = json.JSONDecoder()
    at = 0
    while at < len(text):
        try:
            call, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not call.keys() & {"parameters", "arguments"}:
            return None
        one = read_json_call(text[at:end], may_have=("type",))
        if one is None:
            return None
        found += one
        at = end + len(text[end:]) - len(text[end:].lstrip("; \n\t"))
    return found or None


def _object_text(text: str) -> str | None:
    """JSON of an object as it was written, None for what is none."""
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return text.strip()


def _call_of(name: str, arguments: str) -> CalledTool | None:
    name, given = name.strip(), _object_text(arguments)
    return (name, given) if given is not None and CALLED_NAME.fullmatch(name) else None


# -- marks between which there is JSON ------------------------------------------------------------

TOOL_CALLS, ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read_mistral(text: str, types: TextParameters) -> list[CalledTool] | None:
    if text.lstrip().startswith("["):
        return read_json_list(text, types)
    found: list[CalledTool] = []
    for part in text.split(TOOL_CALLS):
        name, arguments = mistral_parts(part)
        one = _call_of(name, arguments)
        if one is None:
            return None
        found.append(one)
    return found


def mistral_parts(text: str) -> tuple[str, str]:
    """The name and the arguments of a call; without its mark they begin with the first brace."""
    name, mark, arguments = text.partition(ARGS)
    if not mark:
        name, brace, arguments = text.partition("{")
        arguments = brace + arguments
    return name.partition(_CALL_ID)[0], arguments


KIMI_MARKS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


def _read_kimi(text: str, types: TextParameters) -> list[CalledTool] | None:
    """`functions.NAME:NUMBER` is the id of a call, and its name."""
    return _between(text, KIMI_MARKS[2], KIMI_MARKS[4], kimi_call)


def kimi_call(text: str) -> CalledTool | None:
    name, mark, arguments = text.partition(KIMI_MARKS[3])
    name = name.strip().removeprefix("functions.").rpartition(":")[0] or name
    return _call_of(name, arguments) if mark else None


DEEPSEEK_MARKS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
FENCE = "```json"


def _read_deepseek(text: str, types: TextParameters) -> list[CalledTool] | None:
    return _between(text, DEEPSEEK_MARKS[2], DEEPSEEK_MARKS[4], deepseek_call)


def deepseek_call(text: str) -> CalledTool | None:
    """V3.1 writes name and arguments; V3 a kind before them, and arguments in a fence."""
    first, mark, rest = text.partition(DEEPSEEK_MARKS[3])
    if not mark:
        return None
    name, fence, arguments = rest.partition(FENCE)
    if fence and "{" not in name:
        return _call_of(name, arguments.strip().removesuffix("```"))
    return _call_of(first, rest)


def _between(
    text: str, begin: str, end: str, read: Callable[[str], CalledTool | None]
) -> list[CalledTool] | None:
    """All calls between these marks; None where anything else stands there."""
    found: list[CalledTool] = []
    rest = text.strip()
    while rest:
        if not rest.startswith(begin):
            return None
        inner, mark, rest = rest.removeprefix(begin).partition(end)
        one = read(inner) if mark else None
        if one is None:
            return None
        found.append(one)
        rest = rest.strip()
    return found or None


# -- XML ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class XmlMarks:
    """Texts around a function's name and its parameters; `key_end` closes the name of one."""

    function: str
    name_end: str
    function_end: str
    key: str
    key_end: str
    value_end: str


CODER_MARKS = XmlMarks("<function=", ">", "</function>", "<parameter=", ">", "</parameter>")
INVOKE_MARKS = XmlMarks(
    '<invoke name="', '">', "</invoke>", '<parameter name="', '">', "</parameter>"
)
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _read_xml(xml: XmlMarks) -> Callable[[str, TextParameters], list[CalledTool] | None]:
    def read(text: str, types: TextParameters) -> list[CalledTool] | None:
        found: list[CalledTool] = []
        rest = text.strip()
        while rest:
            if not rest.startswith(xml.function):
                return None
            name, mark, rest = rest.removeprefix(xml.function).partition(xml.name_end)
            given: dict[str, str] = {}
            rest = rest.lstrip()
            while mark and rest.startswith(xml.key):
                key, mark, rest = rest.removeprefix(xml.key).partition(xml.key_end)
                value, mark, rest = value_in_tags(rest, xml.value_end, (xml.key, xml.function_end))
                given[key.strip()] = value
            if not mark or not rest.startswith(xml.function_end):
                return None
            rest = rest.removeprefix(xml.function_end).strip()
            if not CALLED_NAME.fullmatch(name.strip()):
                return None
            found.append((name.strip(), as_json(given, types.get(name.strip(), ()))))
        return found or None

    return read


def value_in_tags(text: str, end: str, behind: tuple[str, ...]) -> tuple[str, str, str]:
    """A value, its end and what follows: that end is one behind which these stand.

    One line break before and behind a value belongs to the tags.
    """
    at = text.find(end)
    while at >= 0:
        rest = text[at + len(end) : at + len(end) + 256].lstrip()
        if rest.startswith(behind):
            value = text[:at].removeprefix("\n").removesuffix("\n")
            return value, end, text[at + len(end) :].lstrip()
        at = text.find(end, at + 1)
    return "", "", ""


def _read_glm(text: str, types: TextParameters) -> list[CalledTool] | None:
    name, mark, rest = text.partition(KEY)
    name, rest = name.strip(), mark + rest
    if not CALLED_NAME.fullmatch(name):
        return None
    given: dict[str, str] = {}
    while rest:
        if not rest.startswith(KEY):
            return None
        key, mark, rest = rest.removeprefix(KEY).partition(KEY_END)
        rest = rest.lstrip()
        if not mark or not rest.startswith(VALUE):
            return None
        rest = rest.removeprefix(VALUE)
        if rest.rstrip().endswith(VALUE_END) and KEY not in rest:
            value, rest = rest.rstrip().removesuffix(VALUE_END), ""
        else:
            value, mark, rest = value_in_tags(rest, VALUE_END, (KEY,))
            if not mark:
                return None
        given[key.strip()] = value
    return [(name, as_json(given, types.get(name, ())))]


def as_json(given: Mapping[str, str], texts: Sequence[str]) -> str:
    """The arguments as JSON: what is a text stays one, what else is JSON is that."""
    return json.dumps(
        {name: value if name in texts else _json_or_text(value) for name, value in given.items()},
        ensure_ascii=False,
    )


def _json_or_text(value: str) -> Any:
    try:
        return msgspec.json.decode(value.strip())
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)


# -- others ---------------------------------------------------------------------------------------

QUOTE = '<|"|>'
_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]{0,127})\s*:")


_JSON_TEXT = re.compile(r'("(?:\\.|[^"\\])*")')


def with_quoted_keys(text: str) -> str:
    """The same with keys as JSON has them; texts that JSON quotes stay as they are."""
    parts = _JSON_TEXT.split(text)
    parts[::2] = [_BARE_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
    return "".join(parts)


def _read_gemma(text: str, types: TextParameters) -> list[CalledTool] | None:
    """`call:NAME{key:value}`: keys without quotes, texts between quotes of their own."""
    name, brace, rest = text.strip().removeprefix("call:").partition("{")
    if not brace or not text.strip().startswith("call:"):
        return None
    parts = (brace + rest).split(QUOTE)
    if len(parts) % 2 == 0:
        return None
    plain = [
        json.dumps(part, ensure_ascii=False) if number % 2 else with_quoted_keys(part)
        for number, part in enumerate(parts)
    ]
    one = _call_of(name, "".join(plain))
    return None if one is None else [one]


#: Of calls as Python writes them: a text, a number, a name or a mark.
_PYTHON = re.compile(
    r"""\s*(?:('(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")|(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"""
    r"""|([A-Za-z_][\w.-]*)\s*([(=]?)|([][{},:)]))""",
    re.ASCII,
)
_CONSTANTS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}


def _read_python(text: str, types: TextParameters) -> list[CalledTool] | None:
    """LFM2's list of calls as Python writes them, with literals by their names."""
    text = text.strip()
    written = python_as_json(text)
    if written is None or written[1] < len(text):
        return None
    return calls_of_json("".join(written[0]))


def python_as_json(text: str, *, is_cut: bool = False) -> tuple[list[str], int] | None:
    """A list of calls as Python writes them, as parts of JSON, and up to where it is one.

    Each call becomes a name and an object; the part that begins one is `["NAME",{`. Where the text
    `is_cut`, a word or a number at its end may go on, and is left. None for what is no such list.
    """
    if len(text) > MAX_PYTHON_CHARS:
        return None
    written: list[str] = []
    at, is_in_call = 0, False
    while (token := _PYTHON.match(text, at)) is not None:
        said, number, name, behind, mark = token.groups(default="")
        if is_cut and token.end() == len(text) and (number or (name and not behind)):
            break
        if said:
            try:
                written.append(json.dumps(_python_text(said), ensure_ascii=False))
            except (SyntaxError, ValueError):
                return None
        elif name and behind == "(" and not is_in_call:
            written.append(f'["{name}",{{')
            is_in_call = True
        elif name and behind == "=" and is_in_call:
            written.append(f'"{name}":')
        elif name and not behind and name in _CONSTANTS:
            written.append(_CONSTANTS[name])
        elif mark == ")" and is_in_call:
            written.append("}]")
            is_in_call = False
        elif name or mark == ")":
            return None
        else:
            written.append(number or mark)
        at = token.end()
    return written, at


def _python_text(said: str) -> str:
    """What a text between quotes says. A call that is held to a schema has texts of JSON."""
    if said.startswith('"'):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            return msgspec.json.decode(said, type=str)
    return str(ast.literal_eval(said))


def calls_of_json(text: str) -> list[CalledTool] | None:
    """The calls of a list of pairs, each of a name and an object; None for what is none."""
    try:
        calls = msgspec.json.decode(text, type=list[tuple[str, dict[str, msgspec.Raw]]])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if not all(CALLED_NAME.fullmatch(name) for name, _ in calls):
        return None
    return [(name, msgspec.json.encode(given).decode()) for name, given in calls] or None


# -- which one ------------------------------------------------------------------------------------

_TAG, _TAG_END = "<tool_call>", "</tool_call>"
HERMES = CallFormat("hermes", _TAG, _TAG_END, _starts("{"), read_json_call, (_TAG, _TAG_END))
QWEN_CODER = CallFormat(
    "qwen_coder",
    _TAG,
    _TAG_END,
    _starts(CODER_MARKS.function),
    _read_xml(CODER_MARKS),
    (_TAG, _TAG_END),
    has_types=True,
)
GLM = CallFormat(
    "glm",
    _TAG,
    _TAG_END,
    lambda text: text[0] not in "{[<",
    _read_glm,
    (_TAG, _TAG_END, KEY, KEY_END, VALUE, VALUE_END),
    has_types=True,
)
MISTRAL = CallFormat(
    "mistral",
    TOOL_CALLS,
    "",
    lambda text: text[0] == "[" or text[0].isalnum() or text[0] == "_",
    _read_mistral,
    (TOOL_CALLS, ARGS, _CALL_ID),
)
KIMI = CallFormat(
    "kimi",
    KIMI_MARKS[0],
    KIMI_MARKS[1],
    _starts(KIMI_MARKS[2]),
    _read_kimi,
    KIMI_MARKS,
    may_lack_end=True,
)
DEEPSEEK = CallFormat(
    "deepseek",
    DEEPSEEK_MARKS[0],
    DEEPSEEK_MARKS[1],
    _starts(DEEPSEEK_MARKS[2]),
    _read_deepseek,
    DEEPSEEK_MARKS,
    may_lack_end=True,
)
MINIMAX = CallFormat(
    "minimax",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    _starts(INVOKE_MARKS.function),
    _read_xml(INVOKE_MARKS),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    has_types=True,
)
GEMMA = CallFormat(
    "gemma",
    "<|tool_call>",
    "<tool_call|>",
    _starts("call:"),
    _read_gemma,
    ("<|tool_call>", "<tool_call|>", QUOTE),
)
GRANITE = CallFormat(
    "granite", "<|tool_call|>", "", _starts("["), read_json_list, ("<|tool_call|>",)
)
LFM2 = CallFormat(
    "lfm2",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    _starts("["),
    _read_python,
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    may_lack_end=True,
)
LLAMA = CallFormat("llama", "", "", _starts("{"), _read_objects, ("<|python_tag|>",))

FORMATS = (
    HERMES,
    QWEN_CODER,
    GLM,
    MISTRAL,
    KIMI,
    DEEPSEEK,
    MINIMAX,
    GEMMA,
    GRANITE,
    LFM2,
    LLAMA,
)
#: Marks that only one format has.
_OWN_MARKS = (
    (MISTRAL, MISTRAL.begin),
    (KIMI, KIMI.begin),
    (DEEPSEEK, DEEPSEEK.begin),
    (MINIMAX, MINIMAX.begin),
    (GEMMA, GEMMA.begin),
    (LFM2, LFM2.begin),
)
#: As Llama 3.1 to 3.3 tell the model what to write.
_LLAMA_SAYS = '{"name": function name, "parameters":'


def format_of(chat_template: str) -> CallFormat | None:
    """The format that this template has, None where it has none of these."""
    for one, mark in _OWN_MARKS:
        if mark in chat_template:
            return one
    if _TAG in chat_template:
        if CODER_MARKS.function in chat_template:
            return QWEN_CODER
        return GLM if KEY in chat_template else HERMES
    if GRANITE.begin in chat_template:
        return GRANITE
    is_llama = "<|python_tag|>" in chat_template or _LLAMA_SAYS in chat_template
    return LLAMA if is_llama else None


def needs_types(chat_template: str) -> bool:
    """Whether calls of this model are read by the types of their parameters."""
    form = format_of(chat_template)
    return form is not None and form.has_types


def text_parameters(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, tuple[str, ...]]:
    """The parameters of checked tools that are texts and nothing else."""
    found: dict[str, tuple[str, ...]] = {}
    for tool in tools or ():
        function = tool["function"]
        properties = (function.get("parameters") or {}).get("properties")
        if isinstance(properties, Mapping):
            names = tuple(name for name, schema in properties.items() if is_text(schema))
            if names:
                found[function["name"]] = names
    return found


def is_text(schema: object) -> bool:
    """Whether what fits this schema is a text, and nothing else."""
    if not isinstance(schema, Mapping):
        return False
    if "type" in schema:
        return bool(schema["type"] == "string")
    choices = schema.get("enum")
    return isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
