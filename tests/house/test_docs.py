"""What the documents say is so: commands run, tables match the code, named files are there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from outside.terminal import hypo_in_process
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import ROOT

from hypocenter.base import errors
from hypocenter.base.tensor import DType
from hypocenter.model.facts.families import FAMILIES
from hypocenter.settings.environment import KNOWN

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "results" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
COMMAND_LINE = ROOT / "docs" / "command-line.md"
PYTHON = ROOT / "docs" / "python.md"
PYTHON_LINES = 180
_BLOCK = re.compile(r"^```(sh|python) runnable\n(.*?)^```", re.S | re.M)

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(
    line.split("==")
    for file in ("constraints-ray.txt", "constraints-clients.txt", "constraints.txt")
    for line in (ROOT / file).read_text().splitlines()
    if line and not line.startswith("#")
)


def _runnable(language: str) -> list[str]:
    """The blocks of that language that are marked `runnable`."""
    blocks = [block for path in DOCUMENTS for block in _BLOCK.findall(path.read_text())]
    return [text for found, text in blocks if found == language]


def _runnable_lines() -> list[str]:
    return [line for block in _runnable("sh") for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("program", _runnable("python"))
def test_a_program_of_the_documents_runs(
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "<a program of the documents>", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def _table(text: str, first_cell: str) -> dict[str, str]:
    """First to second column of the markdown table with that heading."""
    rows = [line.split("|") for line in text.split(f"| {first_cell} |")[1].splitlines()[2:]]
    table: dict[str, str] = {}
    for row in rows:
        if len(row) < 3:
            break
        table[row[1].strip(" `")] = row[2].strip()
    return table


@pytest.mark.parametrize("line", _runnable_lines())
def test_a_command_of_the_documents_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = list(shlex.shlex(line, posix=True, punctuation_chars=True))
    if words[0] == "hypo" and not {"|", ">", "&&", ";"} & set(words):  # no shell is needed
        here = hypo_in_process(*shlex.split(line)[1:])
        assert here.returncode == 0, here.stderr
        assert here.stdout.strip()
        return
    folder = Path(sys.executable).parent
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=tmp_path, env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_python_page_shows_what_it_tells_of_at_work() -> None:
    programs = [text for found, text in _BLOCK.findall(PYTHON.read_text()) if found == "python"]
    assert PYTHON.read_text().count("```python") == len(programs)
    shown = "\n".join(programs)
    for call in ("generate", "sample", "stream", "chat", "stream_chat", "logits", "engine.step"):
        assert f"llm.{call}(" in shown
    for words in ("AsyncLLM", "aclosing", "gather", ".cancel()", "prompt_logprobs=", "seed="):
        assert words in shown


def test_there_are_runnable_commands_for_every_verb() -> None:
    lines = " ".join(_runnable_lines())
    for verb in ("run", "inspect", "bench", "env", "demo"):
        assert f"hypo {verb}" in lines


def test_exit_codes_are_those_of_the_code() -> None:
    table = _table(COMMAND_LINE.read_text(), "exit code")
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert {int(code) for code in table} == codes


def test_errors_of_the_python_page_are_those_of_the_code() -> None:
    page = PYTHON.read_text()
    table = _table(page, "exception")
    assert {"UsageError", "BadSetting", "ContextOverflow", "BadLogits", "DeviceFault"} <= set(table)
    for name, when in table.items():
        kind = getattr(errors, name)
        assert issubclass(kind, errors.HypoError)
        for parent in re.findall(r"^a `(\w+)`", when):
            assert issubclass(kind, getattr(errors, parent)), name
    assert len(page.splitlines()) <= PYTHON_LINES


def test_variables_are_those_of_the_code() -> None:
    assert _table(COMMAND_LINE.read_text(), "variable") == KNOWN


def test_both_commands_stand_on_the_first_screen() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:24]
    for script in ("scripts/demo", "scripts/test"):
        assert any(line.startswith(script) for line in first_screen)
        assert os.access(ROOT / script, os.X_OK)


def _anchors(path: Path) -> set[str]:
    """The fragments by which links name the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_names_is_there(path: Path) -> None:
    text = path.read_text()
    named = set(
        re.findall(
            r"`((?:benchmarks|docs|examples|faults|scripts|tests|tools|src)/[\w./-]+)`", text
        )
    )
    missing = [name for name in named if not (ROOT / name.rstrip("/")).exists()]
    for link, _, anchor in re.findall(r"\]\(([^)#:]+)(#([\w-]+))?\)", text):
        if not (path.parent / link).exists():
            missing.append(link)
        elif anchor and anchor not in _anchors(path.parent / link):
            missing.append(f"{link}#{anchor}")
    assert missing == []


def test_every_document_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()))
    assert {str(path.relative_to(ROOT)) for path in DOCUMENTS} - {"README.md"} <= linked


def test_the_tables_of_models_and_types_are_those_of_the_code() -> None:
    told = re.split(r"[^\w-]+", (ROOT / "README.md").read_text().split("## What works")[1])
    assert set(FAMILIES) <= set(told)
    stored = {dtype.name for dtype in DType if dtype.ggml_id is not None}
    types = stored - {"I8", "I16", "I32", "I64"}
    assert types <= set(told)
    table = (ROOT / "README.md").read_text().split("| quantisation | types |")[1].split("\n\n")[0]
    assert set(re.findall(r"\b[A-Z]+\d\w*\b", table)) == types


def _requirements(extras: list[str]) -> list[Requirement]:
    texts = list(PYPROJECT["dependencies"])
    for extra in extras:
        texts += PYPROJECT["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


def test_every_dependency_has_a_pin_inside_its_range() -> None:
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    for requirement in _requirements(list(PYPROJECT["optional-dependencies"])):
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{requirement} and {pin}"


def test_what_is_installed_is_what_is_pinned() -> None:
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    seen: set[str] = set()
    waiting = [requirement.name for requirement in _requirements(["test"])]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        found = metadata.distribution(name)
        assert found.version.split("+")[0] == pins[name], name
        needed = [Requirement(text) for text in found.requires or ()]
        waiting += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    assert len(seen) > 30


def test_the_base_install_needs_no_torch() -> None:
    seen: set[str] = set()
    waiting = [requirement.name for requirement in _requirements([])]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in seen:
            seen.add(name)
            needed = [Requirement(text) for text in metadata.distribution(name).requires or ()]
            waiting += [
                r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})
            ]
    assert not seen & {"torch", "triton", "transformers", "starlette"}


def _commands_of_contributing() -> list[str]:
    """What stands there between backquotes and begins as a command does."""
    text = (ROOT / "CONTRIBUTING.md").read_text() + "`" + (ROOT / "scripts" / "test").read_text()
    spans = re.findall(r"`([^`]+)`|^# .*: (scripts/test .*)$", text, re.M)
    commands = [one or other for one, other in spans]
    starts = ("scripts/", ".venv/bin/", "python ", "pip ")
    return sorted({line for line in commands if line.startswith(starts)})


def test_the_commands_of_contributing_are_all_here() -> None:
    commands = _commands_of_contributing()
    assert len(commands) > 15
    assert [line.split()[1] for line in commands if line.startswith("scripts/test ")]


@pytest.mark.parametrize("line", _commands_of_contributing())
def test_a_command_of_contributing_can_be_run(line: str) -> None:
    """Tests that it names are collected; nothing else is run, as each may take minutes."""
    words = shlex.split(line)
    if words[0].startswith("scripts/"):
        script = ROOT / words[0]
        assert os.access(script, os.X_OK), line
        assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
        if words[0] == "scripts/test" and words[1:]:
            collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", *words[1:]]
            done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout
            assert "::test_" in done.stdout
    elif words[0].startswith(".venv/"):
        assert (Path(sys.executable).parent / Path(words[0]).name).exists()
    elif words[0] == "pip":
        assert words[1] == "install"
        assert all(PINS[word.split("==")[0]] == word.split("==")[1] for word in words[2:])
    elif words[1] == "-m":
        assert (ROOT / (words[2].replace(".", "/") + ".py")).is_file()
    else:
        assert (ROOT / words[1]).is_file()
