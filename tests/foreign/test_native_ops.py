"""The machine code that sees torch's operations, and what is done where it cannot be had."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from hypocenter.foreign.ops import build
from hypocenter.foreign.ops.native import NativeOps
from hypocenter.settings.cache_folder import private_folder

torch: Any = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPO_NATIVE", "1")


def refused(caplog: pytest.LogCaptureFixture) -> str:
    """The one line that says why Python sees the operations."""
    with caplog.at_level(logging.WARNING, "hypocenter.foreign"):
        assert NativeOps.load(torch) is None
    [line] = caplog.messages
    assert line.startswith("operations are seen by Python, which takes longer: ")
    return line


def test_without_a_compiler_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "none of g++, c++, clang++ is on PATH" in refused(caplog)


def test_what_the_compiler_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    if not any(map(shutil.which, build.COMPILERS)):
        pytest.skip("there is no C++ compiler")
    monkeypatch.setenv("HYPO_CACHE_DIR", str(tmp_path / "cache"))
    private_folder.cache_clear()
    (tmp_path / "observer.cpp").write_text("int x = nothing;\n")
    monkeypatch.setattr(build, "OBSERVER", tmp_path / "observer.cpp")
    try:
        line = refused(caplog)
        assert "did not compile observer.cpp" in line
        assert "nothing" in line
        assert not [*(tmp_path / "cache").rglob("*.so")]
    finally:
        private_folder.cache_clear()


@pytest.mark.parametrize(("is_there", "is_used"), [(True, True), (False, False)])
def test_where_nothing_is_set_it_is_used_if_it_has_been_compiled(
    is_there: bool, is_used: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not any(map(shutil.which, build.COMPILERS)):
        pytest.skip("there is no C++ compiler")
    monkeypatch.delenv("HYPO_NATIVE")
    monkeypatch.setenv("HYPO_CACHE_DIR", str(tmp_path / "cache"))
    private_folder.cache_clear()
    loaded = []
    monkeypatch.setattr("hypocenter.foreign.ops.native.load", lambda torch: loaded.append(torch))
    monkeypatch.setattr(NativeOps, "__init__", lambda self, torch, code: None)
    monkeypatch.setattr(build, "_compile", pytest.fail)
    try:
        if is_there:
            build._library_place(torch)[0].touch()
        assert (NativeOps.load(torch) is not None) == is_used
        assert bool(loaded) == is_used
    finally:
        private_folder.cache_clear()


def test_the_setting_has_python_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPO_NATIVE", "0")
    monkeypatch.setattr(build, "load", pytest.fail)
    assert NativeOps.load(torch) is None
