"""Causes of an access outside that lie in a stride that the launch was given as a number.

A number counts as a stride by its name. The replay says whether one of the tensor's own strides in
its place makes the access right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.kernel_text import line_text
from hypocenter.doctor.rungs.replaying.replay_cause import MakeCorrection, ReplayCause, place_of
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord, TensorRecord
from hypocenter.replay.findings import Finding, Site

_OF_STRIDES = re.compile(r"stride|pitch", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z_]\w*")
#: Replays that are tried for one access.
_MAX_TRIES = 4


def wrong_strides(
    use: LaunchMade,
    source: SourceRecord,
    finding: Finding,
    tensor: TensorRecord,
    site: Site,
    *,
    exchanged: bool,
) -> Iterator[ReplayCause]:
    """One for two strides that may be `exchanged`; else for each that may stand for another."""
    named = {*finding.values, *_WORD.findall(line_text(source, site.line))}
    given = {
        argument.name: argument.value
        for argument in use.launch.arguments
        if type(argument.value) is int
        and argument.name in named
        and _OF_STRIDES.search(argument.name)
    }
    own = sorted(set(tensor.strides) - {0}, reverse=True)
    swapped = [
        _cause(finding, tensor, site, {a: given[b], b: given[a]}, given)
        for a, b in combinations(given, 2)
        if given[a] != given[b] and {given[a], given[b]} <= set(own)
    ]
    others = [
        _cause(finding, tensor, site, {name: right}, given)
        for name, value in given.items()
        if value not in own
        for right in own
        # With 1 hardly any access leaves a tensor, and what a window moves on by is called so too.
        if right > 1
    ]
    yield from (swapped if exchanged else others)[:_MAX_TRIES]


def _cause(
    finding: Finding,
    tensor: TensorRecord,
    site: Site,
    right: Mapping[str, int],
    given: Mapping[str, int],
) -> ReplayCause:
    now = " and ".join(f"{name} = {value}" for name, value in right.items())
    was = " and ".join(f"{name} = {given[name]}" for name in right)
    of = f"the strides of {finding.argument} are {tensor.strides}"
    put_right: Callable[[MakeCorrection], Mapping[str, Any]] = lambda make: dict(right)  # noqa: E731
    return ReplayCause(
        Cause.WRONG_STRIDE,
        f"Pass {now} instead of {was}: {of}",
        (f"{was} was passed, but {of}",),
        ((now, put_right),),
        **place_of(site),
        argument=next(iter(right)),
        in_kernel=False,
    )
