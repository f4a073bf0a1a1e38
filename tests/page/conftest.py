"""A browser, and a page of `hypo serve` in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from models.demo_variants import demo_that_chats
from outside.browser import Page, browser, open_page
from outside.served import Served, serving
from repository import ROOT

#: Where pictures go, for who wants to look at them.
PICTURES = ROOT / "build" / "page"


@dataclass
class Window:
    """A page of the browser, and what a person does there."""

    page: Page

    def open(
        self, served: Served, path: str = "/", *, width: int = 1000, dark: bool = False
    ) -> None:
        """Go to a page of a server and wait until it is drawn; the browser keeps what it had."""
        self.page.go(f"http://127.0.0.1:{served.port}{path}", width, dark=dark)
        self.page.wait("document.querySelector('h1')")

    def open_anew(
        self, served: Served, path: str = "/", *, width: int = 1000, dark: bool = False
    ) -> None:
        """The same, with a browser that has kept nothing of this server."""
        self.page.go(f"http://127.0.0.1:{served.port}/page/page.css", width)
        self.page.value("localStorage.clear(); sessionStorage.clear()")
        self.open(served, path, width=width, dark=dark)

    def ready(self) -> None:
        """Wait until the server has told its model."""
        self.page.wait("document.querySelector('.model')?.innerText")

    def settings(self, **values: Any) -> None:
        """Set fields of the settings by their names, as somebody who types."""
        for name, value in values.items():
            text = value if isinstance(value, str) else json.dumps(value)
            self.page.value(f"document.querySelector('#set-{name}').closest('details').open = true")
            self.page.value(f"document.querySelector('#set-{name}').focus()")
            self.page.value(f"document.querySelector('#set-{name}').select()")
            self.page.type(text)
        self.page.value("document.querySelector('.settings').open = false")

    def say(self, text: str) -> None:
        """Write a message, and send it with the Enter key."""
        self.page.value("document.querySelector('#message').focus()")
        self.page.type(text)
        self.page.press("Enter")

    def click(self, text: str, number: int = 0) -> None:
        """Click a button or a summary by what stands on it, or by its label."""
        found = self.page.value(
            "(() => { const all = [...document.querySelectorAll('button, summary, a')];"
            " const found = all.filter(e => "
            f"(e.getAttribute('aria-label') ?? e.innerText).trim().startsWith({json.dumps(text)}));"
            f" found.at({number})?.click(); return found.length; }})()"
        )
        assert found, f"no {text!r}: {self.text()}"

    def wait_status(self, text: str, seconds: float = 60) -> None:
        """Wait until the status begins with this."""
        said = "document.querySelector('[role=status]').innerText"
        self.page.wait(f"{said}.startsWith({json.dumps(text)})", seconds)

    def answers(self) -> list[str]:
        """The text of each answer that is shown."""
        return list(
            self.page.value(
                "[...document.querySelectorAll('.assistant')].map(e => "
                "e.querySelector('.content:not(.fold *)')?.textContent ?? '')"
            )
        )

    def text(self) -> str:
        return str(self.page.value("document.body.innerText"))

    def kept(self) -> list[dict[str, Any]]:
        """The messages of the conversation that the browser keeps."""
        text = self.page.value(
            "localStorage.getItem('hypo-talk ' + JSON.parse(localStorage['hypo-talks'])[0].id)"
        )
        return list(json.loads(text)["nodes"])

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.picture(PICTURES / f"{name}.png")


@pytest.fixture(scope="session")
def program() -> str:
    found = browser()
    assert found is not None, "no Chromium is installed; Debian has one: apt-get install chromium"
    return found


@pytest.fixture(scope="session")
def chromium(program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_page(program, tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture
def window(chromium: Page) -> Iterator[Window]:
    """One that says nothing on its console by the end of the test, and asked no other server."""
    chromium.said.clear()
    chromium.asked.clear()
    window = Window(chromium)
    yield window
    assert [one for one in chromium.said if "Failed to load resource" not in one] == []
    assert all(url.startswith(("http://127.0.0.1:", "about:", "data:")) for url in chromium.asked)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_that_chats(tmp_path_factory.mktemp("model") / "chat.gguf")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Served]:
    words = (str(model), "-c", "8192", "--admin-key", "boss", "--canary-minutes", "0.5")
    with serving(tmp_path_factory.mktemp("served"), *words) as one:
        yield one
