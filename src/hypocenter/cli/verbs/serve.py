"""`hypo serve`: starts the server and tells where it listens; knows nothing of HTTP."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hypocenter.base.errors import EXIT_OK, HypoError, UsageError
from hypocenter.base.wording import bytes_text, count_text
from hypocenter.cli.options import EngineOptions, message_of, naming_options
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.cli.serve_options import ServeOptions
from hypocenter.cli.served_models import NamedModel, ServedChoice
from hypocenter.settings.adapters import read_choice
from hypocenter.settings.config import DEFAULT_CONTEXT, EngineConfig, is_simulated
from hypocenter.settings.environment import chosen_log
from hypocenter.wire.messages import ServedModel

if TYPE_CHECKING:
    from hypocenter.server.hosting.terms import ModelTerms
    from hypocenter.server.operating.log import Sink
    from hypocenter.server.serve import ServerConfig

#: --sleep-idle-seconds of who is not to sleep.
_NEVER = -1.0
#: Contexts that the KV cache holds on a simulated GPU unless it is told otherwise.
_NUM_CONTEXTS = 4
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    choice: ServedChoice, options: ServeOptions, engine: EngineConfig, *, quiet: bool
) -> None:
    """Serve models until a signal comes; leaves with the server's exit code.

    Raises UsageError for what cannot be served.
    """
    try:
        import hypocenter.server.serve  # noqa: F401 - what it needs may not be installed
        from hypocenter.server.operating.log import LogSettings, logging_to, tell
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"hypo serve needs {missing.name}, which is not installed: "
            "pip install 'hypocenter[server]'"
        ) from missing
    settings = LogSettings(
        level=options.log_level or chosen_log() or ("warning" if quiet else "info"),
        format=options.log_format,
        file=None if options.log_file is None else Path(options.log_file).absolute(),
    )
    with logging_to(settings) as sink:
        # It warns of each piece that is sent to a client that has left.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        try:
            code = _serve(choice, options, engine, sink, quiet=quiet)
        except HypoError as error:
            # On stderr it is told in any case; a log that is read by a program has it as well.
            if settings.file is not None or settings.format == "json":
                tell(logging.ERROR, "failed", message_of(error))
            raise
    if code != EXIT_OK:
        sys.exit(code)


def _serve(
    choice: ServedChoice, options: ServeOptions, engine: EngineConfig, sink: Sink, *, quiet: bool
) -> int:
    from hypocenter.server.operating.log import tell
    from hypocenter.server.operating.signals import Renewal
    from hypocenter.server.serve import Listener
    from hypocenter.server.serve import serve as run_server

    if engine.draft_model and len(choice.models) > 1:
        raise UsageError(
            "--model-draft names the draft model of one model, but several are served; leave it out"
        )
    if engine.lora and len(choice.models) > 1:
        raise UsageError(
            "--lora names adapters of one model, but several are served; give each its lora in the "
            "file of --config"
        )
    found = [_terms(model, options, engine) for model in choice.models]
    first, why = found[0]
    config = _config(options, tuple(terms for terms, _ in found), on_demand=choice.on_demand)
    name = first.all_names[0]
    reads_keys = options.api_key_file is not None
    renewal = Renewal(sink, options.keys if reads_keys else None)
    if options.uds is None and options.host not in _LOOPBACK and not config.api_keys:
        message = f"--host {options.host} lets others in, and there is no --api-key: anyone on the "
        message += "network may use the server"
        tell(logging.WARNING, "open_to_all", message)
    num_cpus = len(os.sched_getaffinity(0))
    if first.engine.device == "cpu" and (engine.num_threads or 0) > num_cpus:
        message = f"-t/--threads is {engine.num_threads}, but this process may use {num_cpus} CPUs"
        tell(logging.WARNING, "too_many_threads", f"{message}: it takes {num_cpus}")

    def say(line: str) -> None:
        tell(logging.INFO, "progress", line)

    with ProgressDisplay(quiet=quiet, say=say) as progress:

        def announce(url: str, model: ServedModel | None) -> None:
            progress.clear()
            if model is None:
                lines = greeting_of_several(url, config)
                tell(logging.INFO, "serving", lines[0], url=url, models=len(config.models))
            else:
                lines = greeting(url, model, config, name, why)
                tell(logging.INFO, "serving", lines[0], url=url, model=name)
            for line in lines[1:]:
                tell(logging.INFO, "hint", line)

        return run_server(config, Listener(progress, announce), renewal)


def _terms(
    model: NamedModel, options: ServeOptions, engine: EngineConfig
) -> tuple[ModelTerms, str]:
    """How a model is served, and why on its device, where that is not what was asked for.

    Raises UsageError for what cannot be.
    """
    from hypocenter.device.choice import with_device, with_replicas
    from hypocenter.server.hosting.terms import ModelTerms

    table = model.table
    parallel = options.parallel if table.parallel is None else table.parallel
    num_replicas = options.replicas if table.replicas is None else table.replicas
    engine = replace(
        engine,
        device=engine.device if table.device is None else table.device,
        context_length=engine.context_length if table.ctx_size is None else table.ctx_size,
        max_batch_requests=parallel,
        lora=tuple(map(_with_whole_path, table.lora or engine.lora)),
        draft_model=engine.draft_model and str(Path(engine.draft_model).resolve()),
    )
    with naming_options(EngineOptions):
        engine, choice = with_device(Path(model.path), engine, num_replicas=num_replicas)
    engine, devices = with_replicas(engine, num_replicas)
    kv_tokens = options.kv_tokens if table.kv_tokens is None else table.kv_tokens
    if kv_tokens is None and is_simulated(engine.device):
        context = engine.context_length or DEFAULT_CONTEXT
        kv_tokens = context * min(_NUM_CONTEXTS, parallel)
    idle = table.sleep_idle_seconds
    idle = options.sleep_idle_seconds if idle is None else idle
    names = model.names or (Path(model.path).stem,)
    terms = ModelTerms(
        path=str(Path(model.path).resolve()),
        names=names,
        engine=replace(engine, kv_tokens=kv_tokens),
        devices=devices,
        is_pinned=table.pinned or any(name in options.pin for name in names),
        idle_seconds=None if idle == _NEVER else idle,
        max_queued=options.max_queued if table.max_queued is None else table.max_queued,
    )
    return terms, "" if choice is None else choice.reason


def _with_whole_path(adapter: str) -> str:
    """The same adapter, for workers."""
    choice = read_choice(adapter)
    return choice.written_with(str(Path(choice.path).resolve()))


def _config(
    options: ServeOptions, models: tuple[ModelTerms, ...], *, on_demand: bool
) -> ServerConfig:
    """Raises UsageError for what cannot be."""
    from hypocenter.server.faults import folder_of
    from hypocenter.server.operating.listening import Certificate
    from hypocenter.server.serve import ServerConfig

    if options.ssl_keyfile is not None and options.ssl_certfile is None:
        raise UsageError("--ssl-keyfile needs --ssl-certfile; give both")
    certificate = None
    if options.ssl_certfile is not None:
        key = None if options.ssl_keyfile is None else Path(options.ssl_keyfile).absolute()
        certificate = Certificate(Path(options.ssl_certfile).absolute(), key)
    save = options.slot_save_path
    return ServerConfig(
        models=models,
        loads_on_demand=on_demand,
        max_loaded=options.models_max,
        host=options.host,
        port=options.port,
        unix_socket=None if options.uds is None else Path(options.uds).absolute(),
        certificate=certificate,
        root_path=options.root_path,
        api_keys=options.keys(),
        admin_key=options.admin(),
        cors_origins=options.cors_origin,
        allowed_hosts=options.allowed_host,
        max_bodies_bytes=options.body_memory << 20,
        grace_seconds=options.grace,
        step_seconds=options.deadline,
        has_spare=options.spare,
        unread_seconds=options.timeout,
        bundles=folder_of(options.bundles),
        slot_save_path=None if save is None else Path(save).absolute(),
        canary_minutes=options.canary_minutes,
        has_pages=options.webui,
        traces_endpoint=options.otlp_traces_endpoint or "",
    )


def greeting(
    url: str, model: ServedModel, config: ServerConfig, name: str, why: str = ""
) -> list[str]:
    """What a person needs to point a client there; `why` the model runs on its device."""
    kv_tokens = model.num_blocks * model.block_size
    key = "the key of --api-key" if config.api_keys else "any"
    lines = [
        f"serving {model.name} at {url}{config.root_path}",
        f"  OPENAI_BASE_URL={url}{config.root_path}/v1",
        f"  OPENAI_API_KEY={key}",
        f"  model {name}, {model.context_length} tokens of context, {model.max_requests} "
        "requests at once",
        f"  device {model.device}{f' ({why})' if why else ''}, KV cache of {kv_tokens} tokens: "
        f"{kv_tokens / model.context_length:.3g} full contexts",
    ]
    if model.host_weight_bytes:
        lines.append(f"  experts on the host: {bytes_text(model.host_weight_bytes)}")
    if len(devices := config.models[0].devices) > 1:
        lines.append(f"  replicas on {', '.join(devices)}; requests and cache are of all")
    if config.unix_socket is not None:
        trust = "--cacert FILE " if config.certificate is not None else ""
        lines.append(f"  curl {trust}--unix-socket {config.unix_socket} {url}/v1/models")
    return lines


def greeting_of_several(url: str, config: ServerConfig) -> list[str]:
    """The same, for models that are loaded when they are asked for."""
    key = "the key of --api-key" if config.api_keys else "any"
    pinned = [terms.all_names[0] for terms in config.models if terms.is_pinned]
    at_once = f"at most {config.max_loaded} at once" if config.max_loaded else "all that have room"
    lines = [
        f"serving {count_text(len(config.models), 'model')} at {url}{config.root_path}",
        f"  OPENAI_BASE_URL={url}{config.root_path}/v1",
        f"  OPENAI_API_KEY={key}",
        f"  loaded when a request names them, {at_once}: {url}{config.root_path}/v1/models",
    ]
    if pinned:
        lines.append(f"  loaded now, to stay: {', '.join(pinned)}")
    return lines
