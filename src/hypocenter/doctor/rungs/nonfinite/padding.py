"""NaN or infinity that a launch was given where it has no weight, and that spoils its results."""

from __future__ import annotations

from typing import Any

import msgspec

from hypocenter.base.errors import HypoError, MissingPackage
from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Edit, Proof, RootCause
from hypocenter.doctor.edits.bound_text import masks_beside
from hypocenter.doctor.mask_text import accesses_at
from hypocenter.doctor.rungs.replaying.trials import edits_of
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.nonfinite import NonFinite
from hypocenter.replay.terms import KernelText

#: Masks that are tried; each is a replay.
_MAX_TRIES = 4


def claim_of_padding(case: Case, event: NonFinite) -> RootCause | str:
    """The root cause in the launch that read what `event` tells of; else why there is none."""
    use = next((use for use in case.launches if use.seq == event.launched), None)
    if use is None or use.place is None:
        return "its launch was not kept"
    try:
        from hypocenter.replay.weightless import weightless_numbers

        found = weightless_numbers(case.index, use.place, text=KernelText(case.allow_source))
        if found is None:
            return "a replay of the launch does not show that such numbers have no weight there"
        mask = _mask(case, use, found) if found.site is not None else None
    except (HypoError, MissingPackage, ImportError) as error:
        return f"it was not replayed: {error}"
    name, site = found.parameter, found.site
    tensor = case.tensor_of(use.launch, name)
    held = count_text(found.num_elements, "element")
    fix = f"Mask the load of {name} to the elements that have weight, with other=0.0"
    return RootCause(
        cause=Cause.NONFINITE_PADDING,
        sentence=f"{use.launch.kernel}: {name}{list(found.element)} is not finite and has no "
        f"weight in what is written, as are {held} of {name}; {found.num_spoilt} results are not "
        "finite for that (0 times NaN is NaN)",
        fix=mask[0] if mask is not None else fix,
        proof=Proof(
            f"replayed with what it was given, {use.where} writes "
            f"{count_text(found.num_spoilt, 'result')} that are not finite",
            mask[1]
            if mask is not None
            else f"0 in place of {held} of {name}, then 1 and large numbers",
            "the same replay writes finite results, the same ones with each number in their place, "
            "and no other result has changed",
        ),
        kernel=use.launch.kernel,
        argument=name,
        tensor=tensor.name if tensor is not None else None,
        file=site.file if site is not None else None,
        line=site.line if site is not None else None,
        expression=site.expression if site is not None else None,
        place=use.place,
        edits=mask[2] if mask is not None else (),
    )


def _mask(case: Case, use: LaunchMade, found: Any) -> tuple[str, str, tuple[Edit, ...]] | None:
    """A mask of another load of the same index, with which the launch writes what it is to."""
    from hypocenter.replay.weightless import are_same, results_of

    source = case.sources.get(use.launch.source)
    if source is None or source.file != found.site.file or use.place is None:
        return None
    for access in accesses_at(source, found.site.line, found.parameter):
        for number, (edit, _, _) in enumerate(masks_beside(source, access)):
            if number >= _MAX_TRIES:
                break
            edited = msgspec.structs.replace(source, text=edit.text)
            text = KernelText(case.allow_source, edited=edited)
            if are_same(results_of(case.index, use.place, text=text), found.results):
                fix = f"Mask the access with `{edit.now}`, as another load of the same index is"
                return fix, f"`{edit.now}` as the mask", edits_of(source, edited)
    return None
