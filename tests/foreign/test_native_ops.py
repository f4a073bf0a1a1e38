"""The machine code that sees torch's operations, and what is done where it cannot be had."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator
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


@pytest.fixture
def pretended_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A g++ that does what the file beside it says; the folder in which it looks."""
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        pytest.skip("the headers of Python are not installed")
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "g++"
    compiler.write_text(f"#!/bin/sh\n. {tmp_path}/does\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("HYPO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HYPO_NATIVE")
    private_folder.cache_clear()
    yield tmp_path
    private_folder.cache_clear()


def wait_for(path: Path) -> None:
    until = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.01)


#: Writes the file that the word behind -o names.
WRITES = 'for word; do test "$was" = -o && echo made > "$word"; was=$word; done'


def test_a_run_with_nan_has_it_compiled_for_the_next_one(
    pretended_compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (pretended_compiler / "does").write_text(
        f"while ! test -f {pretended_compiler}/go; do :; done\n{WRITES}\n"
    )
    made = build._library_place(torch)[0]
    with caplog.at_level(logging.WARNING, "hypocenter.foreign"):
        assert NativeOps.load(torch) is None  # not with --nan
        assert not made.with_suffix(".part").exists()
        monkeypatch.setenv("HYPO_NAN", "1")
        assert NativeOps.load(torch) is None
        assert NativeOps.load(torch) is None  # a second one, as of another rank
    assert len(caplog.messages) == 1
    assert not made.exists()
    (pretended_compiler / "go").touch()
    wait_for(made)
    assert made.read_text() == "made\n"
    assert not made.with_suffix(".part").exists()


@pytest.mark.tier("sim")  # it takes a second of a processor
def test_a_compiler_that_never_ends_is_ended(
    pretended_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LATER_CPU_SECONDS", 1)
    (pretended_compiler / "does").write_text("while :; do :; done\n")
    made = build._library_place(torch)[0]
    assert build.build_later(torch)
    wait_for(made.with_suffix(".failed"))
    assert not made.with_suffix(".part").exists()


def test_what_failed_is_not_compiled_again(
    pretended_compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (pretended_compiler / "does").write_text("exit 1\n")
    monkeypatch.setenv("HYPO_NAN", "1")
    made = build._library_place(torch)[0]
    assert build.build_later(torch)
    wait_for(made.with_suffix(".failed"))
    assert not build.build_later(torch)
    assert not made.exists()
    with caplog.at_level(logging.WARNING, "hypocenter.foreign"):
        assert NativeOps.load(torch) is None
    [line] = caplog.messages
    assert "HYPO_NATIVE=1 tries again and says why" in line


def test_one_that_was_cut_off_is_begun_again(
    pretended_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pretended_compiler / "does").write_text(WRITES)
    made = build._library_place(torch)[0]
    part = made.with_suffix(".part")
    part.touch()
    assert not build.build_later(torch)
    os.utime(part, (0, 0))
    assert build.build_later(torch)
    wait_for(made)
