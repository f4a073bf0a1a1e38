"""`hypo cache`: what the cache folder holds, and its clearing."""

from __future__ import annotations

import shutil

import msgspec

from hypocenter.cli.output import show, show_json
from hypocenter.settings.cache_folder import folder_bytes, private_folder
from hypocenter.settings.environment import Environment

#: Folders of the cache and what they hold; all of it is computed again when it is needed.
_HOLDS = {
    "kernels": "machine code of CPU kernels",
    "triton": "machine code of GPU kernels",
    "weights": "packed weights of models",
    "layouts": "where weights lie on GPUs",
    "lab": "models and kernels with planted faults",
}


class _Part(msgspec.Struct):
    folder: str
    holds: str
    num_bytes: int


def cache(*, clear: bool, as_json: bool) -> None:
    """Print size and place of each part; with `clear` remove them first.

    Raises OSError for what cannot be removed.
    """
    if clear:
        for name in _HOLDS:
            folder, _ = private_folder(name)
            if folder is not None:
                shutil.rmtree(folder)
    environment = Environment.read()
    folders = {name: environment.cache_dir / name for name in _HOLDS}
    parts = [
        _Part(str(folder), _HOLDS[name], folder_bytes(folder)) for name, folder in folders.items()
    ]
    if as_json:
        show_json(parts)
        return
    for part in parts:
        show(f"{part.num_bytes / (1 << 20):10.1f} MiB  {part.holds:27}  {part.folder}")
    show(f"{'':14}  {'records of runs':27}  {environment.run_dir}")
