"""The examples have the defects that the documents show, and the picture of a report is current."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from models.demo_variants import demo_that_chats
from outside.terminal import hypo_in_process
from repository import ROOT

PICTURE = ROOT / "docs" / "report.svg"


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def line_of(example: str, text: str) -> int:
    """The number of the line of an example that holds `text`."""
    lines = (ROOT / "examples" / example).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_check_names_the_load_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = hypo_in_process("check", "examples/missing_mask.py")
    assert done.returncode == 4, done.stderr
    line = line_of("missing_mask.py", "x = tl.load(x_ptr + i)")
    assert f"examples/missing_mask.py:{line}: out of bounds: load of x_ptr in add" in done.stdout
    assert "\n1 finding in 1 launch of 1 kernel" in done.stdout


def test_the_readme_shows_these_commands_and_what_they_print() -> None:
    from tools import report_picture

    text = (ROOT / "README.md").read_text()
    line = line_of("missing_mask.py", "x = tl.load(x_ptr + i)")
    assert "$ hypo check examples/missing_mask.py\nexamples/missing_mask.py:" in text
    assert f"examples/missing_mask.py:{line}: out of bounds: load of x_ptr in add" in text
    assert f"\n{report_picture.COMMAND} " in text
    assert "](docs/report.svg)" in text


def test_the_picture_of_a_report_is_what_the_doctor_says_today() -> None:
    """When it is not: python tools/report_picture.py."""
    from tools import report_picture

    lines = report_picture.report()
    line = line_of("long_rows.py", "x_ptr + row * row_stride")
    assert f"CAUSED BY  examples/long_rows.py:{line}" in lines
    assert (
        "CAUSE      offset overflow: argument x_ptr (tensor rows) of kernel first_of_row" in lines
    )
    stale = f"{PICTURE} is stale; python tools/report_picture.py draws it anew"
    assert report_picture.draw(lines) == PICTURE.read_text(), stale


def test_a_picture_has_every_word_and_another_report_gives_another_picture() -> None:
    from tools import report_picture

    lines = ["CAUSE      a < b & c", "           fails   it is"]
    picture = report_picture.draw(lines)
    texts = [element.text for element in ElementTree.fromstring(picture).iter() if element.text]
    assert [text for text in texts if text.strip()][1:] == ["CAUSE", "a < b & c", "fails", "it is"]
    assert report_picture.draw([*lines, "FIX        so"]) != picture


RunExample = Callable[..., str]


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunExample:
    """Runs one with these words in the process of the tests; gives what it wrote."""

    def run(*words: str) -> str:
        path = str(ROOT / "examples" / words[0])
        monkeypatch.setattr(sys, "argv", [path, *words[1:]])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_next_tokens_have_falling_probabilities(run_example: RunExample) -> None:
    lines = run_example("next_tokens.py", "import ").splitlines()
    shares = [float(line.split()[0]) for line in lines]
    assert len(shares) == 5
    assert sorted(shares, reverse=True) == shares
    assert 0 < sum(shares) <= 1.01


@pytest.mark.parametrize("example", ["next_tokens.py", "chat.py"])
def test_an_example_runs_without_a_word(example: str, run_example: RunExample) -> None:
    assert len(run_example(example).splitlines()) >= 4


def test_a_chat_goes_on_where_it_was(tmp_path: Path, run_example: RunExample) -> None:
    model = demo_that_chats(tmp_path / "chat.gguf")
    said = run_example("chat.py", str(model))
    assert [line for line in said.splitlines() if line[:2] == "> "] == [
        "> What is a mutex?", "> And a semaphore?",
    ]  # fmt: skip
