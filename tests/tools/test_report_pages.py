"""Pages in a real browser, and the ones in docs/reports/, which are what a run makes today."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from outside.browser import Page, browser, open_page
from outside.hostile_pages import HOSTILE, hostile_bundle, page_of
from repository import ROOT

pytest.importorskip("torch")
pytest.importorskip("triton")

from tools import report_pages

PROGRAM = browser()
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")
PAGES = sorted((ROOT / "docs" / "reports").glob("*.html"))
#: Those that have an address to draw.
OF_MEMORY = ("captured-pointer", "dtype-width", "index-out-of-range")
PHONE, DESK = 360, 1280
#: Elements that are cut off or reach out of the page; what scrolls in itself may be wide.
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(e =>
    !e.closest('.source') && e.getBoundingClientRect().right > innerWidth + 1
).map(e => e.outerHTML.slice(0, 200))"""
#: The contrast of a text to what is behind it, by WCAG 2, the least of all texts.
CONTRAST = r"""(() => {
  const read = c => c.match(/[\d.]+/g).map(Number);
  const light = c => c.slice(0, 3).map(v => (v /= 255) <= .03928 ? v / 12.92
    : ((v + .055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
  let least = 99;
  for (const e of document.querySelectorAll('p,code,li,b,span,small,h1,h2,summary,dt,dd,i')) {
    if (!e.textContent.trim()) continue;
    let back = e;
    while (back && (read(getComputedStyle(back).backgroundColor)[3] ?? 1) === 0)
      back = back.parentElement;
    const pair = [read(getComputedStyle(e).color), read(back
      ? getComputedStyle(back).backgroundColor : 'rgb(255,255,255)')].map(light).sort();
    least = Math.min(least, (Math.max(...pair) + .05) / (Math.min(...pair) + .05));
  }
  return least;
})()"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages as a run makes them now, by name."""
    folder = tmp_path_factory.mktemp("pages")
    for name, text in report_pages.pages():
        (folder / f"{name}.html").write_text(text)
    return {file.stem: file for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert PROGRAM is not None
    with open_page(PROGRAM, tmp_path_factory.mktemp("browser") / "profile") as made:
        yield made


def check_shown(page: Page, file: Path, folder: Path) -> None:
    """On a phone and on a desk, light and dark: whole, silent, asking for nothing."""
    for width in (PHONE, DESK):
        for dark in (False, True):
            page.show(file, width, dark=dark)
            shade = "dark" if dark else "light"
            page.picture(folder / f"{file.stem}-{width}-{shade}.png")
            assert page.value("document.documentElement.scrollWidth") == width
            assert page.value(TOO_WIDE) == []
            back = page.value("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", back)[:3])) < 384) is dark
            assert page.value(CONTRAST) > 4.5
            assert (page.said, page.asked) == ([], [])


@needs_browser
@pytest.mark.parametrize("name", [file.stem for file in PAGES])
def test_a_page_reads_well_on_each_screen(
    name: str, made: dict[str, Path], page: Page, tmp_path: Path
) -> None:
    check_shown(page, made[name], tmp_path)
    if name in OF_MEMORY:
        assert page.value("document.querySelectorAll('.source .bad').length") >= 1
        assert page.value("document.querySelectorAll('.memory .wrong').length") == 1


@needs_browser
@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_hostile_stays_text(text: str, page: Page, tmp_path: Path) -> None:
    file = tmp_path / "hostile.html"
    file.write_text(page_of(hostile_bundle(text)))
    check_shown(page, file, tmp_path)
    assert page.value("document.scripts.length + document.images.length") == 0
    shown = page.value("document.querySelector('pre').textContent")
    assert shown.strip() == "".join(
        c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text
    )


@needs_browser
def test_the_policy_stops_what_would_run(page: Page, tmp_path: Path) -> None:
    """The second fence: even what got into the page would not run or be loaded."""
    file = tmp_path / "breached.html"
    inside = (
        "<script>document.title = 'ran'</script><img src='http://127.0.0.1:9/x' onerror='document."
        "title = 1'><p style='color: red'>x</p><style>p { color: red }</style>"
    )
    whole = page_of(hostile_bundle("word"))
    file.write_text(whole.replace("<main>", f"<main>{inside}"))
    page.show(file, DESK)
    title = page.value("document.title")
    assert title not in ("ran", "1")
    assert (
        page.value("getComputedStyle(document.querySelector('main p')).color") != "rgb(255, 0, 0)"
    )
    # The script, the handler, both styles and the picture.
    assert ["Content Security Policy" in said for said in page.said] == [True] * 5
    page.said.clear()
    page.asked.clear()


@needs_browser
def test_what_is_folded_is_open_on_paper(made: dict[str, Path], page: Page, tmp_path: Path) -> None:
    page.show(made["dtype-width"], 800, dark=True, media="print")
    closed = "[...document.querySelectorAll('details')].filter(e => e.scrollHeight < 60).length"
    assert page.value(closed) == 0
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.paper(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_the_pages_in_docs_are_what_a_run_makes_today(made: dict[str, Path]) -> None:
    """When they are not: python -m tools.report_pages."""
    assert list(made) == [file.stem for file in PAGES]
    for file in PAGES:
        stale = f"{file} is stale; python -m tools.report_pages writes it anew"
        kept, fresh = (report_pages.skeleton(path.read_text()) for path in (file, made[file.stem]))
        assert kept == fresh, stale


def test_a_page_names_nothing_of_the_machine_that_made_it() -> None:
    for file in PAGES:
        text = file.read_text()
        assert str(ROOT) not in text
        assert str(Path.home()) not in text
        assert not re.search(r"/tmp/|glibc", text)


def test_a_skeleton_differs_where_words_do() -> None:
    text = PAGES[0].read_text()
    assert report_pages.skeleton(text.replace("The proof", "A proof")) != report_pages.skeleton(
        text
    )
    assert report_pages.skeleton(re.sub(r"0x[0-9a-f]+", "0x1", text)) == report_pages.skeleton(text)
