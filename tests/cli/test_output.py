"""What reaches a terminal or a program: lines without control characters, and JSON that is JSON."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import msgspec
import pytest
from repository import ROOT

from hypocenter.cli.output import one_line, printable, say, show, show_json

#: A bell, a title, a clear screen, C1, reversed writing, line ends of other sorts, half a pair.
STEERING = "a\x07\x1b]0;x\x07\x1b[2J\x7f\x9b\u202e\u2028\xa0\ud800\U000e0001 é 漢"
#: Calls of print in cli/ beside output.py: a prompt of the user's own, and ends of lines.
PRINTS = {"app.py": 1, "chat.py": 3, "run.py": 1}


class Holder(msgspec.Struct):
    text: str
    number: float


def test_control_characters_are_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    show(f"{STEERING}\nsecond\n")
    say(f"{STEERING}\nsecond")
    out, err = capsys.readouterr()
    assert out.startswith("a\\x07\\x1b]0;x")
    assert out.endswith(" é 漢\nsecond\n")
    assert err.startswith("hypo: a\\x07")
    assert err.endswith("\\nsecond\n")
    assert all(c.isprintable() or c == "\n" for c in out + err)
    assert printable("a\nb\x9bc") == "a\nb\\x9bc"
    assert one_line("a\nb") == "a\\nb"


def test_json_escapes_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    show_json([Holder(STEERING, float("nan")), {STEERING: (1, 2.5)}])
    out, _ = capsys.readouterr()
    assert all(c.isprintable() or c == "\n" for c in out)
    assert " é 漢" in out
    assert json.loads(out) == [{"text": STEERING, "number": None}, {STEERING: [1, 2.5]}]


def test_verbs_print_through_one_place() -> None:
    """A print of its own is how an escape of a file gets through."""
    found = {
        path.name: [
            node.lineno
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        ]
        for path in Path(ROOT / "src/hypocenter/cli").rglob("*.py")
        if path.name != "output.py"
    }
    assert {name: len(lines) for name, lines in found.items() if lines} == PRINTS
