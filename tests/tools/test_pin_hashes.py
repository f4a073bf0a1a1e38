"""hashes/ fits constraints.txt, pyproject.toml and what is installed. No index is asked here."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import tomllib
from collections.abc import Iterator

import pytest
from packaging.markers import Marker
from packaging.utils import canonicalize_name
from repository import ROOT

from tools import pin_hashes
from tools.pin_hashes import PIN_FILES, Package, members, part_text, pin_file, read_pins, roots

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = {
    name: read_pins((ROOT / name).read_text()) for name in ("constraints.txt", *PIN_FILES.values())
}
TEXTS = {path.stem: path.read_text() for path in (ROOT / "hashes").glob("*.txt")}
_ENTRY = re.compile(
    r"^(\S+==[^\s;]+)((?: ;[^\\\n]*)?)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.M
)


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """(pin, marker) of each requirement that has hashes."""
    for pin, marker, _ in _ENTRY.findall(text):
        yield pin, marker.removeprefix(" ; ")


def _names(part: str) -> set[str]:
    """What a part holds on this machine."""
    return {
        canonicalize_name(pin.split("==")[0])
        for pin, marker in _entries(TEXTS[part])
        if not marker or Marker(marker).evaluate()
    }


def test_there_is_a_file_for_each_part() -> None:
    assert set(TEXTS) == set(roots(PYPROJECT))


@pytest.mark.parametrize("part", sorted(TEXTS))
def test_a_part_holds_pins_and_hashes_and_nothing_else(part: str) -> None:
    entries, pins = list(_entries(TEXTS[part])), PINS[pin_file(part)]
    assert entries
    assert all(pin == pins[canonicalize_name(pin.split("==")[0])] for pin, _ in entries)
    rest = _ENTRY.sub("", TEXTS[part])
    assert [line for line in rest.splitlines() if line and not line.startswith("#")] == []
    without = re.findall(r"^# without a hash: (.*)", rest, re.M)
    assert without == ([pins["torch"]] if part in ("gpu", "test") else [])


def test_each_pin_but_torch_has_hashes() -> None:
    for file, pins in PINS.items():
        texts = [text for part, text in TEXTS.items() if pin_file(part) == file]
        hashed = {pin for text in texts for pin, _ in _entries(text)}
        assert set(pins.values()) - hashed == ({pins["torch"]} if "torch" in pins else set())


def test_the_parts_hold_what_the_installed_packages_ask_for() -> None:
    requires: dict[str, list[str]] = {
        canonicalize_name(each.name): each.requires or []
        for each in importlib.metadata.distributions()
    }
    for part in ("base", "test"):
        asked = roots(PYPROJECT)[part]
        assert members(asked, requires, platform.machine()) - {"torch"} == _names(part), part


def test_pip_is_pinned_where_it_is_installed_first() -> None:
    assert {"pip", "setuptools"} <= _names("build")


def test_what_only_a_build_of_torch_needs_is_left_to_its_vendor() -> None:
    requires = {
        "torch": ["sympy", "triton==9", "nvidia-thing==1"], "sympy": [], "triton": [], "x": ["y"],
        "y": ["z ; extra == 'more'"], "z": [],
    }  # fmt: skip
    assert members(["torch"], requires, "x86_64") == {"torch", "sympy"}
    assert members(["torch", "triton"], requires, "x86_64") == {"torch", "sympy", "triton"}
    assert members(["x", "y[more]"], requires, "x86_64") == {"x", "y", "z"}
    assert members(["x ; platform_machine == 'aarch64'"], requires, "x86_64") == set()
    with pytest.raises(SystemExit, match=r"'w>=1' is wanted; add its pin to the constraints"):
        members(["w>=1"], requires, "x86_64")


def test_a_part_is_written_as_pip_reads_it() -> None:
    packages = {"a": Package(hashes={"2" * 64, "1" * 64}), "torch": Package()}
    text = part_text("toy", {"a": "A==1 ; os_name == 'posix'", "torch": "torch==2"}, packages)
    hashes = [f" \\\n    --hash=sha256:{digit * 64}" for digit in "12"]
    assert text.endswith("\nA==1 ; os_name == 'posix'" + "".join(hashes) + "\n")
    assert "# without a hash: torch==2\n" in text


def test_pips_word_for_a_missing_file_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder without files is an index of nothing.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(ROOT / "docs"))
    assert pin_hashes._report(["toy==1.0"], []) == "toy==1.0"
