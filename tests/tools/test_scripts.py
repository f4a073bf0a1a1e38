"""The scripts install once, again when a pin changes, and refuse a Python that is too old."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from repository import ROOT

#: Stands in for the interpreter of the environment: notes calls of pip, passes everything else on.
FAKE_PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m pip" ]; then
    echo "$@" >>"$(dirname "$0")/calls"
    exit "${PIP_EXIT:-0}"
fi
exec %s "$@"
"""

REAL_PIP = """#!/bin/sh
case " $*" in
    *" --editable"*) exit 0 ;;
    *" -m pip"*) exec %s "$@" --no-compile --upgrade ;;
esac
exec %s "$@"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that scripts/setup reads, with an environment in which pip does nothing."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "hashes", tmp_path / "hashes")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    _executable(tmp_path / ".venv/bin/python", FAKE_PYTHON % sys.executable)
    return tmp_path


def _executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _setup(checkout: Path, *extras: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "HYPOCENTER_VENV"}
    return subprocess.run(
        [checkout / "scripts/setup", *extras],
        env={**clean, **environ}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def _calls(checkout: Path) -> list[str]:
    """Calls of pip since the last time this was asked."""
    path = checkout / ".venv/bin/calls"
    calls = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return calls


def test_the_second_call_installs_nothing(checkout: Path) -> None:
    assert _setup(checkout, "test").returncode == 0
    calls = _calls(checkout)
    assert [call.partition("--no-compile ")[2] for call in calls] == [
        "--require-hashes --no-deps -r hashes/build.txt",
        "--require-hashes --no-deps -r hashes/base.txt -r hashes/test.txt",
        "-c constraints.txt torch==2.13.0",
        "--no-deps --no-build-isolation --editable .",
    ]
    again = _setup(checkout, "test")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert _setup(checkout).returncode == 0  # the base is part of it
    assert _calls(checkout) == []


def test_the_base_does_not_count_as_the_test_environment(checkout: Path) -> None:
    assert _setup(checkout).returncode == 0
    assert not any("test.txt" in call for call in _calls(checkout))
    assert _setup(checkout, "test").returncode == 0
    assert any("test.txt" in call for call in _calls(checkout))


@pytest.mark.parametrize("name", ["constraints.txt", "hashes/base.txt", "pyproject.toml"])
def test_a_changed_pin_installs_again(checkout: Path, name: str) -> None:
    assert _setup(checkout).returncode == 0
    _calls(checkout)
    with (checkout / name).open("a") as file:
        file.write("# changed\n")
    assert _setup(checkout).returncode == 0
    assert _calls(checkout)


def test_a_failed_install_is_tried_again(checkout: Path) -> None:
    assert _setup(checkout, PIP_EXIT="1").returncode != 0
    _calls(checkout)
    assert _setup(checkout).returncode == 0
    assert _calls(checkout)


def test_an_unknown_extra_is_refused_before_anything_is_made(checkout: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    done = _setup(checkout, "tests")
    assert done.returncode == 2
    assert done.stderr.startswith("setup: no extra tests; hashes/ has: amd base ")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("right", [True, False])
def test_a_file_with_another_hash_is_not_installed(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, right: bool
) -> None:
    files, site = (tmp_path_factory.mktemp(name) for name in ("files", "site"))
    wheel = files / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy.py", "")
        archive.writestr(
            "toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0"
        )
        archive.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        archive.writestr("toy-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes() if right else b"another").hexdigest()
    for name in ("build", "base"):
        (checkout / f"hashes/{name}.txt").write_text(f"toy==1.0 --hash=sha256:{digest}\n")
    # The real pip, but for the package itself: it is not here.
    _executable(checkout / ".venv/bin/python", REAL_PIP % (sys.executable, sys.executable))
    environ = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(files), "PIP_TARGET": str(site)}
    done = _setup(checkout, PIP_CONFIG_FILE=os.devnull, **environ)
    assert (done.returncode == 0) == right, done.stderr
    assert (site / "toy.py").exists() == right
    assert ("DO NOT MATCH THE HASHES" in done.stderr) == (not right)


def test_without_a_python_that_is_new_enough_it_says_so(checkout: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    old = checkout / "python-old"
    _executable(old, "#!/bin/sh\nexit 1\n")
    done = _setup(checkout, PYTHON=str(old))
    assert done.returncode == 1
    assert "no Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize("venv", [None, "other", "/elsewhere"])
def test_the_demo_runs_where_its_caller_stands(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, venv: str | None
) -> None:
    shutil.copy(ROOT / "scripts/demo", checkout / "scripts/demo")
    _executable(checkout / "scripts/setup", "#!/bin/sh\n")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    environ = {key: value for key, value in os.environ.items() if key != "HYPOCENTER_VENV"}
    if venv == "/elsewhere":
        environ["HYPOCENTER_VENV"] = str(elsewhere)
    elif venv:
        environ["HYPOCENTER_VENV"] = venv
    folder = elsewhere if venv == "/elsewhere" else checkout / (venv or ".venv")
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    _executable(folder / "bin/hypo", '#!/bin/sh\npwd\necho "$@"\n')

    def demo(*args: str) -> str:
        return subprocess.run(
            [checkout / "scripts/demo", *args],
            cwd=elsewhere, env=environ, capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip

    assert demo("-f", "prompt.txt") == f"{elsewhere}\nrun -f prompt.txt\n"
    assert demo().startswith(f"{elsewhere}\nrun -p def read_lines(path):")
