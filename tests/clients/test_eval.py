"""`hypo eval` with lm-eval's own library: its figures are those of the Python API.

The library lies in this environment and the engine in another one, whose Python finds it here.
"""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from clients.test_lm_eval import ROWS, expected, tasks

__all__ = ["expected", "tasks"]

PROGRAM = """
import sys
sys.path.append(sys.argv.pop(1))
sys.argv[0] = "hypo"
from hypocenter.__main__ import main
main()
"""


def evaluated(python: str, model: Path, tasks: Path, names: str) -> dict[str, Any]:
    """The figures of each task, by its name."""
    library = sysconfig.get_paths()["purelib"]
    words: list[str | Path] = [
        "eval",
        model,
        "--tasks",
        names,
        "--include",
        tasks,
        "--device",
        "cpu",
        "--json",
    ]
    done = subprocess.run(
        [python, "-c", PROGRAM, library, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {task["name"]: task for task in json.loads(done.stdout)["tasks"]}


def test_figures_are_those_of_the_python_api(
    python: str, model: Path, tasks: Path, expected: Any
) -> None:
    found = evaluated(python, model, tasks, "ours_choice,ours_free")
    pairs = [logprob for logprob, _ in expected["pairs"]]
    is_right = [right > wrong for right, wrong in zip(pairs[::2], pairs[1::2], strict=True)]
    answers = [row["right"] == text for row, text in zip(ROWS, expected["texts"], strict=True)]
    assert found["ours_choice"]["figures"]["acc,none"] == sum(is_right) / len(ROWS)
    assert found["ours_free"]["figures"]["exact_match,none"] == sum(answers) / len(ROWS)
    assert found["ours_choice"]["num_samples"] == len(ROWS)


def test_an_unknown_task_is_refused(python: str, model: Path, tasks: Path) -> None:
    library = sysconfig.get_paths()["purelib"]
    done = subprocess.run(
        [python, "-c", PROGRAM, library, "eval", model, "--tasks", "nosuch", "--device", "cpu"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "lm-eval has no task 'nosuch'" in done.stderr
