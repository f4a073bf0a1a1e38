"""HTML and SVG elements, in which no text but what `tag` itself makes is ever markup.

Whatever is not `Html` is escaped, whoever forgets to. Knows nothing of a report.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

#: Names of elements and attributes are ours; one of another form is a defect.
_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*")
#: Elements that hold nothing.
_EMPTY = frozenset(("meta", "br", "hr", "rect", "line", "circle", "path", "polyline"))
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

Attribute = str | int | float


class Html(str):
    """Text that is markup already, as `tag`, `join_html` and `escape_text` make it."""

    __slots__ = ()


def spell_out(text: str, *, keep_lines: bool = False) -> str:
    """The text with characters spelled out that steer a terminal, hide or turn the text around."""
    kept = "\n" if keep_lines else ""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def escape_text(part: str, *, keep_lines: bool = False) -> Html:
    """The part as markup; what is markup already stays as it is."""
    if isinstance(part, Html):
        return part
    return Html(escape(spell_out(part, keep_lines=keep_lines), quote=True))


def join_html(parts: Iterable[str], between: str = "") -> Html:
    """The parts one after the other, each escaped."""
    return Html(escape_text(between).join(map(escape_text, parts)))


def tag(name: str, /, *parts: str, **attributes: Attribute) -> Html:
    """An element. `class_` stands for `class`, and an underscore in a name for a hyphen."""
    written = "".join(
        f' {_name(key.rstrip("_").replace("_", "-"))}="{escape(spell_out(str(value)), quote=True)}"'
        for key, value in attributes.items()
    )
    if name in _EMPTY:
        return Html(f"<{_name(name)}{written}/>")
    return Html(f"<{_name(name)}{written}>{join_html(parts)}</{name}>")


def prose(text: str) -> Html:
    """A sentence in which what stands between two backticks is code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one of them stands alone, as itself
        return escape_text(text)
    return join_html(tag("code", part) if number % 2 else part for number, part in enumerate(parts))


def place_of_file(site: str) -> Html:
    """`file:line` as code: the last folder and the file, and the whole of it for who points at it.

    A path of a bundle's own machine is long, and its beginning says the least.
    """
    short = "/".join(site.split("/")[-2:])
    return tag("code", short, title=site) if short != site else tag("code", site)


def shorten(text: str, max_chars: int) -> str:
    """The text, or its beginning and its end with dots between them."""
    text = spell_out(text)
    if len(text) <= max_chars:
        return text
    head = max_chars * 2 // 3
    return f"{text[:head]}…{text[head + 1 - max_chars :]}"


def bytes_text(number: int) -> str:
    """`428 bytes`, `2 KiB`, `1.5 GiB`."""
    if number < 1024:
        return f"{number} byte{'' if number == 1 else 's'}"
    power = min((number.bit_length() - 1) // 10, len(_UNITS))
    return f"{number / 1024**power:.4g} {_UNITS[power - 1]}"


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an element or attribute")
    return name
