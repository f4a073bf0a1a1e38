"""The documents read easily: short sentences, short lines, and no more of them than agreed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "results" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
MAX_MEAN_WORDS = 18.0
MAX_WORDS = 30
MAX_SEMICOLONS = 1
MAX_COLUMNS = 100
README_LINES = 150
CPU_PROSE_LINES = 70

_FENCE = re.compile(r"^```.*?^```$", re.S | re.M)
_CODE = re.compile(r"`[^`]+`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +")
_END = re.compile(r"(?<=[.!?])[*)\"]*\s+(?=[*(\"]*[A-Z0-9`])")


def prose_lines(text: str) -> Iterator[str]:
    """The lines of a document that are neither code nor table, heading, picture or empty."""
    for line in _FENCE.sub("", text).splitlines():
        if line.strip() and not line.lstrip().startswith(("|", "#", "!", "<")):
            yield line


def _paragraphs(text: str) -> Iterator[str]:
    """Runs of prose; an item of a list is one of its own, and so is what a table cuts off."""
    held: list[str] = []
    for line in _FENCE.sub("", text).splitlines():
        is_prose = line in list(prose_lines(line))
        if held and (not is_prose or _ITEM.match(line)):
            yield " ".join(held)
            held = []
        if is_prose:
            held.append(_ITEM.sub("", line).strip())
    if held:
        yield " ".join(held)


def sentences(text: str) -> list[str]:
    """The sentences of the prose. What stands in back quotes counts as one word, a link as its
    text."""
    found = []
    for paragraph in _paragraphs(text):
        plain = _LINK.sub(r"\1", _CODE.sub("Code", paragraph)).replace("Code/Code", "Code")
        found += [one for one in _END.split(plain) if re.search(r"\w", one)]
    return found


def num_words(sentence: str) -> int:
    """Words have a letter or a digit; a dash between blanks is none."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def mean_words(text: str) -> float:
    counts = [num_words(one) for one in sentences(text)]
    return sum(counts) / len(counts)


def faults(text: str) -> list[str]:
    """What is too long in a document, a line for each."""
    found = []
    if (mean := mean_words(text)) > MAX_MEAN_WORDS:
        found.append(f"the mean sentence has {mean:.1f} words")
    for one in sentences(text):
        if num_words(one) > MAX_WORDS:
            found.append(f"{num_words(one)} words: {one}")
        if one.count(";") > MAX_SEMICOLONS:
            found.append(f"a chain of semicolons: {one}")
    found += [f"{len(line)} columns: {line}" for line in prose_lines(text)
              if len(line) > MAX_COLUMNS]  # fmt: skip
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_is_easy_to_read(path: Path) -> None:
    assert faults(path.read_text()) == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_the_page_on_the_cpu_is_short() -> None:
    assert len(list(prose_lines((ROOT / "docs" / "cpu.md").read_text()))) <= CPU_PROSE_LINES


_CLAUSE = "the kernel that reads what the one before it wrote waits until that one has ended"
#: What is planted in a whole document, and how it is reported.
PLANTED = {
    "a long sentence": (f"{_CLAUSE}, and\n{_CLAUSE}.", "33 words: the kernel"),
    "a chain of semicolons": ("It reads; it adds; it writes.", "a chain of semicolons: It"),
    "a wide line": ("It reads this. " * 8, "119 columns: It reads this."),
    "many sentences of 24 words": (
        f"At the end of each step of a plan\n{_CLAUSE}.\n\n" * 60,
        "the mean sentence has",
    ),
}


@pytest.mark.parametrize(("text", "expected"), PLANTED.values(), ids=PLANTED)
def test_planted_prose_is_found(text: str, expected: str) -> None:
    document = (ROOT / "docs" / "adding-a-model.md").read_text()
    assert faults(document) == []
    found = faults(f"{document}\n{text.rstrip()}\n")
    assert len(found) == 1, found
    assert found[0].startswith(expected), found


def test_sentences_are_told_apart_and_their_words_counted() -> None:
    text = (
        "# A heading is none\n\nIt has `two words` here. `hypo run` is [one link](x.md) (see `a`)."
        "\n\n- an item\n  of two lines\n- another\n\n| a | table |\n\n```sh\ncode is none\n```\n"
    )
    assert sentences(text) == [
        "It has Code here.", "Code is one link (see Code).", "an item of two lines", "another",
    ]  # fmt: skip
    assert [num_words(one) for one in sentences(text)] == [4, 6, 5, 1]
    assert mean_words(text) == 4.0
    assert len(list(prose_lines(text))) == 4
