"""Bundles as commands take them: from a folder that a person names, with a word on what is wrong.

Examines nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypocenter.base.errors import UsageError
from hypocenter.cli.output import say
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle
from hypocenter.record.gap import GapKind

#: What a folder holds the bundle as that `python -m faults run --out` leaves.
_INNER = "bundle"


def bundle_at(folder: str) -> Bundle:
    """Load it; says on stderr what is damaged.

    Raises UsageError where there is no bundle, BadBundle for one that cannot be read.
    """
    if not os.path.lexists(folder):
        raise UsageError(f"{folder}: no such folder; a bundle is one, made by `hypo doctor -- ...`")
    if os.path.lexists(Path(folder, _INNER, bundles.JSON)):
        folder = os.path.join(folder, _INNER)
    if os.path.isdir(folder) and not os.path.lexists(Path(folder, bundles.JSON)):
        raise UsageError(
            f"{folder}: {bundles.JSON} is not there, so this is no bundle; `hypo doctor -- ...` "
            "makes one"
        )
    found = bundles.load(folder)
    if damaged := [gap for gap in found.missing if gap.kind is GapKind.DAMAGED]:
        more = f" (and {len(damaged) - 1} more under NOT SEEN)" if len(damaged) > 1 else ""
        say(f"{folder} is damaged, so what follows may lack what matters: {damaged[0]}{more}")
    return found


def tell_of_good(good: Bundle, name: str, examined: Bundle) -> None:
    """Say why a run given as good may be none to compare with; compares all the same."""
    reasons = []
    if good.fault.kind != "none":
        reasons.append(f"it is of a run that ended in a fault ({good.fault.kind})")
    if good.device != examined.device and good.device and examined.device:
        reasons.append(f"it ran on {good.device}, and the other on {examined.device}")
    elif (ours := _weights(examined)) and (theirs := _weights(good)) and ours != theirs:
        reasons.append("it had other weights: another model, or another file of it")
    if not good.events:
        reasons.append("it recorded nothing")
    if reasons:
        say(f"--good {name} may be no run to compare with: {'; '.join(reasons)}")


def _weights(bundle: Bundle) -> set[tuple[str, str, tuple[int, ...]]]:
    """Names, types and shapes of what a model's file holds."""
    return {
        (tensor.name, tensor.dtype, tensor.shape)
        for tensor in bundle.tensors
        if tensor.owner == "model"
    }
