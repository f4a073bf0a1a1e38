"""Launches of which only what changed is written each time: what stays, and both put together.

`foreign/known_launches.py` writes them. Nobody but the reader of a run's files meets them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from hypocenter.record.events import ArgumentRecord, Launched, LaunchRecord, Repeated


class KnownLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What a launch has in common with others; a Repeated has its grid, and these `scalars`."""

    id: int
    launch: LaunchRecord
    scalars: tuple[str, ...]


def full_launch(event: Repeated, known: Mapping[int, KnownLaunch]) -> Launched | None:
    """What is told in short, as if it had been told in full; None where it is not known what."""
    common = known.get(event.of)
    if common is None or len(common.scalars) != len(event.scalars):
        return None
    given = dict(zip(common.scalars, event.scalars, strict=True))
    launch = msgspec.structs.replace(
        common.launch,
        grid=event.grid,
        arguments=tuple(_with_scalars(common.launch.arguments, given)),
    )
    return Launched(seq=event.seq, step=event.step, launch=launch)


def _with_scalars(
    arguments: Iterable[ArgumentRecord], given: Mapping[str, object]
) -> Iterable[ArgumentRecord]:
    for argument in arguments:
        if argument.name in given:
            yield msgspec.structs.replace(argument, value=given[argument.name])
        else:
            yield argument
