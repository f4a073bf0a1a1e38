"""Calls of an answer that was cut off: those that are whole, and the last one as far as it goes.

The arguments of that one begin as they would if it were whole (`call_formats.py` reads those), so
they are the beginning of a text of JSON. A call without a name that is surely whole is none.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence

from hypocenter.conversation.call_formats import (
    ARGS,
    CODER_MARKS,
    DEEPSEEK_MARKS,
    FENCE,
    GEMMA,
    GLM,
    HERMES,
    INVOKE_MARKS,
    KEY,
    KEY_END,
    KIMI_MARKS,
    LFM2,
    MINIMAX,
    QUOTE,
    QWEN_CODER,
    TOOL_CALLS,
    VALUE,
    VALUE_END,
    CalledTool,
    TextParameters,
    XmlMarks,
    as_json,
    calls_of_json,
    deepseek_call,
    kimi_call,
    mistral_parts,
    python_as_json,
    read_json_call,
    value_in_tags,
    with_quoted_keys,
)
from hypocenter.conversation.cut_json import read_cut_string, read_value
from hypocenter.conversation.marks import num_begun
from hypocenter.conversation.tools import CALLED_NAME, MAX_CALLS

#: The calls of a text that was cut off; None where it is no beginning of any.
CutReader = Callable[[str, TextParameters], list[CalledTool] | None]
_ARGUMENT_NAMES = "arguments", "parameters"


# -- JSON -----------------------------------------------------------------------------------------


def _arguments(text: str, *behind: str) -> str | None:
    """An object that may be cut off, behind which may stand what one of `behind` begins with."""
    text = text.lstrip()
    if not text:
        return ""
    value = read_value(text) if text.startswith("{") else None
    if value is None:
        return None
    if value.end is None:
        return text
    rest = "".join(text[value.end :].split())
    may_stand = not rest or any(mark.startswith(rest) for mark in behind)
    return text[: value.end] if may_stand else None


def _fields_of(text: str) -> tuple[dict[str, str], bool] | None:
    """The values of an object by their names as far as they go, and whether the last one is cut.

    None for what begins no object of a call.
    """
    fields: dict[str, str] = {}
    at = 1
    while True:
        at += len(text[at:]) - len(text[at:].lstrip(" \t\n\r,"))
        key = read_value(text, at)
        if key is None or key.end is None:
            return fields, False
        colon = text[key.end :].lstrip()
        name = read_cut_string(text[at : key.end])
        if name not in ("name", "id", "type", *_ARGUMENT_NAMES) or name in fields:
            return None
        if not colon.startswith(":"):
            return fields, False
        at = len(text) - len(colon[1:].lstrip())
        value = read_value(text, at)
        if value is None:
            return None
        fields[name] = text[at : value.end]
        if value.end is None:
            return fields, True
        at = value.end


def _cut_json_call(text: str, may_have: Sequence[str] = ()) -> list[CalledTool] | None:
    """`{"name": NAME, "arguments": {...`, cut off anywhere; of a text that begins a value."""
    found = _fields_of(text) if text.startswith("{") else None
    if found is None or not found[0].keys() <= {"name", *_ARGUMENT_NAMES, *may_have}:
        return None
    fields, is_cut = found
    named = fields.get("name", "")
    if not named or (is_cut and next(reversed(fields)) == "name"):
        return []
    name = read_cut_string(named)
    if not CALLED_NAME.fullmatch(name):
        return None
    given = next((fields[word] for word in _ARGUMENT_NAMES if word in fields), "")
    if given.startswith('"'):
        inner = read_cut_string(given)
        given = inner if not inner.strip() or inner.lstrip().startswith("{") else given
        return [(name, given if inner.strip() else "")]
    return [(name, given if given.startswith("{") else "")]


def _cut_objects(text: str, types: TextParameters) -> list[CalledTool] | None:
    """Llama's. Without a mark a call is told from other JSON by the name of its arguments."""
    found: list[CalledTool] = []
    while text and len(found) <= MAX_CALLS:
        value = read_value(text)
        if value is None:
            return None
        if value.end is None:
            cut = _cut_json_call(text, ("type",))
            fields = _fields_of(text)
            has_arguments = fields is not None and fields[0].keys() & set(_ARGUMENT_NAMES)
            return None if cut is None else found + (cut if has_arguments else [])
        one = read_json_call(text[: value.end], may_have=("type",))
        if one is None:
            return None
        found += one
        text = text[value.end :].lstrip("; \n\t")
    return found


def _cut_list(text: str, types: TextParameters) -> list[CalledTool] | None:
    """A list of objects, each a call."""
    found: list[CalledTool] = []
    if not text.startswith("["):
        return None
    text = text[1:].lstrip(", \n\t")
    while text and not text.startswith("]") and len(found) <= MAX_CALLS:
        value = read_value(text)
        if value is None:
            return None
        one = (
            _cut_json_call(text, ("id",))
            if value.end is None
            else read_json_call(text[: value.end], may_have=("id",))
        )
        if one is None:
            return None
        found += one
        text = "" if value.end is None else text[value.end :].lstrip(", \n\t")
    return found if text.strip() in ("", "]") or len(found) > MAX_CALLS else None


def _cut_hermes(text: str, types: TextParameters) -> list[CalledTool] | None:
    value = read_value(text)
    if value is None:
        return None
    if value.end is None:
        return _cut_json_call(text)
    rest = text[value.end :].strip()
    return read_json_call(text[: value.end]) if HERMES.end.startswith(rest) else None


# -- marks between which there is JSON ------------------------------------------------------------


def _cut_mistral(text: str, types: TextParameters) -> list[CalledTool] | None:
    if text.startswith("["):
        return _cut_list(text, types)
    found: list[CalledTool] = []
    for part in text.split(TOOL_CALLS):
        name, arguments = mistral_parts(part)
        if not arguments and ARGS not in part:
            return found
        given = _arguments(arguments, TOOL_CALLS)
        if given is None or not CALLED_NAME.fullmatch(name.strip()):
            return None
        found.append((name.strip(), given))
    return found


def _cut_between(
    begin: str,
    end: str,
    closing: str,
    read: Callable[[str], CalledTool | None],
    read_cut: Callable[[str], list[CalledTool] | None],
) -> CutReader:
    """Calls that stand between two marks each, `closing` behind the last one."""

    def read_all(text: str, types: TextParameters) -> list[CalledTool] | None:
        found: list[CalledTool] = []
        while text:
            if not text.startswith(begin):
                is_cut = any(mark.startswith(text) for mark in (begin, closing))
                return found if is_cut else None
            inner, mark, text = text.removeprefix(begin).partition(end)
            if not mark:
                last = read_cut(inner)
                return None if last is None else found + last
            one = read(inner)
            if one is None:
                return None
            found.append(one)
            text = text.strip()
        return found

    return read_all


def _call_of(name: str, arguments: str | None) -> list[CalledTool] | None:
    name = name.strip()
    return [(name, arguments)] if arguments is not None and CALLED_NAME.fullmatch(name) else None


def _cut_kimi_call(text: str) -> list[CalledTool] | None:
    name, mark, arguments = text.partition(KIMI_MARKS[3])
    name = name.strip().removeprefix("functions.").rpartition(":")[0] or name
    return _call_of(name, _arguments(arguments, KIMI_MARKS[4])) if mark else []


def _cut_deepseek_call(text: str) -> list[CalledTool] | None:
    first, mark, rest = text.partition(DEEPSEEK_MARKS[3])
    name, fence, arguments = rest.partition(FENCE)
    if mark and fence and "{" not in name:
        return _call_of(name, _arguments(arguments, "```" + DEEPSEEK_MARKS[4]))
    if mark and rest.lstrip().startswith("{"):
        return _call_of(first, _arguments(rest, DEEPSEEK_MARKS[4]))
    return []  # what stands behind the mark tells which of both is the name


# -- XML ------------------------------------------------------------------------------------------


def _cut_object(given: Mapping[str, str], texts: Sequence[str], name: str, cut: str | None) -> str:
    """JSON of the whole parameters without its end, and of a text that is cut as far as it goes."""
    written = as_json(given, texts)[:-1]
    if cut is None or name not in texts or name in given:
        return written
    between = ", " if given else ""
    key, said = (json.dumps(text, ensure_ascii=False) for text in (name, cut))
    return f"{written}{between}{key}: {said[:-1]}"


def _cut_value(text: str, end: str, behind: tuple[str, ...]) -> str:
    """What of a value that is cut is surely a part of it: none of what may be its end."""
    at = text.find(end)
    while at >= 0:
        rest = text[at + len(end) :].lstrip()
        if any(mark.startswith(rest) for mark in behind):
            break
        at = text.find(end, at + 1)
    value = text[:at] if at >= 0 else text[: len(text) - num_begun(text, end)]
    return value.removeprefix("\n").removesuffix("\n")


def _cut_xml(xml: XmlMarks, closing: str) -> CutReader:
    behind = (xml.key, xml.function_end)

    def read(text: str, types: TextParameters) -> list[CalledTool] | None:
        found: list[CalledTool] = []
        while text:
            if not text.startswith(xml.function):
                is_cut = any(mark.startswith(text) for mark in (xml.function, closing))
                return found if is_cut else None
            name, mark, text = text.removeprefix(xml.function).partition(xml.name_end)
            name = name.strip()
            if not mark:
                return found
            if not CALLED_NAME.fullmatch(name):
                return None
            given: dict[str, str] = {}
            texts = types.get(name, ())
            text = text.lstrip()
            while text.startswith(xml.key):
                key, mark, inner = text.removeprefix(xml.key).partition(xml.key_end)
                value, end, text = value_in_tags(inner, xml.value_end, behind)
                if not end:
                    cut = _cut_value(inner, xml.value_end, behind) if mark else None
                    return [*found, (name, _cut_object(given, texts, key.strip(), cut))]
                given[key.strip()] = value
            if not text.startswith(xml.function_end):
                is_cut = any(mark.startswith(text) for mark in behind)
                return [*found, (name, _cut_object(given, texts, "", None))] if is_cut else None
            found.append((name, as_json(given, texts)))
            text = text.removeprefix(xml.function_end).strip()
        return found

    return read


def _cut_glm(text: str, types: TextParameters) -> list[CalledTool] | None:
    name, mark, rest = text.partition(KEY)
    if not mark:
        name = name[: len(name) - max(num_begun(name, KEY), num_begun(name, GLM.end))]
        if name == text and name == name.rstrip():
            return [] if CALLED_NAME.fullmatch(name) else None
    name, text = name.strip(), mark + rest
    if not CALLED_NAME.fullmatch(name):
        return None
    given: dict[str, str] = {}
    texts = types.get(name, ())
    while text.startswith(KEY):
        key, mark, inner = text.removeprefix(KEY).partition(KEY_END)
        inner = inner.lstrip()
        if not inner.startswith(VALUE):
            if not VALUE.startswith(inner):
                return None
            break
        inner = inner.removeprefix(VALUE)
        value, end, text = value_in_tags(inner, VALUE_END, (KEY,))
        if not end:
            cut = _cut_value(inner, VALUE_END, (KEY, GLM.end))
            return [(name, _cut_object(given, texts, key.strip(), cut))]
        given[key.strip()] = value
    return [(name, _cut_object(given, texts, "", None))]


# -- others ---------------------------------------------------------------------------------------

#: A key at the end of a text, of which it is not known whether it goes on.
_CUT_KEY = re.compile(r"([{,]\s*)[A-Za-z_][\w.-]*\s*\Z")


def _cut_gemma(text: str, types: TextParameters) -> list[CalledTool] | None:
    if not text.startswith("call:"):
        return [] if "call:".startswith(text) else None
    name, brace, rest = text.removeprefix("call:").partition("{")
    if not brace:
        return []
    *parts, last = (brace + rest).split(QUOTE)
    written = [
        json.dumps(part, ensure_ascii=False) if number % 2 else with_quoted_keys(part)
        for number, part in enumerate(parts)
    ]
    last = last[: len(last) - max(num_begun(last, QUOTE), num_begun(last, GEMMA.end))]
    if len(parts) % 2:
        written.append(json.dumps(last, ensure_ascii=False)[:-1])
    else:
        plain, quote, said = last.partition('"')
        if last.count('"') % 2 == 0:
            plain, quote, said = last, "", ""
        written.append(with_quoted_keys(plain if quote else _CUT_KEY.sub(r"\1", plain)))
        written.append(quote + said)
    return _call_of(name, _arguments("".join(written)))


#: Of a text that Python quotes: a character, or one that is written by a backslash and others.
_PYTHON_CHARS = re.compile(r"\\(?:[xuUN0-7].{0,9}|.)|[^\\\n]")


def _cut_python_text(text: str) -> str | None:
    """The beginning of a text that Python quotes as JSON, without its end; None for no such."""
    if text[:1] not in ("'", '"') or "\n" in text:
        return None
    if text[0] == '"' and (said := read_cut_string(text)):
        return json.dumps(said, ensure_ascii=False)[:-1]
    chars = _PYTHON_CHARS.findall(text, 1)
    while chars and chars[-1][0] == "\\" and len(chars[-1]) < 11 and chars[-1][1] in "xuUN01234567":
        chars.pop()
    try:
        said = ast.literal_eval(text[0] + "".join(chars) + text[0])
    except (SyntaxError, ValueError):
        return '"'
    return json.dumps(said, ensure_ascii=False)[:-1]


def _cut_python(text: str, types: TextParameters) -> list[CalledTool] | None:
    converted = python_as_json(text, is_cut=True)
    if converted is None:
        return None
    written, at = converted
    rest = text[at:].lstrip()
    begins = [number for number, part in enumerate(written) if part.startswith('["')]
    if not begins:
        return [] if written[:1] in ([], ["["]) else None
    last = begins[-1]
    if "}]" in written[last:]:
        calls = "".join(written).rstrip(",").removesuffix("]]") + "]]"
        return calls_of_json(calls) if not rest or LFM2.end.startswith(rest) else None
    found = calls_of_json("".join(written[:last]).rstrip(",") + "]") if len(begins) > 1 else []
    said = _cut_python_text(rest)
    given, name = written[last + 1 :], written[last].split('"')[1]
    if found is None or not _are_named(given, has_more=said is not None):
        return None
    if said is None and rest:
        # A word or a number: it may stand where a text could.
        is_word = re.fullmatch(r"[\w.+-]+", rest) is not None
        if not is_word or read_value("{" + "".join(given) + '"') is None:
            return None
    one = _call_of(name, _arguments("{" + "".join(given) + (said or "")))
    return None if one is None else found + one


def _are_named(given: Sequence[str], *, has_more: bool) -> bool:
    """Whether each argument of a call has its name; `has_more`: a text begins behind these."""
    level, is_name_next = 0, True
    for part in given:
        if level == 0 and is_name_next and not part.endswith('":'):
            return False
        level += (part in ("{", "[")) - (part in ("}", "]"))
        is_name_next = level == 0 and part == ","
    return not (has_more and is_name_next)


#: By the names of formats.
CUT_READERS: dict[str, CutReader] = {
    "hermes": _cut_hermes,
    "qwen_coder": _cut_xml(CODER_MARKS, QWEN_CODER.end),
    "glm": _cut_glm,
    "mistral": _cut_mistral,
    "kimi": _cut_between(*KIMI_MARKS[2::2], KIMI_MARKS[1], kimi_call, _cut_kimi_call),
    "deepseek": _cut_between(
        *DEEPSEEK_MARKS[2::2], DEEPSEEK_MARKS[1], deepseek_call, _cut_deepseek_call
    ),
    "minimax": _cut_xml(INVOKE_MARKS, MINIMAX.end),
    "gemma": _cut_gemma,
    "granite": _cut_list,
    "lfm2": _cut_python,
    "llama": _cut_objects,
}
