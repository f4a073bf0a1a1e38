"""Where hypocenter does not run, it says so in one line instead of lacking a module."""

from __future__ import annotations

import sys

import pytest

from hypocenter import __main__ as command


@pytest.mark.parametrize(
    ("system", "told"),
    [
        ("win32", "this is Windows, but hypocenter runs on Linux only; use WSL 2"),
        ("darwin", "this is macOS, but hypocenter runs on Linux only; use a container"),
        ("freebsd14", "this is freebsd14, but hypocenter runs on Linux only"),
    ],
)
def test_other_systems_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, system: str, told: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(SystemExit, match=f"hypo: {told}"):
        command.main()


def test_linux_is_not() -> None:
    assert command.platform_problem("linux") == ""
