"""Which line makes what a name stands for, as far as the source of one function says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from hypocenter.foreign import call_text, caller
from hypocenter.foreign.caller import made_at
from hypocenter.foreign.seen_memory import Given


def lines_of(given: torch.Tensor) -> dict[str, str]:
    """Of each name below, where it is made; what stands behind `#` is what to find."""
    made = torch.empty(3)  # made
    chained = torch.randn(4).to("cpu").view(2, 2)  # chained
    for _ in range(2):
        looped = torch.zeros_like(made)  # looped
    view = made.view(3)
    given = torch.ones(2)
    twice = torch.ones(2)
    twice = torch.ones(3)
    over = torch.ones(2)
    for over in [torch.ones(1)]:  # noqa: B007
        pass
    left, right = torch.ones(2), torch.ones(3)
    frame = sys._getframe()
    del view, given, twice, over, left, right, looped, chained
    names = ("made", "chained", "looped", "view", "given", "twice", "over", "left", "nothing")
    return {name: made_at(frame, name) for name in names}


def test_a_name_that_is_made_in_one_place_has_that_line() -> None:
    with open(__file__) as file:
        lines = file.read().splitlines()
    places = {
        line.rpartition("# ")[2]: f"{__file__}:{number}" for number, line in enumerate(lines, 1)
    }
    found = lines_of(torch.ones(1))
    for name, place in found.items():
        expected = places[name] if name in ("made", "chained", "looped") else ""
        assert place == expected, name
    assert made_at(None, "made") == ""


def test_a_function_whose_source_is_gone_has_no_lines() -> None:
    scope: dict[str, Any] = {"sys": sys, "torch": torch}
    exec("def f():\n    x = torch.ones(2)\n    return sys._getframe()\nframe = f()\n", scope)
    assert made_at(scope["frame"], "x") == ""


def test_a_program_without_functions_has_lines_as_well(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys, torch\n\nx = torch.ones(2)\nframe = sys._getframe()\n")
    scope: dict[str, Any] = {}
    exec(compile(program.read_text(), str(program), "exec"), scope)
    assert made_at(scope["frame"], "x") == f"{program}:3"


class Spelling:
    """Launched in place of a kernel with parameters `names`: how what it got for x is spelled."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __getitem__(self, grid: int) -> Any:
        return self._launch

    def _launch(self, *_: Any) -> tuple[str, str]:
        return Given(self.names, "cuda:0", sys._getframe(1), [], []).spelling_of("x")


def test_what_one_line_gives_two_kernels_is_spelled_for_each() -> None:
    one, two = torch.ones(1), torch.ones(2)
    told = [kernel[1](one, two)[0] for kernel in (Spelling("x", "y"), Spelling("y", "x"))]
    assert told == ["one", "two"]


def test_functions_that_go_away_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Their codes may lie at the same address, one after the other."""
    told = []
    for number in range(30):
        program = tmp_path / f"program{number}.py"
        text = f"def f(launch):\n    x{number} = torch.empty(1)\n    return launch[1](x{number})\n"
        program.write_text(text)
        scope: dict[str, Any] = {"torch": torch}
        exec(compile(text, str(program), "exec"), scope)
        told.append(scope["f"](Spelling("x")))
        del scope
        caller._maker_lines.cache_clear()
        call_text._spell.cache_clear()
    expected = [(f"x{number}", f"{tmp_path}/program{number}.py:2") for number in range(30)]
    assert told == expected
