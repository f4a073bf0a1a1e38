"""The options of llama.cpp and vLLM, read from the tables beside this file; decides nothing."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

#: Commands whose options are looked up. The order of peers is that in which they are asked.
VERBS = ("run", "serve", "bench")
PEERS = ("llama_cpp", "vllm")
Fate = Literal["renamed", "taken", "refused"]


@dataclass(frozen=True, slots=True)
class PeerOption:
    """What becomes of one option of another program.

    `operand` is what follows it there: nothing, `N`, `[a|b]`, `N...` or `START END`. `values` are
    those that this entry is about, None: all. The words `to` stand in its place, with the value
    where they have {}, and `instead` says what to do.
    """

    fate: Fate
    operand: str
    values: re.Pattern[str] | None
    to: tuple[str, ...]
    instead: str

    def fits(self, value: str) -> bool:
        return self.values is None or self.values.fullmatch(value) is not None


@functools.cache
def words_of(verb: str) -> dict[str, list[PeerOption]]:
    """Each name to its entries, the first that fits first."""
    found: dict[str, list[PeerOption]] = {}
    for peer in PEERS:
        for name, verbs, word in entries_of(peer):
            if verb in verbs:
                found.setdefault(name, []).append(word)
    return found


def entries_of(peer: str) -> Iterator[tuple[str, tuple[str, ...], PeerOption]]:
    """Name, verbs and entry of each option of a peer's table, as it stands there."""
    text = files(__package__).joinpath(f"{peer}.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)
    fates: tuple[Fate, ...] = ("renamed", "taken", "refused")
    for fate in fates:
        for group in table[fate]:
            values = re.compile(group["values"]) if "values" in group else None
            for option in group["options"]:
                names, operand = names_and_operand(option)
                word = PeerOption(
                    fate,
                    operand,
                    values,
                    tuple(group.get("to", "").split()),
                    group.get("instead", ""),
                )
                for name in names:
                    yield name, tuple(group.get("verbs", VERBS)), word


def names_and_operand(option: str) -> tuple[list[str], str]:
    """`-fit, --fit [on|off]` becomes its names and `[on|off]`."""
    found = re.fullmatch(r"(-[^ ,]+(?:, -[^ ,]+)*)(?: ([^ -].*))?", option)
    if found is None:
        raise ValueError(f"{option!r} is no list of names and what follows them")
    return found[1].split(", "), found[2] or ""
