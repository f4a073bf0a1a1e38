"""All planted faults and healthy programs of all collections, found by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from faults import machine, patch, program, victim_case
from faults.row import Case, Platform
from hypocenter.base.errors import UsageError


def catalogue() -> list[Case]:
    """Every case; raises ValueError where two of a collection have one name."""
    found: list[Case] = [
        *victim_case.cases(),
        *program.programs(),
        *patch.all_patches(),
        *machine.machine_cases(),
    ]
    [(key, number)] = Counter(case.key for case in found).most_common(1)
    if number > 1:
        raise ValueError(f"{number} cases are {key}")
    return found


def named(names: Sequence[str]) -> list[Case]:
    """Those of these names or collections, or all; raises UsageError for what nothing is called."""
    every = catalogue()
    known = {word for case in every for word in case.words}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"nothing is named {unknown[0]!r}; python -m faults --list names all")
    return [case for case in every if not names or case.words & set(names)]


def chosen(names: Sequence[str], platform: Platform | None, has_card: bool) -> list[Case]:
    """Of the named ones those that can run; raises UsageError for a name of which nothing can."""
    asked = named(names)
    able = [case for case in asked if platform_of(case, platform, has_card) is not None]
    words = {word for case in able for word in case.words}
    if left := [name for name in names if name not in words]:
        on = sorted({one for case in asked if left[0] in case.words for one in case.platforms})
        raise UsageError(f"{left[0]} runs on {', '.join(on)} only")
    return able


def platform_of(case: Case, platform: Platform | None, has_card: bool) -> Platform | None:
    """On what a case runs: as asked, else the card where there is one and it can, else without."""
    if platform is not None:
        return platform if platform in case.platforms else None
    order = (Platform.CARD, Platform.SIMULATED, Platform.CPU)
    able = [
        one for one in order if one in case.platforms and (has_card or one is not Platform.CARD)
    ]
    return able[0] if able else None
