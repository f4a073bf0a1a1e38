"""Bundles with a text that would be markup wherever a text may stand, and their pages."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser
from typing import Any

import msgspec
from recorded.bundles import DEVICE, Run, crash, decoder, inputs, tensors_of_decoder

from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.page.page import report_html
from hypocenter.doctor.report_parts import Origin
from hypocenter.record.bundle import Bundle

#: All that a page is made of.
ELEMENTS = frozenset((
    "html", "head", "meta", "title", "style", "body", "header", "main", "h1", "h2", "h3", "p", "b",
    "i", "span", "code", "small", "strong", "mark", "div", "ul", "ol", "li", "dl", "dt", "dd",
    "pre", "figure", "figcaption", "details", "summary", "svg", "g", "defs", "pattern", "rect",
    "path", "polyline", "text",
))  # fmt: skip
ATTRIBUTES = frozenset((
    "lang", "charset", "http-equiv", "content", "name", "class", "title", "id", "role", "tabindex",
    "viewbox", "d", "points", "x", "y", "width", "height", "rx", "fill", "patternunits",
))  # fmt: skip
EMPTY = frozenset(("meta", "rect", "path", "polyline"))


class PageReader(HTMLParser):
    """Elements, attributes and text of a page; notes what is not closed in its order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        if self._open:
            raise ValueError(f"{self._open} are not closed")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in EMPTY:
            raise ValueError(f"{tag} holds nothing")
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            raise ValueError(f"{tag} is closed, and was not open last")

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def page_problem(page: str) -> str:
    """What of a page is none of ours; "" where all is."""
    try:
        read = PageReader(page)
    except ValueError as error:
        return str(error)
    others = [*(set(read.elements) - ELEMENTS), *({n for n, _ in read.attributes} - ATTRIBUTES)]
    raw = {c for c in page if not c.isprintable() and c != "\n"}
    return f"{others} {raw}" if others or raw else ""


HOSTILE = (
    "<script>alert(1)</script>", "</code></style><img src=x onerror=alert(1)>", "\" onload=\"x",
    "' autofocus '", "--><svg onload=x>", "]]><b>", "&lt;i&gt; &amp;", "`<b>` `", "a\nb\x00\x1b[2J",
    "\u202egnp.exe", "javascript:alert(1)", "${x}{{y}}",
)  # fmt: skip


def hostile_bundle(text: str) -> Bundle:
    """A crash in whose records `text` stands wherever a text may stand."""
    run = Run()
    tensors_of_decoder(run, positions={"dtype": "I16"})
    plan = decoder(run)
    run.run(plan, inputs())
    run.free("x", site=text)
    run.copy_out("out")
    bundle = run.bundle(crash(run.tensors["cos"].address + 4 * 16 * 65536))

    def name(record: Any, **fields: Any) -> Any:
        return msgspec.structs.replace(record, **fields)

    launches = tuple(
        name(launch, kernel=f"{launch.kernel}{text}", function=text, site=text, stream=text)
        if number != 1
        else name(launch, site=text, constants={**launch.constants, text: text})
        for number, launch in enumerate(bundle.plans[0].launches)
    )
    comment = text.replace("\n", "").replace("\0", "")
    sources = tuple(name(source, text=f"{source.text}\n# {comment}") for source in bundle.sources)
    events = tuple(
        name(event, allocation=name(event.allocation, name=text, owner=text, site=text))
        if hasattr(event, "allocation") and not isinstance(event.allocation, int)
        else event
        for event in bundle.events
    )
    fault = name(bundle.fault, message=text, call=text, error=text, stack=text)
    forged: Bundle = name(
        bundle, plans=(name(bundle.plans[0], name=text, launches=launches),), sources=sources,
        events=events, fault=fault, stderr=text, kernel_log=(text,), command=(text, text),
        environment={text: text}, platform=text, device=DEVICE,
        tensors=tuple(name(t, name=f"{t.name}{text}", owner=text) for t in bundle.tensors),
    )  # fmt: skip
    return forged


def page_of(bundle: Bundle) -> str:
    # Replays of forged sources are another test's.
    return report_html(bundle, diagnose(bundle, without=("replay",)), Origin("b"))
