"""Random JSON schemas whose every instance is short, from a seed."""

from __future__ import annotations

import string
from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]
MAX_DEPTH = 3
PATTERNS = ("^[a-z]{1,4}$", "^[A-Z][0-9]{2}-[a-f]?$", "^(ab|cd){1,2}$", "^v[0-9]+\\.[0-9]$")


def random_schema(seed: int) -> Schema:
    return _schema(Random(seed), 0)


def _schema(random: Random, depth: int) -> Schema:
    leaves: list[Callable[[Random], Schema]] = [
        _string, _pattern, _integer, _number, _enum, _const, _plain,
    ]  # fmt: skip
    if depth == MAX_DEPTH or (depth and random.random() < 0.5):
        return random.choice(leaves)(random)
    return random.choice([_object, _object, _array, _any_of])(random, depth)


def _name(random: Random) -> str:
    return "".join(random.choices(string.ascii_lowercase + "_é", k=random.randint(1, 5)))


def _string(random: Random) -> Schema:
    low = random.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + random.randint(0, 5)}


def _pattern(random: Random) -> Schema:
    return {"type": "string", "pattern": random.choice(PATTERNS), "maxLength": 9}


def _integer(random: Random) -> Schema:
    low = random.randint(-500, 500)
    return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 1000)}


def _number(random: Random) -> Schema:
    low = random.randint(-40, 40) / 8
    key = random.choice(["maximum", "exclusiveMaximum"])
    high = low + random.randint(1, 80) / 8
    return {"type": "number", "minimum": low, key: high, "multipleOf": 0.125}


def _enum(random: Random) -> Schema:
    return {"enum": random.sample([None, True, 0, -3, 2.5, "a", 'q"\\', "ü", [1, 2], {"k": 1}], 4)}


def _const(random: Random) -> Schema:
    return {"const": random.choice([_name(random), random.randint(-9, 99), None, [], {"a": [1]}])}


def _plain(random: Random) -> Schema:
    return {"type": random.choice(["boolean", "null", ["null", "boolean"]])}


def _object(random: Random, depth: int) -> Schema:
    names = list(dict.fromkeys(_name(random) for _ in range(random.randint(0, 4))))
    return {
        "type": "object",
        "properties": {name: _schema(random, depth + 1) for name in names},
        "required": [name for name in names if random.random() < 0.6],
        "additionalProperties": False,
    }


def _array(random: Random, depth: int) -> Schema:
    low = random.randint(0, 2)
    items = _schema(random, depth + 1)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + 1}


def _any_of(random: Random, depth: int) -> Schema:
    return {"anyOf": [_schema(random, depth + 1) for _ in range(random.randint(2, 3))]}
