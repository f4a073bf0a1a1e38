"""The part of a page about memory: the picture around the wrong address, and that memory's life."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypocenter.base.wording import count_text
from hypocenter.doctor.page.address_life import Life, LifeEvent
from hypocenter.doctor.page.address_picture import address_picture, where_text
from hypocenter.doctor.page.address_space import AddressSpace, BlockState
from hypocenter.doctor.page.markup import Html, bytes_text, join_html, place_of_file, tag


def memory_html(space: AddressSpace | None, lives: Sequence[Life]) -> Html:
    """Nothing where no address is known."""
    if space is None:
        return Html()
    lead = [tag("h2", "The memory around it")]
    wrong = space.wrong
    if wrong is not None:
        lead.append(
            tag(
                "p",
                "The access goes to ",
                tag("code", f"{wrong.start:#x}"),
                f": {where_text(wrong, space.blocks)}. It is known {wrong.how}.",
            )
        )
    legend = "Addresses grow downwards; heights are not to scale."
    if any(block.state is BlockState.FREED for block in space.blocks):
        legend += " Dashed: freed by then."
    if space.num_left_out:
        legend += f" {count_text(space.num_left_out, 'other block')} not drawn."
    picture = tag("div", address_picture(space), tag("p", legend, class_="note"))
    told = tag("div", *map(_life, lives)) if lives else ""
    return join_html((*lead, tag("div", picture, told, class_="two")))


def _life(life: Life) -> Html:
    rows = map(_change, life.changes)
    title = f"The life of {life.name}"
    size = tag("p", f"{bytes_text(life.num_bytes)} at {life.address:#x}", class_="note")
    return join_html((tag("h3", title), size, tag("ol", *rows, class_="life")))


def _change(change: LifeEvent) -> Html:
    attributes = {"class_": "wrong"} if change.is_wrong else {}
    return tag("li", *_parts(change), **attributes)


def _parts(change: LifeEvent) -> Iterator[str]:
    yield tag("b", change.verb)
    if change.text:
        yield f" {change.text}"
    if change.site:
        yield tag("small", place_of_file(change.site))
