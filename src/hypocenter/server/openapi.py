"""The OpenAPI document of the routes, made from their table and from the types that they use.

https://spec.openapis.org/oas/v3.1.1. The bodies are those that are decoded and the answers those
that are encoded, so that what is written here is what is done. Answers no request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hypocenter.server.answers import ErrorAnswer

_REF = "#/components/schemas/{name}"
#: `{name}` or `{name:path}`, as Starlette writes what an address leaves open.
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_KEY = "key"


@dataclass(frozen=True)
class Query:
    """A parameter behind the `?` of an address, which is a text there."""

    name: str
    what: str
    #: The words that it may be; empty: any text.
    words: tuple[str, ...] = ()
    is_required: bool = False


@dataclass(frozen=True)
class Endpoint:
    """A route: its address as Starlette writes it, and what goes in and out.

    `answer` is the type of its JSON, or the media type of what is none. `stream` is the type of
    what each event holds when the body asks for a stream, `error` that of what is wrong.
    With `names_events` each event has a name beside what it holds.
    """

    method: str
    path: str
    endpoint: Any
    what: str
    answer: Any
    body: Any = None
    stream: Any = None
    is_open: bool = False
    error: Any = ErrorAnswer
    names_events: bool = False
    #: What a stream is sent as.
    stream_media: str = "text/event-stream"
    query: tuple[Query, ...] = ()

    @property
    def documented_path(self) -> str:
        """Its address as OpenAPI writes it."""
        return _PARAMETER.sub(r"{\1}", self.path)


def document(entries: Sequence[Endpoint], version: str, root_path: str = "") -> dict[str, Any]:
    """The document of these routes, which clients find below `root_path`."""
    types: list[Any] = []
    for entry in entries:
        told = (entry.body, entry.answer, entry.stream, entry.error)
        types += [t for t in told if _is_type(t)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, Any] = {}
    for entry in entries:
        operation = _operation(entry, schema_of)
        paths.setdefault(entry.documented_path, {})[entry.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "hypocenter", "version": version},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
        },
        "security": [{_KEY: []}],
    }


def _operation(entry: Endpoint, schema_of: dict[str, Any]) -> dict[str, Any]:
    if _is_type(entry.answer):
        content = {"application/json": {"schema": schema_of[repr(entry.answer)]}}
    else:
        content = {entry.answer: {"schema": {"type": "string"}}}
    if entry.stream is not None:
        # What OpenAPI 3.1 has no word for: each event is `data: ` and this, perhaps with a name.
        events: dict[str, Any] = {"type": "string", "contentSchema": schema_of[repr(entry.stream)]}
        if entry.names_events:
            events = {
                "type": "object",
                "properties": {"event": {"type": "string"}, "data": events},
                "required": ["event", "data"],
            }
        content[entry.stream_media] = {"schema": events}
    error = {
        "description": "what is wrong, in the form that the route's clients read",
        "content": {"application/json": {"schema": schema_of[repr(entry.error)]}},
    }
    made: dict[str, Any] = {
        "summary": entry.what,
        "responses": {
            "200": {"description": entry.what, "content": content},
            "4XX": error,
            "5XX": error,
        },
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(entry.path)
    ]
    parameters += [_query(asked) for asked in entry.query]
    if parameters:
        made["parameters"] = parameters
    if entry.body is not None:
        body = {"schema": schema_of[repr(entry.body)]}
        made["requestBody"] = {"required": True, "content": {"application/json": body}}
    if entry.is_open:
        made["security"] = []
    return made


def _query(asked: Query) -> dict[str, Any]:
    words = {"enum": list(asked.words)} if asked.words else {}
    return {
        "name": asked.name,
        "in": "query",
        "description": asked.what,
        "required": asked.is_required,
        "schema": {"type": "string", **words},
    }


def _is_type(value: object) -> bool:
    return value is not None and not isinstance(value, str)
