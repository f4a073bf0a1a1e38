"""The options of `hypo serve`, spelled as llama-server and vLLM spell them where they agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from hypocenter.base.errors import UsageError
from hypocenter.settings.config import MAX_KEY_BYTES, EngineConfig
from hypocenter.settings.environment import Environment
from hypocenter.settings.setting import settings_of

_ENGINE = settings_of(EngineConfig)
_SERVER_GROUP = Group("Server", sort_key=1)


@Parameter(name="*", group=_SERVER_GROUP)
@dataclass(frozen=True)
class ServeOptions:
    """Where the server listens, whom it answers, and how much it takes on."""

    config: Annotated[
        str | None,
        Parameter(
            name="--config",
            help="TOML file with options by name, such as port = 8000. What the command line and "
            "the environment (HYPO_SERVE_PORT) say comes before it.",
        ),
    ] = None
    host: Annotated[
        str, Parameter(name="--host", help="Address to listen at; 0.0.0.0 is every one.")
    ] = "127.0.0.1"
    port: Annotated[int, Parameter(name="--port", help="Port to listen at; 0 takes any.")] = 8080
    uds: Annotated[
        str | None,
        Parameter(
            name="--uds",
            help="Unix socket to listen at, in place of host and port; only this user may connect.",
        ),
    ] = None
    ssl_certfile: Annotated[
        str | None,
        Parameter(
            name=("--ssl-certfile", "--ssl-cert-file"),
            help="Certificate chain (PEM): clients then come by https, with TLS 1.2 or later.",
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Parameter(
            name=("--ssl-keyfile", "--ssl-key-file"),
            help="Its private key (PEM), without a password. [default: in the certificate's file]",
        ),
    ] = None
    root_path: Annotated[
        str,
        Parameter(
            name=("--root-path", "--api-prefix"),
            show_default=False,
            help="What a proxy puts before each path, such as /llm; it may take it off or not.",
        ),
    ] = ""
    api_key: Annotated[
        tuple[str, ...],
        Parameter(
            name="--api-key",
            negative="",
            show_default=False,
            help="Key that clients must have, for every route but /health and /ready; may be given "
            "again. Others can read a command line: HYPO_API_KEY and --api-key-file hide it.",
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Parameter(
            name="--api-key-file", help="File with a key on each line; SIGHUP reads it again."
        ),
    ] = None
    admin_key: Annotated[
        str | None,
        Parameter(
            name="--admin-key",
            help="Key of the routes below /debug/ and /models/; HYPO_ADMIN_KEY hides it.",
        ),
    ] = None
    parallel: Annotated[
        int,
        Parameter(
            name=_ENGINE["max_batch_requests"].cli_of_serve,
            help=_ENGINE["max_batch_requests"].help,
        ),
    ] = _ENGINE["max_batch_requests"].default
    kv_tokens: Annotated[
        int | None,
        Parameter(
            name=_ENGINE["kv_tokens"].cli_of_serve,
            help=f"{_ENGINE['kv_tokens'].help} [default: on a CPU "
            "--cpu-memory-fraction of what is available; on a GPU what "
            "--gpu-memory-fraction leaves]",
        ),
    ] = None
    replicas: Annotated[
        int,
        Parameter(
            name=("--replicas", "--data-parallel-size", "-dp"),
            help="Workers, each with a GPU of its own, or with as many as -tp says; on a CPU each "
            "has its part of the cores. -np and --kv-tokens are of each.",
        ),
    ] = 1
    max_queued: Annotated[
        int, Parameter(name="--max-queued", help="Requests that may wait; then come 429s.")
    ] = 512
    served_model_name: Annotated[
        tuple[str, ...],
        Parameter(
            name=("--served-model-name", "-a", "--alias"),
            negative="",
            show_default=False,
            help="Name that clients call the model by; may be given again. "
            "[default: the file's name]",
        ),
    ] = ()
    models_dir: Annotated[
        str | None,
        Parameter(
            name="--models-dir",
            help="Folder whose GGUF files are all served, each loaded when a request names it.",
        ),
    ] = None
    models_max: Annotated[
        int,
        Parameter(
            name="--models-max",
            help="Of several models: how many may be loaded at once; 0: as many as have room.",
        ),
    ] = 4
    sleep_idle_seconds: Annotated[
        float,
        Parameter(
            name="--sleep-idle-seconds",
            help="Seconds without a request after which a model is unloaded until the next one; "
            "-1: never.",
        ),
    ] = -1.0
    pin: Annotated[
        tuple[str, ...],
        Parameter(
            name="--pin",
            negative="",
            show_default=False,
            help="Model by its name that is loaded at the start and never unloaded; may be given "
            "again.",
        ),
    ] = ()
    cors_origin: Annotated[
        tuple[str, ...],
        Parameter(
            name="--cors-origin",
            negative="",
            show_default=False,
            help="Site whose pages may ask, such as https://example.com; may be given again.",
        ),
    ] = ()
    allowed_host: Annotated[
        tuple[str, ...],
        Parameter(
            name="--allowed-host",
            negative="",
            show_default=False,
            help="Name by which clients may call the server, such as llm.example.com, beside "
            "localhost; may be given again. Needed behind a proxy that passes its own name on.",
        ),
    ] = ()
    body_memory: Annotated[
        int,
        Parameter(
            name="--body-memory",
            help="MiB that requests being read and answers not sent yet may take together; "
            "then come 429s.",
        ),
    ] = 256
    grace: Annotated[
        float,
        Parameter(name="--grace", help="Seconds that open answers get after SIGTERM or Ctrl-C."),
    ] = 30.0
    deadline: Annotated[
        float,
        Parameter(
            name="--deadline",
            help="Seconds that a step may take before its worker is replaced; the first one, which "
            "compiles, gets 600.",
        ),
    ] = 120.0
    spare: Annotated[
        bool,
        Parameter(
            name="--spare",
            help="Have another worker wait, started and without the model, to take over at once.",
        ),
    ] = True
    timeout: Annotated[
        float,
        Parameter(
            name=("--timeout", "-to"),
            help="Seconds after which a client that takes nothing of its answer is left.",
        ),
    ] = 600.0
    bundles: Annotated[
        str | None,
        Parameter(
            name="--bundles",
            help="Folder for what a worker leaves that dies of a fault; the last eight are kept. "
            "An empty text keeps none. [default: hypo-faults]",
        ),
    ] = None
    slot_save_path: Annotated[
        str | None,
        Parameter(
            name="--slot-save-path",
            help="Folder in which clients may save their prompts by /slots, and restore them; on "
            "the CPU.",
        ),
    ] = None
    canary_minutes: Annotated[
        float,
        Parameter(
            name="--canary-minutes",
            help="Between two prompts of the server's own, also asked after each restart, whose "
            "tokens must be the first ones again; 0 asks none.",
        ),
    ] = 10.0
    webui: Annotated[
        bool,
        Parameter(
            name=("--webui", "--ui"),
            help="Show people a page at / to chat with the model, and one at /live that the admin "
            "key opens.",
        ),
    ] = True
    otlp_traces_endpoint: Annotated[
        str | None,
        Parameter(
            name="--otlp-traces-endpoint",
            help="Collector that traces of requests are sent to, by OTLP over HTTP, such as "
            "http://localhost:4318/v1/traces; needs the extra otel.",
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        Parameter(
            name="--log-level",
            help="What the log tells: info has a line for each request, debug also for probes. "
            "[default: HYPO_LOG, or info]",
        ),
    ] = None
    log_format: Annotated[
        Literal["text", "json"],
        Parameter(name="--log-format", help="Lines for people, or a JSON object on each."),
    ] = "text"
    log_file: Annotated[
        str | None,
        Parameter(
            name="--log-file",
            help="File for the log, in place of stderr; SIGHUP and SIGUSR1 open it anew.",
        ),
    ] = None

    def admin(self) -> str | None:
        """The key of the routes below /debug/ and /models/, or None: they are closed."""
        return self.admin_key or Environment.read().admin_key or None

    def keys(self) -> tuple[str, ...]:
        """All keys of clients. Raises UsageError for a file without any."""
        keys = [*self.api_key, *filter(None, [Environment.read().api_key])]
        if self.api_key_file is not None:
            try:
                with open(self.api_key_file, encoding="utf-8") as file:
                    lines = file.read(MAX_KEY_BYTES).split("\n")
            except OSError as error:
                reason = error.strerror
                raise UsageError(f"--api-key-file {self.api_key_file}: {reason}") from error
            except UnicodeDecodeError:
                raise UsageError(f"--api-key-file {self.api_key_file} is not UTF-8") from None
            found = [line.strip() for line in lines if line.strip()]
            if not found:
                raise UsageError(f"--api-key-file {self.api_key_file} holds no key")
            keys += found
        if any(not key.strip() for key in keys):
            raise UsageError("an --api-key is empty; leave it out to let everybody in")
        return tuple(keys)
