"""Attacks by load: others are answered beside them, and nothing of them stays behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attack.arena import Arena, Row
from attack.attacks import ATTACKS, Attack


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.id)
def test_an_attack_hurts_nobody_else(
    attack: Attack, arenas: Callable[[str], Arena], note: Callable[[Row], None]
) -> None:
    note(arenas(attack.server).round(attack))
