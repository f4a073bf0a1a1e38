"""A model's name to its file, for the architectures that run here and the memory that is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypocenter.config import OnProgress
from hypocenter.hub.find import find_model
from hypocenter.model.families import FAMILIES
from hypocenter.model.footprint import host_room
from hypocenter.package import bundled_model


def file_of(
    name: str | None,
    *,
    device: str,
    is_hub: bool = False,
    is_newest: bool = False,
    progress: OnProgress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """As `find_model`, which says what the arguments mean and what is raised.

    Without a name it is the model that comes with the package. How much memory a GPU has is not
    asked for here: that would open it.
    """
    if name is None:
        return bundled_model()
    room = host_room() if device == "cpu" else None
    return find_model(
        name,
        architectures=frozenset(FAMILIES),
        room_bytes=None if room is None else room.available_bytes,
        is_hub=is_hub,
        is_newest=is_newest,
        progress=progress,
        say=say,
    )
