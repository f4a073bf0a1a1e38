"""`hypo eval` without its library says what to install, before a model is looked for."""

from __future__ import annotations

import sys

import pytest

from hypocenter.base.errors import EXIT_USAGE
from hypocenter.cli.app import main


def said(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == EXIT_USAGE
    return capfd.readouterr().err


def test_without_the_library_a_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    wanted = "hypo eval needs lm_eval, which is not installed: pip install 'hypocenter[eval]'"
    assert said(["eval", "no-such-model.gguf", "--tasks", "x"], capfd) == f"hypo: {wanted}\n"


def test_without_a_task_it_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert "no task" in said(["eval", "--tasks", " , "], capfd)
