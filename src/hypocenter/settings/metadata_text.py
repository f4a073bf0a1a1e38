"""Metadata that a person gives for a model file: how it is written, and what it may be."""

from __future__ import annotations

import math
import re

from hypocenter.base.errors import BadSetting

MAX_VALUES = 128
MAX_TEXT_BYTES = 1 << 20
_KEY = r"[A-Za-z0-9_.-]{1,128}"
_WRITTEN = re.compile(rf"({_KEY})=(int|float|bool|str):(.*)", re.S)
#: A comma ends a value where another one follows.
_NEXT = re.compile(rf",(?={_KEY}=(?:int|float|bool|str):)")
_FLAGS = {"true": True, "false": False}


def parse_metadata(name: str, texts: tuple[str, ...]) -> dict[str, bool | int | float | str]:
    """Values as llama.cpp has them written: `KEY=TYPE:VALUE`, several with commas.

    TYPE is int, float, bool or str. Raises BadSetting for the setting `name`.
    """
    found: dict[str, bool | int | float | str] = {}
    for text in (part for whole in texts for part in _NEXT.split(whole)):
        matched = _WRITTEN.fullmatch(text)
        if matched is None:
            limit = "must be KEY=TYPE:VALUE with a TYPE of int, float, bool or str"
            raise BadSetting(name, text, limit)
        key, kind, value = matched.groups()
        try:
            found[key] = _value_of(kind, value)
        except (KeyError, ValueError):
            limit = "must be true or false" if kind == "bool" else f"must be of type {kind}"
            raise BadSetting(f"{name} {key}", value, limit) from None
    return found


def _value_of(kind: str, value: str) -> bool | int | float | str:
    if kind == "bool":
        return _FLAGS[value]
    if kind == "str":
        return value
    return int(value) if kind == "int" else float(value)


def require_metadata(name: str, values: object) -> None:
    """Keys and single values as a model file may hold them; else BadSetting."""
    if not isinstance(values, dict):
        raise BadSetting(name, values, "must be a dict of keys and values", ", or None")
    if len(values) > MAX_VALUES:
        raise BadSetting(name, f"{len(values)} values", f"must be at most {MAX_VALUES}")
    for key, value in values.items():
        if not isinstance(key, str) or not re.fullmatch(_KEY, key):
            limit = "must have keys of up to 128 letters, digits and any of _ . -"
            raise BadSetting(name, key, limit)
        if not _is_single_value(value):
            limit = f"must be a flag, an i64, a finite number or a text of {MAX_TEXT_BYTES} bytes"
            raise BadSetting(f"{name} {key}", value, limit)


def _is_text(value: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in value)


def _is_single_value(value: object) -> bool:
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass")) <= MAX_TEXT_BYTES and _is_text(value)
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    return isinstance(value, float) and math.isfinite(value)
