"""Stories of the documents: blocks marked `story` are typed as they stand, and say what they say.

A block holds commands behind `$ ` and what they print on stdout. Blocks below one heading share a
folder, in which `model.gguf` is the bundled model. A line `...` stands for any lines. Whole numbers
must be as told, others within a factor of two, and seconds may be any.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import DEMO, PACKAGE_DIR, ROOT

_SECONDS = 300
_HEADING = re.compile(r"^#+ (.*)$", re.M)
_BLOCK = re.compile(r"^```console story\n(.*?)^```", re.S | re.M)
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?(?: s\b)?")
_ANY_LINES = "..."


def _stories(folder: Path) -> dict[str, list[str]]:
    """The blocks of all documents, by file and heading."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.md")):
        text = path.read_text()
        headings = [(match.start(), match.group(1)) for match in _HEADING.finditer(text)]
        for block in _BLOCK.finditer(text):
            heading = [name for start, name in headings if start < block.start()][-1]
            found.setdefault(f"{path.name}: {heading}", []).append(block.group(1))
    return found


STORIES = _stories(ROOT / "docs")


def _commands(blocks: list[str]) -> list[tuple[str, list[str]]]:
    """Each command, and the lines that it is to print."""
    found: list[tuple[str, list[str]]] = []
    for line in "".join(blocks).splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found[-1][0].endswith("\\"):
            found[-1] = f"{found[-1][0][:-1]}{line.strip()}", []
        else:
            found[-1][1].append(line.rstrip())
    return found


def unlike(told: list[str], said: list[str]) -> str | None:
    """What a command said that is not told; None where all is."""
    at = 0
    for number, line in enumerate(told):
        if line == _ANY_LINES:
            rest = told[number + 1 :]
            if not rest:
                return None
            at = next((n for n in range(at, len(said)) if _is_like(rest[0], said[n])), len(said))
        elif at == len(said):
            return f"{line!r} was not said"
        elif not _is_like(line, said[at]):
            return f"{line!r} is told, and {said[at]!r} was said"
        else:
            at += 1
    return None if at == len(said) else f"{said[at]!r} is not told"


def _is_like(told: str, said: str) -> bool:
    numbers, others = _NUMBER.findall(told), _NUMBER.findall(said)
    if _NUMBER.sub("#", told).split() != _NUMBER.sub("#", said).split():
        return False
    return all(_is_near(one, other) for one, other in zip(numbers, others, strict=True))


def _is_near(told: str, said: str) -> bool:
    if told.endswith(" s"):
        return said.endswith(" s")
    if said.endswith(" s") or told.isdecimal() or said.isdecimal():
        return told == said
    return float(told) / 2 <= float(said) <= 2 * float(told)


@pytest.mark.tier("whole")
@pytest.mark.parametrize("story", STORIES)
def test_a_story_of_the_documents_is_as_it_is_told(story: str, tmp_path: Path) -> None:
    shutil.copy(DEMO, tmp_path / "model.gguf")
    (tmp_path / "src").symlink_to(PACKAGE_DIR.parent)
    folder = Path(sys.executable).parent
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    environ.pop("HYPO_NATIVE", None)
    for command, told in _commands(STORIES[story]):
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=_SECONDS,
            check=False,
        )  # fmt: skip
        found = unlike(told, [line.rstrip() for line in done.stdout.splitlines()])
        assert found is None, f"{command}: {found}\n{done.stdout}{done.stderr}"


def test_there_are_stories() -> None:
    assert {name.partition(":")[0] for name in STORIES} == {
        "audit.md", "traces.md", "verify.md",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (["a 2"], ["a 3"]),
        (["a 0.5 %"], ["a 1.1 %"]),
        (["a"], ["a", "b"]),
        (["a", "b"], ["a"]),
        (["...", "b"], ["a", "c"]),
        (["a", "...", "layer 3"], ["a", "x", "layer 4"]),
    ],
)
def test_what_is_not_as_told_is_seen(told: list[str], said: list[str]) -> None:
    assert unlike(told, said) is not None


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (["a  0.5 %, 3 s"], ["a 0.7 %, 41 s"]),
        (["a", "..."], ["a", "b", "c"]),
        (["...", "c"], ["a", "b", "c"]),
    ],
)
def test_what_is_as_told_passes(told: list[str], said: list[str]) -> None:
    assert unlike(told, said) is None
