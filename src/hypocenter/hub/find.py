"""The door: a model's name, whatever its form, to a file on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hypocenter.hub import cached, download
from hypocenter.hub.names import FileAddress, remote_name
from hypocenter.settings.config import OnProgress


def find_model(
    text: str,
    *,
    architectures: frozenset[str],
    room_bytes: int | None = None,
    is_hub: bool = False,
    is_newest: bool = False,
    progress: OnProgress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """The file that `text` names: a path, or a model of a hub or server, which is fetched.

    What is here is taken as it is, and no network is asked, unless the hub's newest is wanted. A
    model without a tag is one that fits into `room_bytes` of memory and is of one of
    `architectures`. With `is_hub` the text is no path. Raises UsageError for what cannot be a
    model's name, ModelNotFound and HubError.
    """
    if not is_hub and os.path.lexists(text):
        return Path(text)
    name = remote_name(text, is_hub=is_hub)
    if name is None:
        return Path(text)
    report = progress or (lambda what, share: None)
    if isinstance(name, FileAddress):
        return download.pull_file(name, report, say)
    found = None if is_newest else cached.find_cached(name)
    if found is not None:
        variant, path = found
        if not name.tag and not name.file:
            say(f"{name}: {variant}, which is here; `hypo pull` asks for others")
        return path
    return download.pull(name, report, say, room_bytes=room_bytes, architectures=architectures)
