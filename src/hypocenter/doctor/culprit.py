"""Who is to blame for a proven cause: the line that is to be changed, as far as it is on record.

The line of the kernel at which a fault shows is often innocent.
"""

from __future__ import annotations

import msgspec

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import CAUSES, Blame
from hypocenter.doctor.diagnosis import Claim, Culprit, RootCause
from hypocenter.record.bundle_index import LaunchMade


def with_culprit(case: Case, claim: Claim) -> RootCause:
    """The claim's root cause with its culprit and the line of its launch; it must have a root."""
    root = claim.root
    assert root is not None
    use = next((use for use in case.launches if use.place == root.place), None)
    return msgspec.structs.replace(
        root,
        culprit=root.culprit or _culprit(case, claim, root, use),
        launched_at=use.launch.site if use is not None else root.launched_at,
    )


def _culprit(case: Case, claim: Claim, root: RootCause, use: LaunchMade | None) -> Culprit | None:
    blame = root.blames or CAUSES[root.cause].blames
    tensors = [case.tensors[number] for number in claim.tensors if number in case.tensors]
    if blame is Blame.KERNEL and root.file:
        return Culprit(f"{root.file}:{root.line}", root.expression or "")
    if blame is Blame.LAUNCH and use is not None and use.launch.site:
        return Culprit(use.launch.site, f"launches {use.launch.kernel}")
    if blame is Blame.LAUNCH and root.launched_at:
        return Culprit(root.launched_at, f"calls {root.kernel}")
    for tensor in tensors:
        freed, made = case.freed.get(tensor.allocation), case.allocations.get(tensor.allocation)
        if blame is Blame.FREE and freed is not None and freed.site:
            return Culprit(freed.site, f"frees {tensor.name}")
        if blame is Blame.MAKER and made is not None and made.site:
            return Culprit(made.site, f"makes {tensor.name}")
    return None
