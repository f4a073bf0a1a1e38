"""What is checked of a form before any library reads it: its type, its size, its depth.

Both may come from a stranger. What they mean is the business of `engine/grammar.py`.
"""

from __future__ import annotations

import functools
import json
import re
import reprlib
from collections.abc import Sequence

from hypocenter.base.errors import BadSetting, UsageError, Words

MAX_GRAMMAR_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 64
#: The field by which calls are held to a form.
CALLS = "tools"
#: Texts of `choice`.
MAX_CHOICES = 1024


def schema_text(schema: object) -> str:
    """A JSON schema as text: one that cannot change, and that passes between processes."""
    if isinstance(schema, dict):
        try:
            schema = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise with_text("json_schema", schema, f"must be plain JSON: {error}") from None
    if not isinstance(schema, str):
        raise BadSetting("json_schema", schema, "must be a dict, or a text of JSON", ", or None")
    _check_schema_text(schema)
    return schema


@functools.lru_cache(maxsize=64)
def _check_schema_text(text: str) -> None:
    """Raises UsageError; remembers what passed, because each request of one schema asks again."""
    _require_bytes("json_schema", text)
    depth = deepest = 0
    for bracket in re.findall(r"[][{}]", re.sub(r'"(?:[^"\\]|\\.)*+"', "", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_SCHEMA_DEPTH:
        raise UsageError(
            f"json_schema has {deepest} levels, but at most {MAX_SCHEMA_DEPTH} are allowed; put "
            "some of it into $defs"
        )
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise with_text("json_schema", text, f"must be JSON: {error}") from None
    if not isinstance(schema, dict):
        raise with_text("json_schema", text, "must be a JSON object")


def check_grammar(grammar: object) -> str:
    if not isinstance(grammar, str):
        raise BadSetting("grammar", grammar, "must be a text: Lark or GBNF", ", or None")
    if not grammar.strip():
        raise BadSetting("grammar", grammar, "must have a rule: start (Lark) or root (GBNF)")
    _require_bytes("grammar", grammar)
    return grammar


def check_regex(regex: object) -> str:
    if not isinstance(regex, str):
        raise BadSetting("regex", regex, "must be a regular expression as a text", ", or None")
    if not regex:
        raise BadSetting("regex", regex, "an empty one allows no text at all; leave it out")
    _require_bytes("regex", regex)
    return regex


def choices(choice: object) -> tuple[str, ...]:
    """The texts of which an answer is one."""
    if not isinstance(choice, Sequence) or isinstance(choice, str | bytes | bytearray):
        raise BadSetting("choice", choice, "must be a sequence of texts", ", or None")
    if not 1 <= len(choice) <= MAX_CHOICES:
        raise with_text("choice", choice, f"must have 1 to {MAX_CHOICES} texts")
    for text in choice:
        if not isinstance(text, str) or not text:
            raise BadSetting("choice", text, "must be texts with one character at least")
    _require_bytes("choice", "".join(choice))
    return tuple(dict.fromkeys(choice))


def _require_bytes(name: str, text: str) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise with_text(name, text, f"must be valid Unicode: character {error.start}") from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        limit = f"at most {MAX_GRAMMAR_BYTES} are allowed"
        raise UsageError(f"{name} has {num_bytes} bytes, but {limit}")


def with_text(name: str, value: object, limit: str) -> BadSetting:
    """A refusal that shows the beginning and the end of a long value."""
    return BadSetting(name, Words(reprlib.repr(value)), limit)
