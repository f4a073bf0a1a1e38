"""`hypo serve`: starts the server and tells where it listens; knows nothing of HTTP."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path

from hypocenter.cli.options import EngineOptions, naming_options
from hypocenter.cli.output import say
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.cli.serve_options import ServeOptions
from hypocenter.config import DEFAULT_CONTEXT, EngineConfig
from hypocenter.errors import EXIT_OK, UsageError
from hypocenter.messages import ServedModel
from hypocenter.model.placement import with_device

#: Contexts that the KV cache holds unless it is told otherwise.
_NUM_CONTEXTS = 4
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(path: str, options: ServeOptions, engine: EngineConfig, *, quiet: bool) -> None:
    """Serve a model until a signal comes; leaves with the server's exit code.

    Raises UsageError for what cannot be served.
    """
    try:
        from hypocenter.server.serve import Listener, ServerConfig
        from hypocenter.server.serve import serve as run_server
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"hypo serve needs {missing.name}, which is not installed: "
            "pip install 'hypocenter[server]'"
        ) from missing
    if not Path(path).is_file():
        raise UsageError(f"{path}: no such file")
    with naming_options(EngineOptions):
        engine, choice = with_device(Path(path), engine)
    kv_tokens = options.kv_tokens
    if kv_tokens is None and not engine.device.startswith(("cuda", "hip")):
        context = engine.context_length or DEFAULT_CONTEXT
        kv_tokens = context * min(_NUM_CONTEXTS, options.parallel)
    keys = options.keys()
    # It warns of each piece that is sent to a client that has left.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    config = ServerConfig(
        model=str(Path(path).resolve()),
        engine=replace(engine, max_batch_requests=options.parallel, kv_tokens=kv_tokens),
        host=options.host,
        port=options.port,
        names=options.served_model_name,
        api_keys=keys,
        admin_key=options.admin(),
        cors_origins=options.cors_origin,
        allowed_hosts=options.allowed_host,
        max_queued=options.max_queued,
        max_bodies_bytes=options.body_memory << 20,
        grace_seconds=options.grace,
        step_seconds=options.deadline,
        has_spare=options.spare,
        unread_seconds=options.timeout,
        bundles=Path(options.bundles).resolve() if options.bundles else None,
    )
    if options.host not in _LOOPBACK and not keys:
        say(f"--host {options.host} lets others in, and there is no --api-key")
    with ProgressDisplay(quiet=quiet) as progress:

        def announce(url: str, facts: ServedModel) -> None:
            progress.clear()
            if not quiet:
                names = config.names or (Path(path).stem,)
                why = "" if choice is None else choice.reason
                for line in greeting(url, facts, names, keys, why):
                    say(line)

        code = run_server(config, Listener(say, progress, announce))
    if code != EXIT_OK:
        sys.exit(code)


def greeting(
    url: str, facts: ServedModel, names: tuple[str, ...], keys: tuple[str, ...], why: str = ""
) -> list[str]:
    """What a person needs to point a client there; `why` the model runs on its device."""
    kv_tokens = facts.num_blocks * facts.block_size
    key = "the key of --api-key" if keys else "any"
    return [
        f"serving {facts.name} at {url}",
        f"  OPENAI_BASE_URL={url}/v1",
        f"  OPENAI_API_KEY={key}",
        f"  model {names[0]}, {facts.context_length} tokens of context, {facts.max_requests} "
        "requests at once",
        f"  device {facts.device}{f' ({why})' if why else ''}, KV cache of {kv_tokens} tokens: "
        f"{kv_tokens / facts.context_length:.3g} full contexts",
    ]
