"""Processes of our own modules that are started before anybody knows what they will be told.

They import meanwhile. Each becomes the process of a command of its module: the words of that, and
its environment, are a line of JSON on its stdin. One that nobody takes ends with us.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence

from hypocenter.base.package import module_command
from hypocenter.settings.environment import SECRETS

#: The first word of one; what it imports besides follows.
PREPARED = "--prepared"
_STDOUT = 2
_waiting: dict[str, subprocess.Popen[bytes]] = {}


def prepare(module: str, imports: Sequence[str]) -> None:
    """Start a process of `module`, which imports these as well; where that fails there is none."""
    if not _waiting:
        atexit.register(drop)  # they have our stderr, for whose end somebody may wait
    with contextlib.suppress(OSError):
        _waiting[module] = subprocess.Popen(
            [*module_command(module), PREPARED, *imports],
            env={name: text for name, text in os.environ.items() if name not in SECRETS},
            stdin=subprocess.PIPE,
            stdout=_STDOUT,
            stderr=subprocess.PIPE,
            process_group=0,
        )


def take(
    command: Sequence[str], environment: Mapping[str, str], stdout: int | None
) -> subprocess.Popen[bytes] | None:
    """The process that was prepared for a command, and has it now; None: there is none.

    Its stdin is empty, its stderr a pipe, and it leads a process group.
    """
    for module in [*_waiting] if stdout == _STDOUT else ():
        own = module_command(module)
        if list(command[: len(own)]) != own or (process := _waiting.pop(module, None)) is None:
            continue
        told = {"words": list(command[len(own) :]), "environ": dict(environment)}
        try:
            assert process.stdin is not None, "it has a pipe"
            process.stdin.write(json.dumps(told).encode() + b"\n")
            process.stdin.close()
        except OSError:  # it has ended
            _end(process)
            return None
        return process
    return None


def drop() -> None:
    """End those that nobody has taken."""
    while _waiting:
        _end(_waiting.popitem()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stderr):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
