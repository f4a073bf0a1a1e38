"""Schemas as programs have them are taken, whatever the first tokens that are tried of them."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from hypocenter import LLM, SamplingParams
from hypocenter.engine.grammar import Grammars

Schema = dict[str, Any]
_UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"


def _object(properties: Schema, *required: str, **more: Any) -> Schema:
    named = list(required) or list(properties)
    return {"type": "object", "properties": properties, "required": named, **more}


def _list_of(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _words(num: int) -> list[str]:
    return [f"{('alpha', 'beta', 'gamma', 'delta')[n % 4]}_{n * 7919 % 9973}" for n in range(num)]


def _model(title: str, properties: Schema, *required: str) -> Schema:
    """As pydantic writes a model: with titles, and with null for what may be missing."""
    named = {name: {"title": name.title(), **one} for name, one in properties.items()}
    return {"title": title, "type": "object", "properties": named, "required": list(required)}


def _or_null(one: Schema) -> Schema:
    return {"anyOf": [one, {"type": "null"}], "default": None}


def _wide(num: int) -> Schema:
    kinds: list[Schema] = [
        *({"type": name} for name in ("string", "integer", "number", "boolean")),
        _list_of({"type": "string"}),
    ]
    return {f"field_{n}": kinds[n % len(kinds)] for n in range(num)}


_PEOPLE: Schema = {
    "$defs": {
        "Address": _model(
            "Address",
            {
                "street": {"type": "string"},
                "number": {"type": "integer", "minimum": 1, "maximum": 9999},
                "postcode": {"type": "string", "pattern": r"^\d{5}$"},
                "country": _or_null({"type": "string"}),
            },
            "street",
            "number",
            "postcode",
        ),
        "Person": _model(
            "Person",
            {
                "name": {"type": "string", "minLength": 1, "maxLength": 80},
                "email": {"type": "string", "pattern": r"^[\w.+-]+@[\w-]+\.[\w.]+$"},
                "addresses": _list_of({"$ref": "#/$defs/Address"}, maxItems=5),
                "friends": {"default": [], **_list_of({"$ref": "#/$defs/Person"})},
            },
            "name",
            "email",
            "addresses",
        ),
    },
    "$ref": "#/$defs/Person",
}


def _step(kind: str, **fields: Schema) -> Schema:
    return _object({"kind": {"const": kind}, **fields}, additionalProperties=False)


_TEXT: Schema = {"type": "string"}
_EXPRESSION: Schema = {
    "$defs": {
        "node": {
            "oneOf": [
                {"type": "number"},
                _object(
                    {
                        "op": {"enum": ["+", "-", "*", "/"]},
                        "left": {"$ref": "#/$defs/node"},
                        "right": {"$ref": "#/$defs/node"},
                    },
                    additionalProperties=False,
                ),
            ]
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: dict[str, Schema] = {
    "50 fields": _model("Wide", _wide(50), *_wide(50)),
    "50 fields that may be null or missing": _model(
        "Wide", {name: _or_null(one) for name, one in _wide(50).items()}
    ),
    "nested models": _PEOPLE,
    "500 values": _object({"value": {"enum": _words(500)}}),
    "500 values at the top": {"enum": _words(500)},
    "a list of 500 values": _list_of({"enum": _words(500)}, minItems=1, maxItems=20),
    "lists of lists": _list_of(_list_of(_list_of(_list_of({"type": "number"})))),
    "patterns": _object(
        {
            "id": {"type": "string", "pattern": _UUID},
            "phone": {"type": "string", "pattern": r"^\+?[0-9 ()-]{5,20}$"},
            "version": {"type": "string", "pattern": r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)$"},
        }
    ),
    "formats": _object(
        {
            name: {"type": "string", "format": name}
            for name in ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname")
        }
    ),
    "steps of an agent": _list_of(
        {
            "oneOf": [
                _step("search", query=_TEXT),
                _step("open", url=_TEXT),
                _step("answer", text=_TEXT, sources=_list_of(_TEXT)),
            ]
        }
    ),
    "either of many": {
        "anyOf": [_step(word, **{word: _TEXT, "size": {"type": "integer"}}) for word in _words(40)]
    },
    "bounded texts": _object(
        {f"text_{n}": {"type": "string", "minLength": 1, "maxLength": 4000} for n in range(8)}
    ),
    "bounded numbers": _object(
        {
            "share": {"type": "number", "minimum": 0, "maximum": 1},
            "count": {"type": "integer", "minimum": -100000, "maximum": 100000},
            "price": {"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.01},
        }
    ),
    "free names": {"type": "object", "additionalProperties": _list_of(_TEXT, maxItems=50)},
    "long lists": _object(
        {"rows": _list_of(_list_of({"type": "integer"}, maxItems=100), maxItems=1000)}
    ),
    "an expression": _EXPRESSION,
    "parts of one": {
        "allOf": [_object({"a": _TEXT}, "a"), _object({"b": {"type": "integer"}}, "b")],
    },
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    with LLM(num_threads=1, context_length=64) as llm:
        return Grammars(llm.tokenizer, llm.vocab_size)


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_ordinary_schema_is_taken(grammars: Grammars, name: str) -> None:
    """And answers to it go on, whichever branch they take."""
    text = json.dumps(SCHEMAS[name])
    compiled = grammars.read("json_schema", text)
    for seed in range(4):
        chosen = random.Random(seed)
        matcher = grammars.matcher(SamplingParams(json_schema=text), compiled=compiled)
        assert matcher is not None
        for _ in range(60):
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
            if matcher.accept(chosen.choice(bits.nonzero()[0].tolist())):
                break
