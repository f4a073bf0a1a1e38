"""Tells a rendered prompt's control tokens that the template wrote from those a user wrote.

A user who types `<|im_start|>system` must not open a system turn. Cutting the prompt at every
message would keep such text apart, but it would also change how the tokenizer merges ordinary text
at the cuts, and templates trim, split and search what they are given. So instead:

A template is rendered twice. For the second time, the first and the last character of each control
token's text (such as `<` and `>`) are replaced, wherever they occur in a message, by stand-ins:
characters of Unicode's private use plane 15 that nothing else in the prompt uses, one for each.
When the second text, with the stand-ins put back, is the first, then the two differ exactly at the
user's characters. A control token with such a character is the user's, and becomes a part of its
own to be encoded as plain text. Everything else stays in one piece and is encoded as usual.

When the texts differ, the template looks for one of the replaced characters (such as `</think>`
in an answer), and the next choice of characters is tried: the second and the second last. When
that fails too, the prompt is refused; nothing is guessed.

The rule is therefore: a control token is the template's when the template wrote its marked
characters. A template that puts a message's text inside a control token would break it; roles,
which some templates do put there, are restricted in `chat.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence

from hypocenter.base.errors import TemplateError

MAX_CONTROL_CHARS = 128
PRIVATE_USE = range(0xF0000, 0xFFFFE)


class ControlTexts:
    """The texts of a vocabulary's control tokens, ready to be searched for.

    `choices` holds the sets of characters to be replaced, in the order in which to try them.
    Raises TemplateError for a text above `MAX_CONTROL_CHARS` characters.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted(set(texts) - {""})
        longest = max(known, key=len, default="")
        if len(longest) > MAX_CONTROL_CHARS:
            raise TemplateError(
                f"control token {longest[:40]!r}... has {len(longest)} characters, "
                f"but at most {MAX_CONTROL_CHARS} are allowed"
            )
        self.choices = (
            frozenset(text[index] for text in known for index in (0, -1)),
            frozenset(text[index] for text in known for index in (1 % len(text), -2 % len(text))),
        )
        # Looking ahead without consuming finds texts that overlap.
        self._pattern = re.compile(f"(?=({_any_of(known)}))") if known else None

    def occurrences(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of the longest control text at each place where one starts."""
        if self._pattern is None:
            return []
        return [match.span(1) for match in self._pattern.finditer(text)]


def stand_ins(characters: Collection[str], texts: Iterable[str]) -> dict[int, int]:
    """A table for `str.translate` from each character to one that no text uses.

    Raises TemplateError when the texts leave too few.
    """
    used = set().union(*texts)
    free = (code for code in PRIVATE_USE if chr(code) not in used)
    table = dict(zip(map(ord, sorted(characters)), free, strict=False))
    if len(table) < len(characters):
        raise TemplateError(
            f"messages use all but {len(table)} of Unicode's private use characters of plane 15, "
            f"but {len(characters)} are needed; remove some from the messages"
        )
    return table


def put_back(text: str, table: dict[int, int]) -> str:
    return text.translate({code: original for original, code in table.items()})


def split(
    plain: str, marked: str, occurrences: Sequence[tuple[int, int]]
) -> list[tuple[str, bool]]:
    """Parts (text, is_template) that join to `plain`, which is `marked` with stand-ins put back.

    `is_template` is False for the control texts in which the two differ, and True for all else.
    """
    assert len(plain) == len(marked)
    parts: list[tuple[str, bool]] = []
    done = 0
    for start, end in occurrences:
        if plain[start:end] == marked[start:end] or end <= done:
            continue
        start = max(start, done)
        parts += [(plain[done:start], True), (plain[start:end], False)]
        done = end
    parts.append((plain[done:], True))
    return [part for part in parts if part[0]]


def _any_of(texts: Sequence[str]) -> str:
    """A regular expression for the longest of the sorted texts, without trying them one by one.

    A vocabulary may have a thousand control tokens and a prompt a million `<`.
    """
    # Of sorted texts, the first and the last share the least.
    prefix = _common_prefix(texts[0], texts[-1])
    rests = [text[len(prefix) :] for text in texts]
    groups = itertools.groupby(filter(None, rests), key=lambda rest: rest[0])
    branches = [_any_of(list(group)) for _, group in groups]
    if not branches:
        return re.escape(prefix)
    optional = "?" if "" in rests else ""
    return f"{re.escape(prefix)}(?:{'|'.join(branches)}){optional}"


def _common_prefix(first: str, last: str) -> str:
    for index, (one, other) in enumerate(zip(first, last, strict=False)):
        if one != other:
            return first[:index]
    return first if len(first) < len(last) else last
