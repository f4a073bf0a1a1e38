"""`hypo pull` and `hypo models`: what is fetched from hubs, and what of that is here."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from hypocenter.base.errors import UsageError
from hypocenter.base.wording import bytes_text
from hypocenter.cli.output import say, show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.hub import cached, download
from hypocenter.hub.names import RemoteName, remote_name
from hypocenter.model.from_name import file_of
from hypocenter.settings.cache_folder import private_folder


class _Fetched(msgspec.Struct):
    name: str
    path: str
    num_bytes: int


class _Here(msgspec.Struct):
    name: str
    num_bytes: int
    last_used: str
    path: str


def model_file(
    name: str,
    *,
    is_hub: bool = False,
    is_newest: bool = False,
    device: str = "cpu",
    quiet: bool = False,
) -> str:
    """The file that `name` stands for; what is elsewhere is fetched, with progress on stderr.

    With `is_newest` the hub is asked whether it has changed. Raises UsageError, ModelNotFound.
    """
    if not name:
        raise UsageError("the model's name is empty; give the path of a GGUF file")
    with ProgressDisplay(quiet=quiet) as progress:

        def tell(text: str) -> None:
            if not quiet:
                progress.clear()
                say(text)

        return str(
            file_of(
                name,
                device=device,
                is_hub=is_hub,
                is_newest=is_newest,
                progress=progress,
                say=tell,
            )
        )


def pull(name: str, *, as_json: bool, quiet: bool) -> None:
    """Fetch and say where. Raises UsageError for a path, ModelNotFound, HubError."""
    path = model_file(name, is_hub=True, is_newest=True, quiet=quiet)
    if as_json:
        show_json(_Fetched(name, path, Path(path).stat().st_size))
    else:
        show(path)


def models(action: str, name: str | None, *, as_json: bool) -> None:
    """List or remove. Raises UsageError, and ModelNotFound for what is not here."""
    if action == "list" and name is not None:
        raise UsageError(f"list takes no name, but {name!r} was given")
    if action == "remove" and name is None:
        raise UsageError("remove takes a name; `hypo models` shows them")
    others, _ = private_folder(download.FOLDER)
    if name is not None:
        removed = cached.remove(_remote(name), others)
        if as_json:
            show_json(removed)
            return
        what = ", ".join(removed.names) or "what broke off"
        say(f"removed {what}: {bytes_text(removed.num_bytes)}")
        for left in removed.left:
            say(left)
        return
    found = [
        _Here(model.name, model.num_bytes, _day(model.last_used), str(model.path))
        for model in cached.cached_models(others)
    ]
    if as_json:
        show_json(found)
    elif not found:
        say("no models are here; `hypo pull OWNER/NAME` fetches one")
    else:
        width = max(len(model.name) for model in found)
        for model in found:
            size = bytes_text(model.num_bytes)
            show(f"{model.name:{width}}  {size:>11}  {model.last_used}  {model.path}")


def _remote(name: str) -> RemoteName:
    found = remote_name(name, is_hub=True)
    assert found is not None, name
    return found


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
