"""Has the processes of `hypo serve` import while the command line is read; knows no option."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hypocenter.base.cards import gpu_vendors
from hypocenter.watch.prepared import prepare

#: And what each imports at the first use of a GPU, which takes longer than all else before that.
_PROGRAMS = {
    "hypocenter.worker.keeper": ("torch",),
    "hypocenter.worker.worker": ("torch", "triton"),
}


def begin(
    words: Sequence[str], environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> None:
    """Start what a server will need on a GPU, if there is one and no word asks for another device.

    What is wrong with the words is told later; then nobody takes these processes.
    """
    asked = [*words, environ.get("HYPO_DEVICE", ""), environ.get("HYPO_SERVE_DEVICE", "")]
    devices = {word.rpartition("=")[2].partition(":")[0] for word in asked}
    if gpu_vendors(root) and not devices & {"cpu", "sim", "emu", "-h", "--help"}:
        for module, imports in _PROGRAMS.items():
            prepare(module, imports)
