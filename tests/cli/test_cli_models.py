"""From a name to an answer: `hypo pull`, `hypo models`, `-hf`, and `LLM` with a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outside.loopback_hub import Hub, Repository, running_hub, use
from outside.terminal import TIMEOUT_SECONDS, assert_one_line, hypo_in_process
from repository import DEMO

from hypocenter.model import from_name
from hypocenter.model.tensors import footprint

NAME = "acme/demo-GGUF"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    data = DEMO.read_bytes()
    files = {"demo-Q8_0.gguf": data, "demo-F16.gguf": data + bytes(9_000_000), "config.json": b"{}"}
    with running_hub(acme__other=Repository({}), plain__files=Repository({"x.gguf": data})) as hub:
        hub.repositories[NAME] = Repository(files)
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def run(hub: Hub, home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0",
        "HYPO_RECORD": "0",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-P", *command], capture_output=True, text=True, env=environ,
        timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip


def hypo(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(hub, home, "-m", "hypocenter", *words)


def test_a_name_gives_the_answer_that_the_file_gives(hub: Hub, home: Path) -> None:
    words = ["-p", "def count(", "-n", "8", "-t", "1"]
    expected = hypo(hub, home, "run", str(DEMO), *words)
    assert expected.returncode == 0, expected.stderr
    done = hypo(hub, home, "run", "-hf", NAME, *words)
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    assert f"hypo: {NAME}: Q8_0 (" in done.stderr
    num_asked = len(hub.asked)
    again = hypo(hub, home, "run", f"{NAME}:q8_0", *words)
    assert (again.returncode, again.stdout) == (0, expected.stdout)
    assert len(hub.asked) == num_asked
    script = "import sys, hypocenter\nwith hypocenter.LLM(sys.argv[1], num_threads=1) as llm:\n"
    script += "    print(llm.generate('def count(', max_tokens=8).text)"
    in_python = run(hub, home, "-c", script, f"{NAME}:Q8_0")
    assert in_python.stdout.strip() in expected.stdout, in_python.stderr


@pytest.mark.tier("whole")
def test_models_are_pulled_listed_and_removed(hub: Hub, home: Path) -> None:
    pulled = hypo(hub, home, "pull", f"{NAME}:f16")
    assert pulled.returncode == 0, pulled.stderr
    path = Path(pulled.stdout.strip())
    assert path.stat().st_size == DEMO.stat().st_size + 9_000_000
    assert path.is_relative_to(home / "hub")
    fetched = json.loads(hypo(hub, home, "pull", f"{hub.url}/x.gguf", "--json").stdout)
    assert fetched["num_bytes"] == DEMO.stat().st_size
    listed = json.loads(hypo(hub, home, "models", "--json").stdout)
    assert {f"{NAME}:F16", f"{hub.url}/x.gguf"} <= {one["name"] for one in listed}
    shown = hypo(hub, home, "models").stdout
    assert f"{NAME}:F16" in shown
    assert str(path) in shown
    removed = hypo(hub, home, "models", "remove", f"{NAME}:F16")
    assert_one_line(removed.stderr, f"removed {NAME}:F16: ")
    assert not path.exists()
    assert hypo(hub, home, "models", "remove", f"{hub.url}/x.gguf").returncode == 0
    gone = hypo(hub, home, "models", "remove", f"{NAME}:F16")
    assert gone.returncode == 1
    assert_one_line(gone.stderr, f"{NAME}:F16 is not here; `hypo models` shows what is")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["pull", "acme/nothing-GGUF"], 1, "has no model acme/nothing-GGUF, or it is private"),
        (["pull", f"{NAME}:Q4_K_M"], 1, f"{NAME} has no Q4_K_M; it has Q8_0 ("),
        (["pull", "acme/other"], 1, "acme/other has no GGUF file"),
        (["pull", "./model.gguf"], 2, "names no model of a hub, and no file; write OWNER/NAME"),
        (["run", "-hf", NAME, "-m", "x.gguf", "-p", "x"], 2, "two models, -m 'x.gguf' and -hf"),
        (["models", "remove"], 2, "remove takes a name"),
        (["models", "list", NAME], 2, "list takes no name"),
        (["rm", NAME], 2, "it is `hypo models remove`"),
    ],
)
def test_what_cannot_be_is_one_line(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    says: str,
) -> None:
    use(hub, tmp_path, monkeypatch)
    done = hypo_in_process(*words)
    assert done.returncode == code
    assert_one_line(done.stderr, says)


@pytest.mark.parametrize(("device", "room"), [("cuda:1", 7000), ("sim:h100", None), ("cpu", 5000)])
def test_a_model_is_chosen_for_the_memory_of_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, room: int | None
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(from_name, "free_bytes_of", lambda device, environ: 7000)
    monkeypatch.setattr(footprint, "host_room", lambda: SimpleNamespace(available_bytes=5000))
    monkeypatch.setattr(from_name, "find_model", lambda name, **given: asked.update(given))
    from_name.file_of("acme/tiny", device=device)
    assert asked["room_bytes"] == room
