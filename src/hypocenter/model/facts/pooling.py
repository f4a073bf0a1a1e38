"""How a text becomes one vector, or a score, of what the last layer says of its tokens.

Keys are those of the GGUF specification; the numbers of `pooling_type` are llama.cpp's
(`include/llama.h`, `llama_pooling_type`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hypocenter.base.errors import MISSING, BadModelFile, BadSetting
from hypocenter.model.facts.families import Family
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.settings.config import POOLINGS

#: The matrices of a head that scores, and of one that makes another vector.
SCORING = ("cls.weight", "cls.output.weight")
DENSE = ("dense_2.weight", "dense_3.weight")
#: Tokens of a text that count: the first, the last, or all.
PooledRows = Literal["first", "last", "all"]
_ROWS: dict[str, PooledRows] = {"none": "all", "mean": "all", "cls": "first", "last": "last"}


@dataclass(frozen=True, slots=True)
class Pooling:
    """How it does; `kind` is one of `POOLINGS`, `rows` are the tokens that count.

    `shapes` are those of the matrices that the host multiplies such a row with, by their names in
    the file, in order. With `rank` the last of them gives a score for each label, of which the
    first one is told.
    """

    kind: str
    rows: PooledRows
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def scores(self) -> bool:
        """Whether a query and a document get a score, and a text no vector."""
        return self.kind == "rank"


def read_pooling(
    file: GGUFFile, name: str, family: Family, width: int, asked: str | None
) -> Pooling | None:
    """What the file of architecture `name` says, or the pooling that is `asked` for in its place;
    encoders that say nothing take the mean.

    Raises BadModelFile for a number that is no pooling or for heads that do not fit, BadSetting
    for what the model has nothing for.
    """
    key, own = f"{name}.pooling_type", "mean" if family.sees_all else None
    if key in file.metadata:
        own = POOLINGS[file.integer(key, low=0, high=len(POOLINGS) - 1)]
    kind = asked or own
    if kind is None:
        return None
    if kind == "cls" != own and not family.sees_all:
        limit = "the first token of this model sees no other one; take mean or last"
        raise BadSetting("pooling", kind, limit)
    shapes = dict(_shapes(file, SCORING if kind == "rank" else DENSE, width))
    if kind == "rank" and not shapes:
        if own == kind:
            limit = "a model with pooling rank needs it"
            raise BadModelFile(file.path, SCORING[0], MISSING, limit)
        raise BadSetting("pooling", kind, "the file has no head that scores; take mean or last")
    of_scores: PooledRows = "first" if family.sees_all else "last"
    return Pooling(kind, _ROWS.get(kind, of_scores), shapes)


def _shapes(
    file: GGUFFile, names: tuple[str, ...], width: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    """The shape of each matrix that is there: the first one takes rows of `width`, the next one
    what that gives."""
    for name in names:
        if (info := file.tensors.get(name)) is None:
            continue
        # Files leave out an axis of 1, as that of one label is.
        shape = (1, *info.shape) if len(info.shape) == 1 else info.shape
        if len(shape) != 2 or shape[1] != width:
            limit = f"must have two axes, the last of {width}"
            raise BadModelFile(file.path, f"{name} shape", info.shape, limit)
        yield name, (shape[0], width)
        width = shape[0]
