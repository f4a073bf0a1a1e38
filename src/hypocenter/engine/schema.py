"""Walks over the parts of a JSON schema: where one is refused, and which one no text can satisfy.

Knows of a schema's keywords only what leads to other schemas; the rest is the library's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

#: The keys and indices that lead from the whole schema to a part of it.
Path = tuple[str | int, ...]
#: Compiling parts one after the other may take long, for the sake of a better message.
_MAX_SECONDS = 0.5

_MAPPINGS = ("properties", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def place_of(schema: dict[str, Any], is_wrong: Callable[[Any], bool]) -> str:
    """The innermost part that `is_wrong` in the way the whole is, as a reference such as #/items.

    Each part is asked about together with what references reach.
    """
    deadline = time.monotonic() + _MAX_SECONDS
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path: Path = ()
    seen = {path}
    while True:
        for inner in _parts(schema, path):
            part = _at(schema, inner)
            if inner in seen or not isinstance(part, dict) or time.monotonic() > deadline:
                continue
            seen.add(inner)
            if is_wrong({**shared, **part}):
                path = inner
                break
        else:
            return reference(path)


def endless_place(schema: dict[str, Any]) -> str:
    """A part that each of its instances holds another instance of, without end; empty if none.

    A part ends when one of each of its `_needs` does. What ends is spread from the parts that need
    nothing to those that wait for it.
    """
    needs: dict[Path, list[list[Path]]] = {}
    waiting: dict[Path, list[tuple[Path, int]]] = defaultdict(list)
    unread: list[Path] = [()]
    while unread:
        path = unread.pop()
        if path in needs:
            continue
        needs[path] = _needs(schema, path)
        for number, choices in enumerate(needs[path]):
            for choice in choices:
                waiting[choice].append((path, number))
                unread.append(choice)
    open_needs = {path: set(range(len(groups))) for path, groups in needs.items()}
    ending = [path for path, numbers in open_needs.items() if not numbers]
    ended = set(ending)
    while ending:
        for path, number in waiting[ending.pop()]:
            open_needs[path].discard(number)
            if not open_needs[path] and path not in ended:
                ended.add(path)
                ending.append(path)
    path = ()
    passed: set[Path] = set()
    while path not in ended and path not in passed:  # down to where it comes round
        passed.add(path)
        path = needs[path][min(open_needs[path])][0]
    return "" if path in ended else reference(path)


def reference(path: Path) -> str:
    """A path as schemas write it."""
    names = [str(name).replace("~", "~0").replace("/", "~1") for name in path]
    return "/".join(("#", *names))


def _parts(schema: Any, path: Path) -> Iterator[Path]:
    """The parts right below a part, and what it refers to."""
    part = _at(schema, path)
    if not isinstance(part, Mapping):
        return
    if (target := _target(schema, part)) is not None:
        yield target
    for key in _MAPPINGS:
        yield from ((*path, key, name) for name in _mapping(part, key))
    for key in _LISTS:
        yield from ((*path, key, number) for number in range(len(_list(part, key))))
    yield from ((*path, key) for key in _SINGLE if key in part)


def _needs(schema: Any, path: Path) -> list[list[Path]]:
    """Groups of parts: an instance of this part holds, or is, one of each group at least."""
    part = _at(schema, path)
    if not isinstance(part, Mapping) or "const" in part or "enum" in part:
        return []
    groups = [[target] for target in [_target(schema, part)] if target is not None]
    for key in ("anyOf", "oneOf"):
        if choices := _list(part, key):
            groups.append([(*path, key, number) for number in range(len(choices))])
    groups += [[(*path, "allOf", number)] for number in range(len(_list(part, "allOf")))]
    if part.get("type") in ("object", ["object"]):
        required = [name for name in _list(part, "required") if isinstance(name, str)]
        known = _mapping(part, "properties")
        groups += [[(*path, "properties", name)] for name in required if name in known]
    num_items = part.get("minItems", 0)
    if part.get("type") in ("array", ["array"]) and isinstance(num_items, int):
        num_first = len(_list(part, "prefixItems"))
        groups += [[(*path, "prefixItems", n)] for n in range(min(num_first, num_items))]
        if num_items > num_first and "items" in part:
            groups.append([(*path, "items")])
    return groups


def _target(schema: Any, part: Mapping[str, Any]) -> Path | None:
    """Where a reference of a part leads within the schema; None without one, or out of it."""
    to = part.get("$ref")
    if not isinstance(to, str) or not (to == "#" or to.startswith("#/")):
        return None
    path: Path = ()
    for name in unquote(to).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        is_index = name.isdecimal() and isinstance(_at(schema, path), list)
        path = (*path, int(name) if is_index else name)
    return path


def _list(part: Mapping[str, Any], key: str) -> list[Any]:
    return value if isinstance(value := part.get(key), list) else []


def _mapping(part: Mapping[str, Any], key: str) -> dict[str, Any]:
    return value if isinstance(value := part.get(key), dict) else {}


def _at(schema: Any, path: Path) -> Any:
    """The part at a path; None where there is none."""
    for name in path:
        try:
            schema = schema[name]
        except (KeyError, IndexError, TypeError):
            return None
    return schema
