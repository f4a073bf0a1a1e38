"""How a call that is held to a schema is written, in each format, as its template writes calls.

`call_formats.py` reads all of these. `{name}` is the tool's, `{number}` is any small number.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypocenter.conversation import call_formats, harmony
from hypocenter.conversation.call_formats import CallFormat

HARMONY = "harmony"


@dataclass(frozen=True)
class Parameters:
    """Arguments one by one: `key` stands before a value, `end` closes it.

    `{name}` in `key` is the parameter's. `quoted`: a text is JSON as other values are. `between`
    separates two.
    """

    key: str
    end: str
    #: What stands between a value and `end` if that is no text, and behind `end`.
    before_end: str = ""
    behind: str = ""
    between: str = ""
    quoted: bool = False
    #: Stands before a text, whose end is the same.
    quote: str = ""


@dataclass(frozen=True)
class CallShape:
    """What stands behind the format's `begin`, around each call and behind the last one.

    Without `parameters` the arguments are an object of JSON.
    """

    form: CallFormat
    opening: str
    head: str
    tail: str
    between: str
    closing: str
    parameters: Parameters | None = None


_JSON_HEAD = '{"name": "{name}", "arguments": '
SHAPES = {
    "hermes": CallShape(
        call_formats.HERMES,
        "\n",
        _JSON_HEAD,
        "}",
        "\n</tool_call>\n<tool_call>\n",
        "\n</tool_call>",
    ),
    "qwen_coder": CallShape(
        call_formats.QWEN_CODER,
        "\n",
        "<function={name}>\n",
        "</function>",
        "\n</tool_call>\n<tool_call>\n",
        "\n</tool_call>",
        Parameters("<parameter={name}>\n", "</parameter>", "\n", "\n"),
    ),
    "glm": CallShape(
        call_formats.GLM,
        "",
        "{name}\n",
        "",
        "</tool_call>\n<tool_call>",
        "</tool_call>",
        Parameters("<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>", behind="\n"),
    ),
    "mistral": CallShape(call_formats.MISTRAL, "", "{name}[ARGS]", "", "[TOOL_CALLS]", ""),
    "mistral_list": CallShape(call_formats.MISTRAL, "[", _JSON_HEAD, "}", ", ", "]"),
    "kimi": CallShape(
        call_formats.KIMI,
        "",
        "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "deepseek": CallShape(
        call_formats.DEEPSEEK,
        "",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_fence": CallShape(
        call_formats.DEEPSEEK,
        "",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "minimax": CallShape(
        call_formats.MINIMAX,
        "\n",
        '<invoke name="{name}">\n',
        "</invoke>\n",
        "",
        "</minimax:tool_call>",
        Parameters('<parameter name="{name}">', "</parameter>", behind="\n"),
    ),
    "gemma": CallShape(
        call_formats.GEMMA,
        "",
        "call:{name}{",
        "}",
        "<tool_call|><|tool_call>",
        "<tool_call|>",
        Parameters("{name}:", "", between=",", quote='<|"|>'),
    ),
    "granite": CallShape(call_formats.GRANITE, "[", _JSON_HEAD, "}", ", ", "]"),
    "lfm2": CallShape(
        call_formats.LFM2,
        "[",
        "{name}(",
        ")",
        ", ",
        "]<|tool_call_end|>",
        Parameters("{name}=", "", between=", ", quoted=True),
    ),
    "llama": CallShape(
        call_formats.LLAMA,
        "",
        '{"name": "{name}", "parameters": ',
        "}",
        "; ",
        "",
    ),
}


def shape_of(chat_template: str) -> str:
    """The name of the shape that this template writes calls in, which must write some."""
    if harmony.answers_in_channels(chat_template):
        return HARMONY
    form = call_formats.format_of(chat_template)
    assert form is not None, "calls of this template are read"
    if form is call_formats.MISTRAL and "[ARGS]" not in chat_template:
        return "mistral_list"
    if form is call_formats.DEEPSEEK and "```json" in chat_template:
        return "deepseek_fence"
    return form.name
