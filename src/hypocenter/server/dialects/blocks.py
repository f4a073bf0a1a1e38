"""An answer as blocks, one behind the other: a thought, a text, a call of a tool.

A whole answer is made of the same blocks as a stream, so both say the same.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hypocenter.base.results import join_calls
from hypocenter.conversation.cut_json import whole_members
from hypocenter.server.inquiry import Choice
from hypocenter.wire.messages import Piece


class BlockKind(enum.Enum):
    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


class BlockChange(enum.Enum):
    """What became of a block."""

    BEGINS = "begins"
    GROWS = "grows"
    ENDS = "ends"


@dataclass(eq=False, slots=True)
class SpokenBlock:
    """`index` is its place in the answer; a call has the name of its tool and an id."""

    index: int
    kind: BlockKind
    name: str = ""
    call_id: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What it says so far; of a call its arguments."""
        return "".join(self.parts)


#: A block, what became of it, and the text that it grew by.
BlockNews = tuple[BlockChange, SpokenBlock, str]


class SpokenBlocks:
    """The blocks of one answer, made of its pieces in their order."""

    def __init__(self) -> None:
        self.all: list[SpokenBlock] = []
        self._open: SpokenBlock | None = None
        #: Of calls: their number in the answer.
        self._call = -1

    def take(self, choice: Choice, piece: Piece) -> list[BlockNews]:
        """What a piece begins, adds to and ends. `choice` has the ids of its calls."""
        news: list[BlockNews] = []
        if piece.reasoning:
            news += self._grow(BlockKind.THOUGHT, piece.reasoning)
        if piece.text:
            news += self._grow(BlockKind.TEXT, piece.text)
        for call in join_calls(piece.calls):
            if call.name:
                news += self._begin(BlockKind.CALL, call.name, choice.call_ids[call.index])
                self._call = call.index
            if call.arguments and call.index == self._call:
                news += self._grow(BlockKind.CALL, call.arguments)
        if piece.ending is not None:
            news += self._end()
        return news

    def _begin(self, kind: BlockKind, name: str = "", call_id: str = "") -> list[BlockNews]:
        ended = self._end()
        self._open = SpokenBlock(len(self.all), kind, name, call_id)
        self.all.append(self._open)
        return [*ended, (BlockChange.BEGINS, self._open, "")]

    def _grow(self, kind: BlockKind, text: str) -> list[BlockNews]:
        news = [] if self._open is not None and self._open.kind is kind else self._begin(kind)
        assert self._open is not None, "one has begun"
        self._open.parts.append(text)
        return [*news, (BlockChange.GROWS, self._open, text)]

    def _end(self) -> list[BlockNews]:
        ended, self._open = self._open, None
        return [] if ended is None else [(BlockChange.ENDS, ended, "")]


def input_of(arguments: str, *, is_cut: bool) -> dict[str, Any] | None:
    """The object that a call's arguments are; None where they are none.

    Of those of an answer that `is_cut` what is whole.
    """
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return whole_members(arguments) if is_cut else None
