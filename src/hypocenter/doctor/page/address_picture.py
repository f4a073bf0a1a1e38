"""Draws the memory around a wrong address: addresses grow downwards, and gaps are cut short.

Heights grow with the logarithm of a size, so that a flag and a weight fit one picture.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hypocenter.doctor.page.address_space import AddressSpace, BlockState, MemoryBlock, WrongAddress
from hypocenter.doctor.page.markup import Attribute, Html, bytes_text, shorten, tag

# In pixels of a picture that is as wide as a phone.
_WIDTH, _LEFT, _COLUMN, _STEP, _LABELS = 360, 6, 34, 40, 142
_LABEL_HEIGHT, _NEAR_GAP, _CUT_GAP, _WRONG_HEIGHT = 31, 14, 34, 20
_LEAST, _MOST = 26, 58
_MAX_COLUMNS, _NAME_CHARS, _DETAIL_CHARS = 3, 28, 32
_CLASSES = {BlockState.LIVE: "live", BlockState.FREED: "freed", BlockState.HOST: "host"}
#: A gap of at most so many bytes is drawn whole.
_NEAR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Label:
    """Two lines of text that belong to height `y`; `at` is where their line begins."""

    y: float
    at: float
    first: str
    second: str
    kind: str


def address_picture(space: AddressSpace) -> Html:
    """An SVG, with a title for who cannot see it."""
    heights = _heights(space)
    columns = _columns(space.blocks)
    shapes = [tag("g", *_gaps(space, heights))]
    labels = []
    for block in space.blocks:
        shapes.append(_box(block, columns[block], heights))
        labels.append(_block_label(block, columns[block], heights))
    if space.wrong is not None:
        top = heights[space.wrong.start]
        width = _LABELS - _LEFT - 4
        shapes.append(
            tag("rect", x=_LEFT - 4, y=top, width=width, height=_WRONG_HEIGHT, class_="wrong")
        )
        place = where_text(space.wrong, space.blocks)
        middle = top + 2  # so that its label stands before those of what begins there
        name = f"{space.wrong.start:#x}"
        labels.append(_Label(middle, width + 2, name, place, "wrong-label"))
    drawn, bottom = _labels(labels)
    height = math.ceil(max(bottom, *heights.values()) + 8)
    title = tag("title", "Memory around the wrong address; the list beside it says the same")
    pattern = tag(
        "pattern",
        tag("path", d="M0 6L6 0", class_="hatch"),
        id="hatch",
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
    )
    return tag(
        "svg",
        title,
        tag("defs", pattern),
        *shapes,
        *drawn,
        viewBox=f"0 0 {_WIDTH} {height}",
        class_="memory",
        role="img",
    )


def where_text(wrong: WrongAddress, blocks: Sequence[MemoryBlock]) -> str:
    """What the wrong address is to the blocks around it."""
    whole = [block for block in blocks if not block.is_view]
    inside = [block for block in whole if block.start <= wrong.start < block.end]
    for block in sorted(inside, key=lambda block: not block.is_blamed)[:1]:
        state = "" if block.state is BlockState.LIVE else f", {block.state}"
        return f"byte {wrong.start - block.start} of {block.name}{state}"
    below = max((b for b in whole if b.end <= wrong.start), key=lambda b: b.end, default=None)
    above = min((b for b in whole if b.start > wrong.start), key=lambda b: b.start, default=None)
    blamed = next((block for block in whole if block.is_blamed), None)
    if blamed is not None and blamed not in (below, above):
        below, above = (blamed, None) if blamed.end <= wrong.start else (None, blamed)
    elif blamed is not None:
        below, above = (blamed, None) if blamed is below else (None, blamed)
    if below is not None:
        distance = wrong.start - below.end
        behind = f"{bytes_text(distance)} past" if distance else "right behind"
        return f"{behind} the end of {below.name}"
    if above is not None:
        return f"{bytes_text(above.start - wrong.start)} before {above.name}"
    return "in nothing that is known"


def _heights(space: AddressSpace) -> dict[int, float]:
    """For each address at which something begins or ends, how far down it is drawn."""
    wrong = space.wrong
    bounds = {bound for block in space.blocks for bound in (block.start, block.end)}
    if wrong is not None:
        bounds |= {wrong.start, wrong.start + wrong.num_bytes}
    ordered = sorted(bounds)
    heights, y = {ordered[0]: 12.0}, 12.0
    for low, high in itertools.pairwise(ordered):
        if wrong is not None and wrong.start <= low < wrong.start + wrong.num_bytes:
            y += _WRONG_HEIGHT
        elif any(block.start <= low < block.end for block in space.blocks):
            y += min(_MOST, _LEAST + 2 * math.log2(max(1, (high - low) / 64)))
        else:
            y += _NEAR_GAP if high - low <= _NEAR_BYTES else _CUT_GAP
        heights[high] = y
    return heights


def _columns(blocks: Sequence[MemoryBlock]) -> dict[MemoryBlock, int]:
    """Blocks that lie at one place stand side by side; `blocks` are in order."""
    ends = [0] * _MAX_COLUMNS
    columns = {}
    for block in blocks:
        free = (n for n in range(_MAX_COLUMNS) if ends[n] <= block.start)
        columns[block] = column = next(free, _MAX_COLUMNS - 1)
        ends[column] = block.end
    return columns


def _gaps(space: AddressSpace, heights: Mapping[int, float]) -> Iterator[Html]:
    """A sign that much is left out, where nothing is known between two blocks."""
    ordered = sorted(heights)
    wrong = space.wrong
    for low, high in itertools.pairwise(ordered):
        is_wrong = wrong is not None and wrong.start <= low < wrong.start + wrong.num_bytes
        is_held = any(block.start <= low < block.end for block in space.blocks)
        if is_wrong or is_held or high - low <= _NEAR_BYTES:
            continue
        middle = (heights[low] + heights[high]) / 2
        points = " ".join(
            f"{_LEFT + 8 * n},{middle + (3 if n % 2 else -3):.1f}" for n in range(_COLUMN // 8 + 1)
        )
        yield tag("polyline", points=points, class_="cut")
        text = f"{bytes_text(high - low)} apart"
        yield tag("text", text, x=_LEFT + _COLUMN + 8, y=f"{middle + 4:.1f}", class_="small")


def _box(block: MemoryBlock, column: int, heights: Mapping[int, float]) -> Html:
    top, bottom = heights[block.start], heights[block.end]
    kind = {BlockState.LIVE: "live", BlockState.FREED: "freed", BlockState.HOST: "host"}[
        block.state
    ]
    blamed = " blamed" if block.is_blamed else ""
    parts = tag("title", f"{block.name}: {block.state}, {block.start:#x} to {block.end:#x}")
    at: dict[str, Attribute] = {
        "x": _LEFT + _STEP * column,
        "y": f"{top:.1f}",
        "width": _COLUMN,
    }
    size = f"{max(3.0, bottom - top):.1f}"
    rect = tag("rect", **at, height=size, class_=f"block {kind}{blamed}", rx=2)
    over = tag("rect", **at, height=size, fill="url(#hatch)", rx=2) if kind == "freed" else ""
    return tag("g", parts, rect, over)


def _block_label(block: MemoryBlock, column: int, heights: Mapping[int, float]) -> _Label:
    top, bottom = heights[block.start], heights[block.end]
    state = "" if block.state is BlockState.LIVE else f"{block.state}, "
    given = f", is {', '.join(block.arguments)}" if block.arguments else ""
    part = "tensor in it, " if block.is_view else ""
    return _Label(
        top + min(10, (bottom - top) / 2),
        _LEFT + _STEP * column + _COLUMN,
        block.name,
        f"{state}{part}{bytes_text(block.num_bytes)}{given}",
        "blamed-label" if block.is_blamed else "",
    )


def _labels(labels: list[_Label]) -> tuple[list[Html], float]:
    """The texts on the right, none over another, each with a line to what it names."""
    drawn, free = [], 2.0
    for label in sorted(labels, key=lambda label: label.y):
        y = max(label.y - 6, free)
        free = y + _LABEL_HEIGHT
        line = f"M{label.at:.1f} {label.y:.1f}L{_LABELS - 8} {y + 8:.1f}L{_LABELS - 3} {y + 8:.1f}"
        first = shorten(label.first, _NAME_CHARS)
        second = shorten(label.second, _DETAIL_CHARS)
        drawn.append(
            tag(
                "g",
                tag("path", d=line, class_="leader"),
                tag("text", first, x=_LABELS, y=f"{y + 11:.1f}", class_="name"),
                tag("text", second, x=_LABELS, y=f"{y + 24:.1f}", class_="small"),
                class_=f"label {label.kind}",
            )
        )
    return drawn, free
