"""Processes that are started before it is known what they will be told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypocenter.cli import early
from hypocenter.watch import prepared
from hypocenter.watch.child import Ended, Follower, watch

PROGRAM = """
import faulthandler, os, sys
from hypocenter.worker.prepared import words_of
words = words_of(sys.argv[1:])
print("words", list(words), file=sys.stderr)
print("read", repr(sys.stdin.read()), file=sys.stderr)
print("told", os.environ.get("OF_THE_COMMAND"), os.environ.get("OF_BEFORE"), file=sys.stderr)
print("keys", os.environ.get("HYPO_API_KEY"), file=sys.stderr)
print("stacks", faulthandler.is_enabled(), "colorsys" in sys.modules, file=sys.stderr)
sys.exit(5)
"""


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules are scripts here, of which `module` is a word."""
    monkeypatch.setattr(
        prepared, "module_command", lambda module: [sys.executable, "-c", PROGRAM, module][:3]
    )
    yield
    prepared.drop()


def run(tmp_path: Path, pids: list[int], *words: str) -> Ended:
    environ = {**os.environ, "OF_THE_COMMAND": "yes", "PYTHONFAULTHANDLER": "1"}
    environ.pop("OF_BEFORE", None)
    return watch(
        [sys.executable, "-c", PROGRAM, *words],
        environ,
        tmp_path,
        lambda data: None,
        stdout=2,
        follower=Follower(pids.append),
    )


def test_one_becomes_the_process_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_BEFORE", "yes")
    monkeypatch.setenv("HYPO_API_KEY", "secret")
    prepared.prepare("one", ("colorsys", "no_such_module"))
    [process] = prepared._waiting.values()
    monkeypatch.delenv("HYPO_API_KEY")
    ended = run(tmp_path, pids := list[int](), "a.sock", "model.gguf", "cpu")
    assert pids == [process.pid]
    assert os.getpgid(0) != process.pid
    assert ended.exit_code == 5
    assert ended.stderr.splitlines() == [
        "words ['a.sock', 'model.gguf', 'cpu']",
        "read ''",
        "told yes None",
        "keys None",
        "stacks True True",
    ]
    again = run(tmp_path, pids, "b.sock")
    assert pids[1] != pids[0], "it serves once"
    assert again.stderr.splitlines()[0] == "words ['b.sock']"


def test_one_that_has_died_is_replaced(tmp_path: Path) -> None:
    prepared.prepare("one", ())
    [process] = prepared._waiting.values()
    process.kill()
    process.wait()
    assert run(tmp_path, pids := list[int](), "a.sock").exit_code == 5
    assert pids != [process.pid]


def test_what_nobody_needs_ends(tmp_path: Path) -> None:
    prepared.prepare("one", ())
    [process] = prepared._waiting.values()
    assert prepared.take(["true"], {}, 2) is None
    assert prepared.take([sys.executable, "-c", PROGRAM], {}, None) is None, "another stdout"
    assert process.poll() is None
    prepared.drop()
    assert process.returncode is not None
    prepared.prepare("one", ())
    [other] = prepared._waiting.values()
    assert other.stdin is not None
    other.stdin.close()  # as when the server has ended
    assert other.wait(60) == 0


@pytest.mark.parametrize(
    ("words", "environ", "has_gpu", "is_begun"),
    [
        (["model.gguf"], {}, True, True),
        (["model.gguf", "--device", "cuda:1"], {}, True, True),
        (["model.gguf"], {}, False, False),
        (["model.gguf", "--device", "cpu"], {}, True, False),
        (["model.gguf", "--device=sim:h200"], {}, True, False),
        (["model.gguf"], {"HYPO_DEVICE": "cpu"}, True, False),
        (["model.gguf"], {"HYPO_SERVE_DEVICE": "emu:mi300x"}, True, False),
        (["--help"], {}, True, False),
    ],
)
def test_they_are_begun_where_a_gpu_will_be_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    environ: dict[str, str],
    has_gpu: bool,
    is_begun: bool,
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(early, "prepare", lambda module, imports: begun.append(module))
    if has_gpu:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidiactl").touch()
    early.begin(words, environ, tmp_path)
    expected = ["hypocenter.worker.keeper", "hypocenter.worker.worker"]
    assert begun == (expected if is_begun else [])


def test_they_end_with_who_prepared_them(tmp_path: Path) -> None:
    """At once, and not when they have imported all: they have its stderr open."""
    waiting = "import sys, time; sys.stderr.write('there'); sys.stderr.flush(); time.sleep(60)"
    program = f"""
from hypocenter.watch import prepared
prepared.module_command = lambda module: [{sys.executable!r}, "-c", {waiting!r}]
prepared.prepare("one", ())
[process] = prepared._waiting.values()
assert process.stderr.read(5) == b"there"
print(process.pid)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    assert not Path(f"/proc/{int(done.stdout)}").exists()
