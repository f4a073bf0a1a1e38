"""`tests/fuzz/hostile_command_lines.py`: right command lines end where work would begin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from outside.hostile import answer_problem
from outside.terminal import hypo_in_process

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

from hostile_command_lines import DOORS, at_the_door, lay_out, words_of_verbs


@pytest.fixture
def _behind_doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    for door in DOORS:
        monkeypatch.setattr(door, at_the_door)


@pytest.mark.usefixtures("_behind_doors")
@pytest.mark.parametrize("verb", words_of_verbs())
def test_each_verb_ends_by_itself(verb: str) -> None:
    assert answer_problem(*verb.split()) == ""


@pytest.mark.usefixtures("_behind_doors")
def test_a_server_that_would_answer_until_a_signal_comes_is_not_started() -> None:
    done = hypo_in_process("serve", "good.gguf", "--port", "0")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "hypo: understood"
