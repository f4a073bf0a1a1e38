"""What `skills/hypocenter/SKILL.md` tells agents is so: its commands exist, and its lines run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from outside.terminal import hypo_in_process
from repository import ROOT

from hypocenter.cli.app import app, own_verbs

SKILL = ROOT / "skills" / "hypocenter" / "SKILL.md"
TEXT = SKILL.read_text()
TESTED = [
    line
    for block in re.findall(r"^```sh tested\n(.*?)^```", TEXT, re.S | re.M)
    for line in block.splitlines()
]
#: Programs of PyTorch and Triton, and all tensors of a model, take their seconds.
_CHEAP = "no-such-bundle"


def test_it_begins_with_what_agents_choose_it_by() -> None:
    head = re.match(r"---\nname: ([a-z-]+)\ndescription: (.+)\n---\n", TEXT)
    assert head is not None
    assert head[1] == SKILL.parent.name
    assert 40 < len(head[2]) <= 1024
    assert len(TEXT.splitlines()) < 200


def test_each_command_and_each_option_is_there() -> None:
    commands = re.findall(r"`hypo ([^`]+)`", TEXT) + [line.split("#")[0][5:] for line in TESTED]
    assert {"check", "guard", "doctor", "replay", "diff", "inspect", "mcp"} <= {
        one.split()[0] for one in commands
    }
    for command in commands:
        verb, *words = command.split()
        assert verb in own_verbs(), command
        ours = words[: words.index("--")] if "--" in words else words
        names = {name for one in app[verb].assemble_argument_collection() for name in one.names}
        for word in ours:
            assert not word.startswith("--") or word in names, command
    for name in re.findall(r"`(--[\w-]+)(?: [A-Z]+)?`", TEXT):
        every = {
            known
            for verb in ("doctor", "check", "inspect")
            for one in app[verb].assemble_argument_collection()
            for known in one.names
        }
        assert name in every, name


@pytest.mark.tier("tools", fast=lambda case: _CHEAP in case.line)
@pytest.mark.parametrize("line", TESTED)
def test_a_line_of_it_runs(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command, _, says = line.partition("#")
    code = int(re.fullmatch(r" exits with (\d)", says)[1])  # type: ignore[index]
    words = shlex.split(command)
    assert words[0] == "hypo"
    monkeypatch.chdir(ROOT)
    if _CHEAP in line:
        assert hypo_in_process(*words[1:]).returncode == code
        return
    hypo = Path(sys.executable).with_name("hypo")
    done = subprocess.run([hypo, *words[1:]], capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stderr
