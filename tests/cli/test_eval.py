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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "0"], "--limit is 0, but must be from 1 to 16777216"),
        (["--limit", "-1"], "--limit is -1, but must be from 1"),
        (["--num-fewshot", "-1"], "--num-fewshot is -1, but must be from 0 to 1000"),
        (["--num-fewshot", "1001"], "--num-fewshot is 1001, but must be from 0 to 1000"),
        (["--include", "no-such-folder"], "--include is no-such-folder, but there is no such fol"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_there(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert message in said(["eval", "no-such-model.gguf", "--tasks", "x", *words], capfd)


def test_without_a_task_it_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert "no task" in said(["eval", "--tasks", " , "], capfd)
