"""The page at /live, and how all pages look and sound: names of controls, contrast, widths."""

from __future__ import annotations

import json
import re
import signal
import time
from typing import Any

import pytest
from outside.served import Served

from page.conftest import Window

PHONE, DESK = 360, 1200
#: Elements that reach out of the page; what scrolls in itself may be wide.
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(e =>
    !e.closest('.wide, pre, .hidden, svg') && e.getBoundingClientRect().right > innerWidth + 1
).map(e => e.outerHTML.slice(0, 200))"""
#: The least contrast of a text to what is behind it, by WCAG 2; what is switched off is left out.
CONTRAST = r"""(() => {
  const read = c => c.match(/[\d.]+/g).map(Number);
  const light = c => c.slice(0, 3).map(v => (v /= 255) <= .03928 ? v / 12.92
    : ((v + .055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
  let least = [99, ''];
  const texts = 'p,code,li,a,span,h1,h2,h3,summary,dt,dd,td,th,button,label';
  for (const e of document.querySelectorAll(texts)) {
    if (!e.textContent.trim() || e.disabled || !e.getClientRects().length) continue;
    let back = e;
    while (back && (read(getComputedStyle(back).backgroundColor)[3] ?? 1) === 0)
      back = back.parentElement;
    const pair = [getComputedStyle(e).color, getComputedStyle(back ?? document.documentElement)
      .backgroundColor].map(read).map(light).sort((a, b) => a - b);
    const contrast = (pair[1] + .05) / (pair[0] + .05);
    if (contrast < least[0]) least = [contrast, e.outerHTML.slice(0, 120)];
  }
  return least;
})()"""


def names_of_controls(window: Window) -> dict[str, list[str]]:
    """By role, the names that a screen reader says of what a person can use."""
    window.page.call("Accessibility.enable")
    found: dict[str, list[str]] = {}
    for node in window.page.call("Accessibility.getFullAXTree")["nodes"]:
        role = node.get("role", {}).get("value", "")
        if not node.get("ignored"):
            found.setdefault(role, []).append(node.get("name", {}).get("value", ""))
    return found


def check_looks(window: Window, name: str, *, dark: bool) -> None:
    """Within its width, light or dark as asked for, and with contrast enough."""
    width = window.page.value("innerWidth")
    assert window.page.value("document.documentElement.scrollWidth") <= width
    assert window.page.value(TOO_WIDE) == []
    back = window.page.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back)[:3])) < 384) is dark
    contrast, where = window.page.value(CONTRAST)
    assert contrast > 4.5, where
    window.picture(f"{name}-{width}-{'dark' if dark else 'light'}")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_chat_reads_well_on_each_screen(
    window: Window, served: Served, width: int, dark: bool
) -> None:
    window.open_anew(served, width=width, dark=dark)
    window.ready()
    window.settings(max_tokens="24", more={"temperature": 0.7})
    window.page.value("document.querySelector('#set-tokens').click()")
    window.say("def count_words(text):")
    window.wait_status("The answer is whole.")
    check_looks(window, "chat", dark=dark)
    window.click("Tokens")
    window.page.value("document.querySelector('.token[tabindex=\"0\"]').focus()")
    window.page.press("ArrowRight")
    window.page.wait("document.activeElement.dataset.at === '1'")
    assert window.page.value("document.querySelectorAll('.tokens tbody tr').length") == 5
    assert window.page.value("document.querySelectorAll('.token').length") == 24
    window.page.value("document.querySelector('.settings').open = true")
    check_looks(window, "tokens-and-settings", dark=dark)


def test_every_control_has_a_name_and_the_keyboard_reaches_it(
    window: Window, served: Served
) -> None:
    window.open_anew(served)
    window.ready()
    window.settings(max_tokens="4")
    window.say("hi")
    window.wait_status("The answer is whole.")
    window.page.value("document.querySelector('.settings').open = true")
    found = names_of_controls(window)
    used = ("button", "textbox", "combobox", "checkbox", "spinbutton", "link", "meter", "listbox")
    for role in used:
        assert all(found.get(role, ["x"])), (role, found[role])
    assert {"Send", "New", "Forget", "Again", "Edit"} <= set(found["button"])
    assert {"Temperature", "Seed", "Top k"} <= set(found["spinbutton"])
    assert {"Message", "System prompt", "Other fields, as JSON"} <= set(found["textbox"])
    assert found["log"] == ["Conversation"]
    assert set(found["article"]) == {"You", "Model"}
    assert "status" in found
    reached = set()
    window.page.value("document.activeElement.blur()")
    for _ in range(60):
        window.page.press("Tab")
        reached.add(window.page.value("document.activeElement.outerHTML.slice(0, 300)"))
        outline = window.page.value(
            "document.activeElement === document.body ? '3px' :"
            " getComputedStyle(document.activeElement).outlineWidth"
        )
        assert outline == "3px"
    everything = window.page.value(
        "[...document.querySelectorAll('button:not(:disabled),input,select,textarea,summary')]"
        ".map(e => e.outerHTML.slice(0, 300))"
    )
    assert set(everything) <= reached


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_live_shows_what_the_server_is_at(
    window: Window, served: Served, width: int, dark: bool
) -> None:
    boss = {"Authorization": "Bearer boss"}
    if not served.get("/debug/faults", headers=boss).json["faults"]:
        served.kill_worker(signal.SIGSEGV)
        stop = time.monotonic() + 120
        faults: list[Any] = []
        while not faults or not faults[0]["page"]:
            assert time.monotonic() < stop
            time.sleep(0.2)
            faults = served.get("/debug/faults", headers=boss).json["faults"]
        served.wait_ready()
    window.open_anew(served, "/live", width=width, dark=dark)
    window.page.wait("document.activeElement?.id === 'key'")
    assert "fault-" not in window.text()
    window.page.type("boss")
    window.page.press("Enter")
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6000, "ignore_eos": True}
    with served.stream("/v1/chat/completions", body) as stream:
        next(stream)
        window.page.wait("document.querySelector('[aria-label=\"Open requests\"] td')")
        shown = window.text()
        for word in ("Health", "Running", "Last canary", "Blocks of running requests", "Restarts"):
            assert word in shown, shown
        assert names_of_controls(window)["meter"] == ["Blocks of running requests: " + shown.split(
            "Blocks of running requests: ")[1].split("\n")[0]]  # fmt: skip
        window.page.wait("document.querySelectorAll('.curve').length === 1")
        time.sleep(2.5)  # a second look, so that there are rates
        check_looks(window, "live", dark=dark)
    link = window.page.value("document.querySelector('.deaths a').href")
    window.page.go(link, width, dark=dark)
    assert window.page.value("document.querySelector('h1').innerText")
    window.picture(f"report-{width}-{'dark' if dark else 'light'}")
    # Its own policy lets its style in.
    assert window.page.value("getComputedStyle(document.querySelector('.kicker')).display")
    assert [one for one in window.page.said if "Failed to load resource" not in one] == []


def test_live_says_that_there_is_no_admin_key(window: Window, served: Served) -> None:
    window.open_anew(served, "/live")
    window.page.wait("document.activeElement?.id === 'key'")
    window.page.type("wrong")
    window.page.press("Enter")
    window.page.wait("document.body.innerText.includes('That is not the admin key.')")
    assert json.dumps(window.page.value("document.querySelectorAll('section').length")) == "0"
