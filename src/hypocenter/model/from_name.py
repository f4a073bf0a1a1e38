"""A model's name to its file, for the architectures that run here and the memory that is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hypocenter.base.cards import free_bytes_of
from hypocenter.base.package import bundled_model
from hypocenter.device.choice import choose_device
from hypocenter.hub.find import find_model
from hypocenter.model.facts.families import FAMILIES
from hypocenter.settings.config import AUTO, OnProgress, is_simulated


def file_of(
    name: str | None,
    *,
    device: str,
    is_hub: bool = False,
    is_newest: bool = False,
    progress: OnProgress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Does what `find_model` does, which says what the arguments mean and what is raised.

    Without a name it is the model that comes with the package.
    """
    if name is None:
        return bundled_model()
    return find_model(
        name,
        architectures=frozenset(FAMILIES),
        room_bytes=_room_bytes(device),
        is_hub=is_hub,
        is_newest=is_newest,
        progress=progress,
        say=say,
    )


def _room_bytes(device: str) -> int | None:
    """Memory that is left where a model is to run; None where nobody says, as of simulated GPUs."""
    if device == AUTO:
        device = choose_device().device
    if is_simulated(device):
        return None
    if device != "cpu":
        return free_bytes_of(device, os.environ)
    from hypocenter.model.tensors.footprint import host_room  # which imports every kernel

    room = host_room()
    return None if room is None else room.available_bytes
