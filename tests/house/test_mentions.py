"""What the text of the project calls by a path is there: files that were moved leave no ghosts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT

#: `plan.py`, `device/plan.py`, `rope.py:tables`, `tests/peer/`, with or without what stands behind.
_MENTION = re.compile(r"`(?P<path>[\w./-]*?(?:\w\.(?:py|md|toml|txt|json|sh)|\w/))(?::\w+)?`")
#: Paths of other projects, of what users write and of what programs make.
ELSEWHERE = frozenset(
    {"bundle.json", "modules.json", "rank1/", "rank2/", "triton/", "stderr.txt", "sources/",
     "tokenizer.json", "utils.py", "convert_lora_to_gguf.py", "X.py", "X_cpu.py", "X_gpu.py",
     "FILE.py"}
)  # fmt: skip


def _texts() -> Iterator[Path]:
    for pattern in ("src/**/*.py", "tests/**/*.py", "benchmarks/*.py", "tools/**/*.py"):
        yield from sorted(ROOT.glob(pattern))
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    yield from sorted(ROOT.glob("docs/*.md"))


def mentions(text: str) -> Iterator[tuple[int, str]]:
    """(line, path) of everything in back quotes that reads like a path of ours."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in _MENTION.finditer(line):
            if not match["path"].startswith(("/", "~", ".")):
                yield number, match["path"]


def is_there(path: str, files: frozenset[str]) -> bool:
    """Whether a file, or a folder when the path ends in a slash, has this path or ends in it."""
    if path.endswith("/"):
        return any(f"/{path}" in f"/{file}" for file in files)
    return any(f"/{file}".endswith(f"/{path}") for file in files)


def test_every_file_that_is_mentioned_is_there() -> None:
    files = frozenset(
        path.relative_to(ROOT).as_posix()
        for folder in (
            "src",
            "tests",
            "benchmarks",
            "tools",
            "docs",
            "scripts",
            "examples",
            "faults",
            "hashes",
            "deploy",
            "skills",
        )
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ) | {path.name for path in ROOT.iterdir()}
    missing = [
        f"{source.relative_to(ROOT)}:{line} {path}"
        for source in _texts()
        if source != Path(__file__)
        for line, path in mentions(source.read_text())
        if path not in ELSEWHERE and not is_there(path, files)
    ]
    assert missing == []


def test_ghosts_are_found() -> None:
    text = "See `plan.py`, `kernels/` and\n`gone.py:old`; `HYPO_LOG`, `x / y` and `a.b` are none."
    assert list(mentions(text)) == [(1, "plan.py"), (1, "kernels/"), (2, "gone.py")]
    files = frozenset({"src/kernels/a.py", "src/plan.py"})
    assert is_there("plan.py", files)
    assert is_there("kernels/", files)
    assert not is_there("lan.py", files)
    assert not is_there("gone.py", files)
