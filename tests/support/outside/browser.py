"""A headless Chromium that shows one page, spoken to over a pipe; needs no driver and no port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe", "about:blank",
)  # fmt: skip


def browser() -> str | None:
    """The program of a Chromium that is installed, None where none is."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Page:
    """One page of the browser. `said` are messages of its console, `asked` the addresses that it
    asked for besides the file that it was told to show."""

    def __init__(self, into: int, out: int) -> None:
        self._into, self._out = into, out
        self._rest = b""
        self._number = 0
        self._session = ""
        self._events: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        made = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = made["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask, and wait for the answer; what happens meanwhile is noted."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._into, json.dumps(asked).encode() + b"\0")
        while True:
            got = self._read()
            if got.get("id") == self._number:
                if "error" in got:
                    raise RuntimeError(f"{method}: {got['error']}")
                return dict(got["result"])
            self._note(got)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._out, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                self.said.append(json.dumps(params)[:2000])
            case "Page.javascriptDialogOpening":
                self.said.append("a dialog opened")
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            case method:
                self._events.append({"method": method})

    def show(self, file: Path, width: int, *, dark: bool = False, media: str = "screen") -> None:
        """Load the file at this width, in pixels, and wait until it stands."""
        self.go(file.as_uri(), width, dark=dark, media=media)

    def go(self, url: str, width: int, *, dark: bool = False, media: str = "screen") -> None:
        """Load the page of this address, as `show` does a file."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=url)
        while {"method": "Page.loadEventFired"} not in self._events:
            self._note(self._read())
        self.asked = [one for one in self.asked if one != url]

    def wait(self, expression: str, seconds: float = 60) -> None:
        """Wait until an expression of JavaScript is true, or an element that is there."""
        stop = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            if time.monotonic() > stop:
                shown = self.value("document.body.innerText")
                raise TimeoutError(f"{expression}\n{shown[-1500:]}\n{self.said}")
            time.sleep(0.05)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key as a keyboard does: Enter, Tab, Escape, ArrowRight and so on."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        code = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}
        about = {"key": key, "windowsVirtualKeyCode": code[key], "modifiers": 8 if shift else 0}
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {})
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        """Put a text where the cursor is."""
        self.call("Input.insertText", text=text)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is there; ours, which the page's policy leaves alone."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(str(done["exceptionDetails"])[:500])
        return done["result"].get("value")

    def picture(self, file: Path, top: int = 0, height: int | None = None) -> None:
        """A PNG of the whole page, however long, or of `height` pixels of it from `top` on."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        tall = size["height"] - top if height is None else height
        clip = {"x": 0, "y": top, "width": size["width"], "height": tall, "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def paper(self, file: Path) -> None:
        """A PDF of what a printer would get."""
        printed = self.call("Page.printToPDF", printBackground=True)
        file.write_bytes(base64.b64decode(printed["data"]))


@contextlib.contextmanager
def open_page(program: str, profile: Path) -> Iterator[Page]:
    """A page of a browser of its own, which ends with the block; `profile` is a folder to make."""
    theirs, into = os.pipe()
    out, answers = os.pipe()

    def place() -> None:
        # The pipe is on 3 and 4; either may be the number of the other's end just now.
        ends = os.dup(theirs), os.dup(answers)
        high = [os.dup2(end, 100 + n) for n, end in enumerate(ends)]
        for end, number in zip(high, (3, 4), strict=True):
            os.dup2(end, number, inheritable=True)

    command = [program, f"--user-data-dir={profile}", *_FLAGS]
    process = subprocess.Popen(
        command, preexec_fn=place, close_fds=False, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs)
    os.close(answers)
    try:
        yield Page(into, out)
    finally:
        os.close(into)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(out)
