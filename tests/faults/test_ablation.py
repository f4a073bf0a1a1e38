"""Of a fault those rungs are taken away that confirmed something of it, and no others."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import cast

import pytest

from faults import ablation
from faults.row import Again, Case, Platform, Role, Row
from hypocenter.doctor.doctor import LADDER


class Pretended(Case):
    """Needs its rung "replay"; "values" confirms the same."""

    collection, name, platforms = "patches", "pretended", frozenset({Platform.CPU})

    def __init__(self, is_right: bool = True) -> None:
        self.asked: list[tuple[str, ...]] = []
        self._is_right = is_right

    def run(self, platform: Platform, work: Path) -> list[Row]:
        raise NotImplementedError("it has run")

    def named_again(self, work: Path, without: Collection[str]) -> Again | None:
        self.asked.append(tuple(without))
        return Again(self._is_right and "replay" not in without, frozenset({"replay", "values"}))


def test_only_rungs_that_confirmed_something_are_taken_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = Pretended()
    monkeypatch.setattr(ablation, "catalogue", lambda: [case])
    found = ablation._by_rung(tmp_path, case.key)
    assert [rung for rung, is_named in found.items() if not is_named] == ["replay"]
    assert sorted(case.asked) == [(), ("replay",), ("values",)]
    wrong = Pretended(is_right=False)
    monkeypatch.setattr(ablation, "catalogue", lambda: [wrong])
    assert not ablation._by_rung(tmp_path, wrong.key)


def test_a_rung_without_which_all_is_named_is_idle() -> None:
    named = {rung: ["patches/a"] for rung in ("", *LADDER)} | {"replay": []}
    idle = ablation.idle_rungs(named)
    assert "values" in idle
    assert not {"replay", "core dump"} & set(idle)
    row = Row(collection="patches", name="a", platform=Platform.CPU, role=Role.FAULT, says="silent")
    assert not any(ablation.named_without([row], [cast(Case, row)], Path(), 1).values())
