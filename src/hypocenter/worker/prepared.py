"""What a process does that was started before its words were known: it imports, and waits.

`watch/prepared.py` is the other side.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence

from hypocenter.device.gpu.context import begin_context
from hypocenter.device.gpu.presence import vendor_and_index

PREPARED = "--prepared"
#: As of who is started by a thread that has them blocked.
_FOR_THE_SERVER = (signal.SIGHUP, signal.SIGUSR1)


def words_of(words: Sequence[str]) -> Sequence[str]:
    """The words of the command; they come by stdin where the process was only prepared.

    Then the environment is made that of the command, and what comes after the first word is
    imported. The third word of what is told may be a device. Ends the process where nobody tells.
    """
    if list(words[:1]) != [PREPARED]:
        return words
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_SERVER)
    told: list[str] = []
    hearing = threading.Thread(target=_hear, args=[told], name="prepared", daemon=True)
    hearing.start()
    for name in words[1:]:
        with contextlib.suppress(ImportError):  # whoever needs it tells of that
            importlib.import_module(name)
    hearing.join()
    if not told:
        sys.exit(0)
    return told


def _become(environ: dict[str, str]) -> None:
    """Make the environment that of the command. What is the same is left alone: libraries that are
    being loaded may read theirs at any moment."""
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    for name, text in environ.items():
        if os.environ.get(name) != text:
            os.environ[name] = text


def _hear(told: list[str]) -> None:
    line = sys.stdin.buffer.readline()
    if not line:
        return
    message = json.loads(line)
    _become(message["environ"])
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    for device in message["words"][2:3]:
        if device.partition(":")[0] in ("cuda", "hip"):
            begin_context(*vendor_and_index(device))
    told.extend(message["words"])
