"""Adapters as people name them: files with scales, and which of them a request has."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from hypocenter.base.errors import BadSetting

#: What adapters count, by their names.
Scales = tuple[tuple[str, float], ...]
#: Of one engine.
MAX_ADAPTERS = 64
MAX_SCALE = 1000.0
_NAME = re.compile(r"[^/=]{1,100}")


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """A file, the name by which requests ask for it, and what it counts where they do not."""

    name: str
    path: str
    scale: float

    def written_with(self, path: str) -> str:
        """The same of a file at another path, as `read_choice` reads it."""
        named = self.name == _stem(path)
        return f"{'' if named else f'{self.name}='}{path}:{self.scale!r}"


def _stem(path: str) -> str:
    return PurePath(path).name.removesuffix(".gguf")


def read_choice(text: str) -> AdapterChoice:
    """`[NAME=]FILE[:SCALE]`; raises BadSetting. The name is that of the file without .gguf, and a
    file that has = in its name is written with its folder."""
    name, equals, rest = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        name, rest = "", text
    head, colon, tail = rest.rpartition(":")
    path, scale = rest, 1.0
    if colon:
        with contextlib.suppress(ValueError):  # else a colon of the file's own name
            scale, path = float(tail), head
    if not path:
        raise BadSetting("lora", text, "must be a file: FILE, FILE:SCALE or NAME=FILE:SCALE")
    _require_scale(text, scale)
    return AdapterChoice(name or _stem(path), path, scale)


def adapter_files(given: object) -> tuple[str, ...]:
    """One text or several as a tuple, each as `read_choice` reads it; raises BadSetting."""
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise BadSetting("lora", given, "must be FILE[:SCALE], or a sequence of such texts")
    if len(texts) > MAX_ADAPTERS:
        limit = f"at most {MAX_ADAPTERS} adapters may be open; leave some out"
        raise BadSetting("lora", len(texts), limit)
    seen: dict[str, str] = {}
    for text in texts:
        choice = read_choice(text)
        if choice.name in seen:
            limit = f"{seen[choice.name]!r} has the name {choice.name!r} too; write NAME={text}"
            raise BadSetting("lora", text, limit)
        seen[choice.name] = text
    return tuple(texts)


def adapter_scales(given: object) -> Scales:
    """Pairs of a name and a scale, of a name, of several, or of a mapping; raises BadSetting."""
    items: Any = (given,) if isinstance(given, str) else given
    if isinstance(items, Mapping):
        items = list(items.items())
    if not isinstance(items, Sequence):
        raise BadSetting("lora", given, "must be a name, several, or scales by name")
    if len(items) > MAX_ADAPTERS:
        raise BadSetting("lora", len(items), f"a request has at most {MAX_ADAPTERS} adapters")
    found: dict[str, float] = {}
    for item in items:
        name, scale = (item, 1.0) if isinstance(item, str) else _pair(given, item)
        if name in found:
            raise BadSetting("lora", name, "is named twice; leave one out")
        found[name] = _require_scale(name, scale)
    return tuple(found.items())


def _pair(given: object, item: object) -> tuple[str, float]:
    if isinstance(item, Sequence) and len(item) == 2:
        name, scale = item
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if isinstance(name, str) and is_number:
            return name, float(scale)
    raise BadSetting("lora", given, "must be a name, several, or scales by name")


def _require_scale(what: str, scale: float) -> float:
    if not math.isfinite(scale) or abs(scale) > MAX_SCALE:
        limit = f"has the scale {scale:g}, which must be from {-MAX_SCALE:g} to {MAX_SCALE:g}"
        raise BadSetting("lora", what, limit)
    return scale
