"""How a report of the doctor is held against the truth: five claims, and no false one.

CAUSE, KERNEL, ARGUMENT, LINE and FIX are claims of their own. One that is wrong makes the whole
report false, whatever else it says: who believes it edits what was right. One that is left out
makes it vague. Runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from faults.truth import FIX_OF, Truth

CLAIMS = ("cause", "kernel", "argument", "line", "fix")
#: What is said where an access left its tensor and nothing tells why: true, and little.
VAGUE_CAUSE = "access outside its tensor"

#: A cause of a report as JSON, and a line of a file.
Root = Mapping[str, Any]
Places = Collection[tuple[str, int]]


class Says(StrEnum):
    """What a report is worth."""

    RIGHT = "right"
    VAGUE = "vague"
    SILENT = "silent"
    FALSE = "false"


class Claim(StrEnum):
    """What one claim is worth."""

    RIGHT = "right"
    MISSING = "missing"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a report is worth, and by name each claim of its first cause."""

    says: Says
    claims: Mapping[str, Claim]

    def all_but(self, worth: Claim) -> list[str]:
        """The claims that are not worth that."""
        return [name for name, claim in self.claims.items() if claim is not worth]


def judged(
    roots: Sequence[Root] | None,
    truth: Truth,
    guilty: Places = (),
    changed: Places | None = None,
    *,
    has_fix: bool = True,
) -> Verdict:
    """What the causes of a report are worth; the first has to be right, and none may be wrong.

    `guilty` is where the lines of the truth stand. Where it is known which lines were `changed`,
    whoever is blamed must be one of them. Without `has_fix` it is no report that could tell a fix.
    """
    if not roots:
        return Verdict(Says.SILENT, dict.fromkeys(CLAIMS, Claim.MISSING))
    claims = [_claims(root, truth, guilty, changed) for root in roots]
    if not has_fix:
        claims = [{**one, "fix": Claim.RIGHT} for one in claims]
    if any(Claim.WRONG in one.values() for one in claims) or not truth.causes:
        says = Says.FALSE
    else:
        says = Says.VAGUE if Claim.MISSING in claims[0].values() else Says.RIGHT
    return Verdict(says, claims[0])


def refuted(verdict: Verdict) -> Verdict:
    """The same where the fix was applied and did not put it right."""
    return Verdict(Says.FALSE, {**verdict.claims, "fix": Claim.WRONG})


def _claims(root: Root, truth: Truth, guilty: Places, changed: Places | None) -> dict[str, Claim]:
    is_vague = root.get("cause") == VAGUE_CAUSE
    lines = _line(root, guilty) if truth.lines else Claim.RIGHT
    if changed is not None:
        lines = max(lines, _blamed(root, changed), key=list(Claim).index)
    return {
        "cause": Claim.MISSING if is_vague else _is(root.get("cause") in truth.causes),
        "kernel": _named(root.get("kernel"), truth.kernels, "_kernel"),
        "argument": _named(root.get("argument"), truth.arguments, "_ptr"),
        "line": lines,
        "fix": _fix(root, truth, is_vague=is_vague),
    }


def _is(is_right: bool) -> Claim:
    return Claim.RIGHT if is_right else Claim.WRONG


def _named(name: str | None, right: tuple[str, ...], ending: str) -> Claim:
    """By one of its names, or by the one that its source has: the same with `ending`."""
    if not right or (name or "") in right:
        return Claim.RIGHT
    if not name:
        return Claim.MISSING
    begun = any(known.endswith("_") and name.startswith(known) for known in right)
    return _is(begun or name in [known + ending for known in right if known])


def _line(root: Root, guilty: Places) -> Claim:
    """Of the line that meets the fault, or of the one that is to be changed.

    A fault of the host shows in a line of a kernel: that is true, and no answer.
    """
    places = [place for place in (_culprit(root), _met(root)) if place is not None]
    if any(_is_among(place, guilty) for place in places):
        return Claim.RIGHT
    files = {(file, 0) for file, _ in guilty}
    is_elsewhere = not any(_is_among((file, 0), files) for file, _ in places)
    return Claim.MISSING if is_elsewhere and _culprit(root) is None else Claim.WRONG


def _blamed(root: Root, changed: Places) -> Claim:
    place = _culprit(root) or _met(root)
    return Claim.MISSING if place is None else _is(_is_among(place, changed))


def _met(root: Root) -> tuple[str, int] | None:
    return (str(root["file"]), int(root["line"])) if root.get("file") and root.get("line") else None


def _culprit(root: Root) -> tuple[str, int] | None:
    file, _, line = str((root.get("culprit") or {}).get("place") or "").rpartition(":")
    return (file, int(line)) if file and line.isdigit() else None


def _is_among(place: tuple[str, int], places: Places) -> bool:
    return any(place[1] == line and _is_same_file(place[0], file) for file, line in places)


def _is_same_file(one: str, other: str) -> bool:
    """By as many folders as both tell: a report names no more of a path than it has to.

    It has "~" for the folder of the user, of whose own folders it tells none.
    """
    parts = [PurePosixPath(path.removeprefix("~/")).parts[::-1] for path in (one, other)]
    return all(a == b for a, b in zip(*parts, strict=False))


def _fix(root: Root, truth: Truth, *, is_vague: bool) -> Claim:
    """Alternatives are no claim that any of them is right, but one must be."""
    alternatives = root.get("alternatives") or ()
    texts = [str(one.get("fix") or "") for one in alternatives] or [str(root.get("fix") or "")]
    said = " ".join((*texts, str(root.get("sentence") or "")))
    if not alternatives and truth.fix.never and re.search(truth.fix.never, said, re.IGNORECASE):
        return Claim.WRONG
    wanted = truth.fix.says or FIX_OF.get(str(root.get("cause")), "")
    if any(text and re.search(wanted, text, re.IGNORECASE) for text in texts):
        return Claim.RIGHT
    return Claim.MISSING if is_vague or not any(texts) else Claim.WRONG
