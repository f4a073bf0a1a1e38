"""The program of a server whose workers die of one request: `… PORT KEY`."""

from __future__ import annotations

import sys

from faults.model import model_path
from hypocenter.server.hosting.terms import ModelTerms
from hypocenter.server.serve import Listener, ServerConfig, serve
from hypocenter.settings.config import EngineConfig


def main(words: list[str]) -> int:
    """Serve until a signal comes; returns the server's exit code."""
    port, key = words
    engine = EngineConfig(device="cpu", max_batch_requests=16, kv_tokens=1 << 13)
    config = ServerConfig(
        models=(ModelTerms(path=str(model_path()), engine=engine),),
        port=int(port),
        admin_key=key,
        worker=("attack.poisoned_worker",),
    )

    return serve(config, Listener())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
