"""The pages' files as they are sent, and to whom; `tests/page/` has the browser."""

from __future__ import annotations

import asyncio
import hashlib
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import pytest
from repository import ROOT
from test_strangers import Fake, bearer, hosting_of

from hypocenter.server.app import make_app
from hypocenter.server.faults import FaultKeeper
from hypocenter.server.pages.links import ReportLinks
from hypocenter.server.pages.pages import page_files

ASSETS = ROOT / "src/hypocenter/assets/page"
#: Of the library, as it was published (`src/hypocenter/assets/page/LIBRARY.md`).
LIBRARY_SHA256 = "bdcbd9abdf2c77c5c45326eab42191e949222d479d0d5f69467387a77040cb55"
MAX_BYTES = 100_000
HTML = ("Accept", "text/html,application/xhtml+xml,*/*;q=0.8")
VISIT = (("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document"))


@dataclass(frozen=True)
class Sent:
    status: int
    headers: dict[str, str]
    body: bytes


def ask(
    app: Any, path: str, *headers: tuple[str, str], method: str = "GET", query: str = ""
) -> Sent:
    """What an application answers."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    named = [(b"host", b"localhost")] * all(name != "Host" for name, _ in headers)
    named += [(name.lower().encode(), value.encode()) for name, value in headers]
    scope: dict[str, Any] = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": query.encode(), "headers": named, "client": ("127.0.0.1", 9),
        "server": None, "scheme": "http", "http_version": "1.1", "root_path": "", "state": {},
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    told = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return Sent(sent[0]["status"], told, b"".join(one.get("body", b"") for one in sent))


@pytest.fixture(scope="module")
def keyed() -> Any:
    return Fake(api_keys=["one"], admin_key="boss").app


class _Elements(HTMLParser):
    """A document's elements with their attributes, and texts within scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style") and data.strip():
            self.inline.append(data)


@pytest.mark.parametrize("path", ["/", "/live"])
def test_a_browser_gets_a_page_without_a_key_and_a_client_what_it_got(
    keyed: Any, path: str
) -> None:
    page = ask(keyed, path, HTML)
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for headers in ([], [("Accept", "*/*")], [("Accept", "application/json")]):
        assert ask(keyed, path, *headers).status == 401
        assert ask(keyed, path, bearer("one"), *headers).status == 404
    assert ask(keyed, path, HTML, bearer("one"), method="POST").status == 404
    without = Fake().service
    without.has_pages = False
    assert ask(make_app(hosting_of(without)), path, HTML).status == 404
    assert ask(Fake(root_path="/llm").app, f"/llm{path}", HTML).body == page.body


def test_every_file_is_sent_with_its_type_and_the_policy(keyed: Any) -> None:
    types = {"html": "text/html", "css": "text/css", "mjs": "text/javascript", "svg": "image/svg"}
    assert {name.split(".")[1] for name in page_files()} == set(types)
    for name in page_files():
        sent = ask(keyed, f"/page/{name}")
        assert sent.status == 200
        assert sent.headers["content-type"].startswith(types[name.split(".")[1]])
        assert sent.body == (ASSETS / name).read_bytes()
        policy = dict(
            one.split(" ", 1) for one in sent.headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == "'none'"
        assert policy["trusted-types"] == policy["frame-ancestors"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}
        assert "unsafe" not in str(policy)
        assert sent.headers["x-content-type-options"] == "nosniff"


def test_a_file_that_has_not_changed_is_not_sent_again(keyed: Any) -> None:
    etag = ask(keyed, "/page/chat.mjs").headers["etag"]
    again = ask(keyed, "/page/chat.mjs", ("If-None-Match", f'"x", W/{etag}'))
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
    assert ask(keyed, "/page/chat.mjs", ("If-None-Match", '"x"')).status == 200
    assert ask(keyed, "/page/chat.mjs", method="HEAD").headers["etag"] == etag


@pytest.mark.parametrize(
    "name", ["", "nothing.mjs", "../api.mjs", "LIBRARY.md", "../../__init__.py"]
)
def test_nothing_else_is_a_file_of_the_pages(keyed: Any, name: str) -> None:
    assert ask(keyed, f"/page/{name}", bearer("one")).status == 404
    assert ask(keyed, f"/page/{name}").status == 401


def test_a_link_of_another_site_leads_to_a_page_and_to_nothing_else(keyed: Any) -> None:
    cross = ("Sec-Fetch-Site", "cross-site")
    assert ask(keyed, "/", HTML, cross, *VISIT).status == 200
    assert ask(keyed, "/", HTML, cross).status == 403
    framed = (("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "iframe"))
    assert ask(keyed, "/", HTML, cross, *framed).status == 403
    assert ask(keyed, "/page/chat.mjs", cross).status == 403
    assert ask(keyed, "/v1/models", bearer("one"), cross, *VISIT).status == 403
    local = Fake(is_local=True).app
    assert ask(local, "/", HTML, ("Host", "evil.example")).status == 403
    assert ask(local, "/page/chat.mjs", ("Host", "evil.example")).status == 403


def test_a_page_shows_that_the_model_is_loaded(keyed: Any) -> None:
    fake = Fake()
    fake.facts = cast(Any, None)
    assert ask(fake.app, "/", HTML).status == 200
    assert ask(fake.app, "/page/chat.mjs").status == 200
    assert ask(fake.app, "/v1/models").status == 503


def test_files_of_a_page_fill_no_log(keyed: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hypocenter.access")
    ask(keyed, "/page/chat.mjs")
    ask(keyed, "/", HTML)
    ask(keyed, "/page/nothing.mjs")
    assert [text.split()[2:4] for text in caplog.messages] == [
        ["/", "200"],
        ["/page/nothing.mjs", "401"],
    ]


def test_the_pages_are_small_and_load_nothing_from_elsewhere() -> None:
    files = {name: file.body.decode() for name, file in page_files().items()}
    assert sum(len(text.encode()) for text in files.values()) < MAX_BYTES
    for name, text in files.items():
        urls = set(re.findall(r"\w+://[\w./-]+", text)) - {
            "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml",
            "http://www.w3.org/1998/Math/MathML",
        }  # fmt: skip
        assert urls == set(), name
        for module in re.findall(r"from '([^']+)'", text):
            assert module.removeprefix("./") in files, name
        if name.endswith(".mjs") and name != "preact.mjs":
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", text
            )
            assert "dangerouslySet" not in text


@pytest.mark.parametrize("name", ["index.html", "live.html"])
def test_a_document_has_a_language_a_title_and_nothing_inline(name: str) -> None:
    text = (ASSETS / name).read_text()
    elements = _Elements(text)
    assert elements.inline == []
    assert text.startswith("<!DOCTYPE html>\n")
    tags = [tag for tag, _ in elements.found]
    assert {"html", "title", "noscript"} <= set(tags)
    assert "style" not in tags
    for tag, attributes in elements.found:
        assert not any(key.startswith("on") or key == "style" for key in attributes)
        if tag == "html":
            assert attributes["lang"] == "en"
        for key in ("src", "href"):
            if (value := attributes.get(key)) is not None:
                assert value.removeprefix("page/") in page_files()


def test_the_library_is_the_one_that_was_published() -> None:
    assert hashlib.sha256((ASSETS / "preact.mjs").read_bytes()).hexdigest() == LIBRARY_SHA256
    about = (ASSETS / "LIBRARY.md").read_text()
    assert LIBRARY_SHA256 in about
    assert "preact 11.2.0" in about
    assert "Permission is hereby granted" in about
    assert "Preact" in (ROOT / "NOTICE").read_text()


def test_a_link_to_a_report_holds_for_its_name_and_for_ten_minutes() -> None:
    links = ReportLinks(b"secret")
    made = links.link("fault-1", now=1000.0)
    path, until, code = re.fullmatch(r"(.*)\?until=(\d+)&code=(\w+)", made).groups()  # type: ignore[union-attr]
    assert path == "report/fault-1"
    assert links.allows("fault-1", until, code, now=1600.0)
    assert not links.allows("fault-1", until, code, now=1601.0)
    assert not links.allows("fault-2", until, code, now=1000.0)
    assert not links.allows("fault-1", str(int(until) + 1), code, now=1000.0)
    assert not ReportLinks(b"other").allows("fault-1", until, code, now=1000.0)
    for bad in ("", "x", "-1", "1" * 20, "\xb2"):
        assert not links.allows("fault-1", bad, code, now=1000.0)
    assert not links.allows("fault-1", until, "\xe9", now=1000.0)


def test_a_report_is_read_by_its_link_alone(tmp_path: Path) -> None:
    folder = tmp_path / "fault-1"
    folder.mkdir()
    (folder / "report.md").write_text("# it died")
    (folder / "report.html").write_text("<!DOCTYPE html>")
    (tmp_path / "fault-2").mkdir()
    fake = Fake(api_keys=["one"], admin_key="boss")
    fake.service.faults = FaultKeeper(tmp_path, lambda: None)
    assert ask(fake.app, "/debug/faults").status == 401
    second, first = fake.ask("GET", "/debug/faults", bearer("boss"))[1]["faults"]
    assert (first["report"], second["report"], second["page"]) == ("# it died", None, "")
    path, query = first["page"].split("?")
    sent = ask(fake.app, f"/{path}", query=query)
    assert (sent.status, sent.body) == (200, b"<!DOCTYPE html>")
    assert "sandbox" in sent.headers["content-security-policy"]
    assert sent.headers["cache-control"] == "no-store"
    assert ask(fake.app, "/report/fault-2", query=query).status == 403
    assert ask(fake.app, f"/{path}", bearer("boss")).status == 403
    (folder / "report.html").unlink()
    (folder / "report.html").symlink_to(folder / "report.md")
    assert ask(fake.app, f"/{path}", query=query).status == 404
