"""The program of one attack: `python -m attack.program NAME PORT SOURCE KEYS NUM SECONDS`.

It prints a line once what it sends is made, attacks from then on, ends by itself, and prints as
JSON what became of its requests. KEYS are joined by commas.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from types import ModuleType

from attack import bodies, connections, work
from attack.aim import Aim

#: What the attacker may take of the machine.
_MEMORY_BYTES = 3 << 30


def client_of(name: str) -> Callable[[Aim, int], None]:
    """The function `module.name` of an attack."""
    modules: dict[str, ModuleType] = {
        "connections": connections, "bodies": bodies, "work": work,
    }  # fmt: skip
    module, _, function = name.partition(".")
    found: Callable[[Aim, int], None] = getattr(modules[module], function)
    return found


def main(words: list[str]) -> None:
    """Attack, and say how it went."""
    name, port, source, keys, num, seconds = words
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    client = client_of(name)
    getattr(client, "prepare", lambda: None)()
    print("begins", flush=True)
    aim = Aim(
        port=int(port),
        source=source,
        keys=tuple(filter(None, keys.split(","))),
        stop=time.monotonic() + float(seconds),
        num=int(num),
    )
    aim.together(client)
    print(json.dumps(dict(aim.seen)), flush=True)
    os._exit(0)  # whatever its threads still wait for


if __name__ == "__main__":
    main(sys.argv[1:])
