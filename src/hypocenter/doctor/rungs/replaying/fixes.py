"""A proven cause with its fix as data: what was applied and tried, or what fits equally well.

Tries nothing: `trials.py` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Alternative, Effect, RootCause
from hypocenter.doctor.rungs.replaying.trials import ASTRAY, Fitting, is_same
from hypocenter.replay.findings import Finding
from hypocenter.replay.text import place_text


def with_fix(
    root: RootCause, found: Sequence[Fitting], finding: Finding, seen: Sequence[Finding]
) -> RootCause:
    """The root with the edits and the effect of its fix, or with all that fit as alternatives.

    Alternatives that disagree about class or line leave only the access itself proven. `seen` is
    what the replay found, of which a fix may leave some.
    """
    first = found[0]
    left = seen if first.green.effect is None else first.green.left
    others = (other for other in left if not is_same(other, finding))
    root = msgspec.structs.replace(root, beside=tuple(dict.fromkeys(map(beside_text, others))))
    root = msgspec.structs.replace(root, fix=_fix_text(first, finding))
    if len(found) == 1:
        return msgspec.structs.replace(root, edits=first.edits, effect=first.green.effect)
    alternatives = tuple(
        Alternative(
            fix=_fix_text(fit, finding),
            edits=fit.edits,
            effect=fit.green.effect or Effect(),
        )
        for fit in found
    )
    root = msgspec.structs.replace(root, alternatives=alternatives)
    places = {(fit.cause.cause, fit.cause.file, fit.cause.line) for fit in found}
    if len(places) == 1:
        return root
    site = finding.sites[0] if finding.sites else None
    return msgspec.structs.replace(
        root,
        cause=Cause.ACCESS_OUTSIDE,
        file=site.file if site else root.file,
        line=site.line if site else root.line,
        expression=site.expression if site else root.expression,
    )


def _fix_text(fit: Fitting, finding: Finding) -> str:
    """The fix, and whether other accesses of the launch go astray with it still."""
    left = fit.green.left if fit.green.effect is not None else ()
    is_part = any(other.kind in ASTRAY and not is_same(other, finding) for other in left)
    return f"{fit.cause.fix}, which mends this access alone" if is_part else fit.cause.fix


def beside_text(finding: Finding) -> str:
    """One line on a finding that is not the one whose cause is told."""
    line = f" in line {finding.line}" if finding.line else ""
    return f"{finding.kind}{line}: {place_text(finding)}"
