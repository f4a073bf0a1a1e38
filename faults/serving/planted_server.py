"""The program of a server whose workers have defects; the server itself is the one of `hypo serve`.

`python -m faults.serving.planted_server ORDER`, where ORDER is a `ServerOrder` as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from faults.report import environment_of, module_command
from hypocenter.base.errors import HypoError
from hypocenter.settings.config import EngineConfig

_WORKER = "faults.serving.planted_worker"


class ServerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What is served where; `plant` is a `Plant` as JSON, `bundles` a folder or empty."""

    model: str
    engine: EngineConfig
    port: int
    admin_key: str
    plant: str
    step_seconds: float = 120.0
    bundles: str = ""


def main(words: Sequence[str]) -> int:
    """Serve until a signal comes; returns the server's exit code."""
    from hypocenter.server.hosting.terms import ModelTerms
    from hypocenter.server.serve import Listener, ServerConfig, serve

    order = msgspec.json.decode(words[0], type=ServerOrder)
    config = ServerConfig(
        models=(ModelTerms(path=order.model, engine=order.engine),),
        port=order.port,
        admin_key=order.admin_key,
        step_seconds=order.step_seconds,
        first_step_seconds=order.step_seconds,
        worker=(_WORKER, order.plant),
        bundles=Path(order.bundles) if order.bundles else None,
    )
    try:
        return serve(config, Listener())
    except HypoError as error:
        _tell(str(error))
        return error.exit_code


def command(order: ServerOrder) -> list[str]:
    """The command line of such a server; it and its workers find what is here."""
    program = module_command("faults.serving.planted_server")
    path = f"PYTHONPATH={environment_of()['PYTHONPATH']}"
    return ["env", path, *program, msgspec.json.encode(order).decode()]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
