"""Who is to blame for a proven cause: the line that is to be changed, as far as it is on record.

The line of the kernel at which a fault shows is often innocent.
"""

from __future__ import annotations

import msgspec

from hypocenter.doctor.beside.answers import had_the_same_prompts, was_asked_alike
from hypocenter.doctor.beside.counterpart import counterpart
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import CAUSES, Blame
from hypocenter.doctor.diagnosis import Claim, Culprit, RootCause
from hypocenter.doctor.installed_text import changes, texts_of
from hypocenter.record.bundle_index import LaunchMade


def with_culprit(case: Case, claim: Claim, *, is_shared: bool = False) -> RootCause:
    """The claim's root cause with its culprit and the line of its launch; it must have a root.

    `is_shared`: the good run has the same defect, so no line that changed since made it. Nor is one
    blamed where the runs were asked for other things: these may have made it.
    """
    root = claim.root
    assert root is not None
    use = next((use for use in case.launches if use.place == root.place), None)
    changed = None
    if not is_shared and _was_asked_the_same(case):
        changed = changed_line(case) or _changed_kernel_line(case, use)
    return msgspec.structs.replace(
        root,
        culprit=root.culprit or changed or _culprit(case, claim, root, use),
        launched_at=use.launch.site if use is not None else root.launched_at,
    )


def _culprit(case: Case, claim: Claim, root: RootCause, use: LaunchMade | None) -> Culprit | None:
    blame = root.blames or CAUSES[root.cause].blames
    tensors = [case.tensors[number] for number in claim.tensors if number in case.tensors]
    if blame is Blame.KERNEL and root.file:
        return Culprit(f"{root.file}:{root.line}", root.expression or "")
    if blame is Blame.LAUNCH and use is not None and _is_passed_on(use, root.argument):
        return Culprit(use.launch.caller, f"passes {root.argument} to {use.launch.kernel}")
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


def _was_asked_the_same(case: Case) -> bool:
    good = case.good_case
    if good is None:
        return False
    sides = good.index, case.index
    return was_asked_alike(*sides) or had_the_same_prompts(*sides)


def changed_line(case: Case) -> Culprit | None:
    """The one line of the engine's own Python that the good run, which had no fault, has not."""
    change = case.host.only
    if change is None or case.good is None or case.good.fault.kind != "none":
        return None
    return Culprit(change.place, change.text)


def _changed_kernel_line(case: Case, use: LaunchMade | None) -> Culprit | None:
    """The one line of the launch's kernel that the good run has not, where that is all that
    differs between the two runs.

    What the host wrote for the step is to be equal, too: no kernel has made that.
    """
    host, good = case.host, case.good
    if use is None or good is None or good.fault.kind != "none":
        return None
    if not _had_the_same_inputs(case, use):
        return None
    if host.changes or not host.is_whole or len(host.others) != 1:
        return None
    lines = changes(use.launch, case.sources, texts_of(good.sources))
    if len(lines) != 1:
        return None
    [line] = lines
    return Culprit(f"{line.file}:{line.line}", f"`{line.text}`; in the good run `{line.was}`")


def _had_the_same_inputs(case: Case, use: LaunchMade) -> bool:
    """Whether the host wrote the same for a launch's step as for its counterpart's."""
    good = case.good_case
    there = counterpart(case, good, use) if good is not None else None
    if good is None or there is None:
        return False
    sides = []
    for one, made in ((good, there), (case, use)):
        event = one.event_of(made)
        if event is None:
            return False
        named = {one.tensors[values.tensor].name: values for values in event.inputs}
        sides.append({name: (v.dtype, v.shape, v.data) for name, v in named.items()})
    return sides[0] == sides[1]


def _is_passed_on(use: LaunchMade, argument: str | None) -> bool:
    """Whether who launches a kernel was given the argument: it is one of the contract's."""
    return bool(use.launch.caller) and any(fact.name == argument for fact in use.launch.facts)
